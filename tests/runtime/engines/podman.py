"""Podman, which has no daemon."""

from tests.runtime.engines.docker import Cli
from tests.runtime.engines.machine import Machine

#: The user that is root in rootless containers.
_USER = "tenant"


class Podman(Cli):
    """Of root, or of a user (``rootless``); ``runtime`` is crun or runc."""

    _program = "podman"
    #: Its defaults raise limits, which takes CAP_SYS_RESOURCE; of version 2 there may be no controllers.
    _limits = ("--ulimit=nofile=1000:1000", "--ulimit=nproc=1000:1000", "--pids-limit=-1")
    _kill = ("--time=0",)

    def __init__(self, machine: Machine, runtime: str, *, rootless: bool = False) -> None:
        super().__init__(machine)
        place = machine.work / "podman"
        self._command = (
            *("podman", "--root", str(place), "--runroot", "/run/podman", "--runtime", runtime),
            *("--cgroup-manager", "cgroupfs", "--storage-driver", "vfs", "--events-backend", "file"),
        )
        if rootless:
            machine.run("useradd", "--create-home", "--shell", "/bin/sh", _USER)
            for path in (place, "/run/podman", "/run/user/tenant"):
                machine.run("install", "-d", "-o", _USER, "-m", "700", path)
            self._command = (
                *("setpriv", "--reuid", _USER, "--regid", _USER, "--init-groups", "--reset-env"),
                *("env", "XDG_RUNTIME_DIR=/run/user/tenant", *self._command),
            )
            if machine.view == "v2":  # of version 1 no part is ever handed to a user
                # In a cgroup that is the user's, as systemd gives one to each user.
                own = "/sys/fs/cgroup/user.slice/user-1000.slice/user@1000.service"
                machine.run("sh", "-ec", f"mkdir -p {own}/app; chown -R {_USER} {own}")
                enter = f'echo $$ >{own}/app/cgroup.procs; exec "$@"'
                self._command = ("sh", "-ec", enter, "sh", *self._command)
        self.tell("load", "--input", str(machine.work / "image.tar"))
