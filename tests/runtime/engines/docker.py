"""Docker's daemon."""

import json
from collections.abc import Mapping, Sequence

from tests.runtime.engines.engine import Asked, Engine, volume
from tests.runtime.engines.gvisor import OPTIONS as GVISOR
from tests.runtime.engines.image import NAME
from tests.runtime.engines.machine import Machine


class Cli(Engine):
    """The common commands of Docker and Podman, which begin with ``_command``."""

    _program: str
    _command: tuple[str, ...]
    _limits: tuple[str, ...] = ()
    _kill: tuple[str, ...] = ()

    def tell(self, *words: str) -> str:
        return self.machine.run("sh", "-c", 'cd /; exec "$@"', "sh", *self._command, *words).strip()

    def start(self, asked: Asked, *options: str) -> None:
        words = ["run", "--detach", "--network=none", f"--name={asked.name}", *self._limits, *options]
        words += [f"--volume={volume(mount)}" for mount in asked.mounts]
        words += [f"--env={key}={value}" for key, value in asked.env.items()]
        self.tell(*words, NAME, *asked.command)

    def enter(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        words = [f"--env={key}={value}" for key, value in env.items()]
        self.tell("exec", "--detach", *words, name, *command)

    def ids(self, name: str) -> dict[str, str]:
        only = ("--quiet", f"--filter=name={name}")
        return {
            f"{self._program} inspect": self.tell("inspect", "--format={{.Id}}", name),
            f"{self._program} ps --no-trunc": self.tell("ps", "--no-trunc", *only),
            f"{self._program} ps": self.tell("ps", *only),
        }

    def names(self, name: str) -> list[str]:
        return [name]

    def stop(self, name: str) -> None:
        self.tell("rm", "--force", *self._kill, name)


class Docker(Cli):
    """A Docker without a network, with an own containerd."""

    _program = "docker"
    _command = ("docker", "--host", "unix:///run/docker.sock")

    def __init__(self, machine: Machine, *options: str, driver: str = "overlay2") -> None:
        super().__init__(machine)
        # A runtime has options in the file alone.
        runtimes = {"runsc": {"path": "/usr/bin/runsc", "runtimeArgs": list(GVISOR)}}
        config = machine.work / "docker.json"
        config.write_text(json.dumps({"runtimes": runtimes}))
        machine.daemon(
            *("dockerd", "--config-file", config),
            *("--iptables=false", "--ip6tables=false", "--bridge=none", f"--storage-driver={driver}"),
            *("--data-root", machine.work / "docker", "--exec-root", "/run/docker"),
            *("--host", "unix:///run/docker.sock", "--pidfile", "/run/docker.pid", *options),
        )
        machine.until(*self._command, "info")
        self.tell("load", "--input", str(machine.work / "image.tar"))
