"""Podman, which has no daemon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.runtime.engines.engine import Asked, volume
from tests.runtime.engines.image import NAME
from tests.runtime.engines.machine import Machine

#: Who is root in rootless containers.
_USER = "tenant"


class Podman:
    """Of root, or of a user (``rootless``); ``runtime`` is crun or runc."""

    def __init__(self, machine: Machine, runtime: str, *, rootless: bool = False) -> None:
        self.machine = machine
        place = machine.work / "podman"
        self._podman: tuple[str, ...] = (
            *("podman", "--root", str(place), "--runroot", "/run/podman", "--runtime", runtime),
            *("--cgroup-manager", "cgroupfs", "--storage-driver", "vfs", "--events-backend", "file"),
        )
        if rootless:
            machine.run("useradd", "--create-home", "--shell", "/bin/sh", _USER)
            for path in (place, "/run/podman", "/run/user/tenant"):
                machine.run("install", "-d", "-o", _USER, "-m", "700", path)
            self._podman = (
                *("setpriv", "--reuid", _USER, "--regid", _USER, "--init-groups", "--reset-env"),
                *("env", "XDG_RUNTIME_DIR=/run/user/tenant", *self._podman),
            )
            if machine.view == "v2":  # of version 1 no part is ever handed to a user
                self._podman = (*_delegated(machine), *self._podman)
        self.tell("load", "--input", str(machine.work / "image.tar"))

    def tell(self, *words: str) -> str:
        """What a command of ``podman`` prints."""
        return self.machine.run("sh", "-c", 'cd /; exec "$@"', "sh", *self._podman, *words).strip()

    def start(self, asked: Asked, *options: str) -> None:
        # Its defaults raise limits, which takes CAP_SYS_RESOURCE; of version 2 there may be no controllers.
        limits = ("--ulimit=nofile=1000:1000", "--ulimit=nproc=1000:1000", "--pids-limit=-1")
        words = ["run", "--detach", "--network=none", f"--name={asked.name}", *limits, *options]
        words += [f"--volume={volume(mount)}" for mount in asked.mounts]
        words += [f"--env={key}={value}" for key, value in asked.env.items()]
        self.tell(*words, NAME, *asked.command)

    def enter(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        words = [f"--env={key}={value}" for key, value in env.items()]
        self.tell("exec", "--detach", *words, name, *command)

    def ids(self, name: str) -> dict[str, str]:
        only = ("--quiet", f"--filter=name={name}")
        return {
            "podman inspect": self.tell("inspect", "--format={{.Id}}", name),
            "podman ps --no-trunc": self.tell("ps", "--no-trunc", *only),
            "podman ps": self.tell("ps", *only),
        }

    def names(self, name: str) -> list[str]:
        return [name]

    def stop(self, name: str) -> None:
        self.tell("rm", "--force", "--time=0", name)


def _delegated(machine: Machine) -> tuple[str, ...]:
    """A prefix: in a cgroup that is the user's, as systemd gives one to each user."""
    place = "/sys/fs/cgroup/user.slice/user-1000.slice/user@1000.service"
    machine.run("sh", "-ec", f"mkdir -p {place}/app; chown -R {_USER} {place}")
    return ("sh", "-ec", f'echo $$ >{place}/app/cgroup.procs; exec "$@"', "sh")
