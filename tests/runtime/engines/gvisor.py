"""gVisor: its ``runsc`` alone."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.runtime.engines.engine import Asked, Engine
from tests.runtime.engines.machine import Machine

#: Without the right to virtualize, and on any kernel.
OPTIONS = ("--network=none", "--platform=ptrace")


class GVisor(Engine):
    """Containers of runsc; a container's option is its cgroup."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._runsc: tuple[str | Path, ...] = ("runsc", *OPTIONS, "--root", machine.work / "runsc")

    def start(self, asked: Asked, *options: str) -> None:
        config = {
            "ociVersion": "1.0.2",
            "process": {
                "args": asked.command,
                "cwd": "/",
                "user": {"uid": 0, "gid": 0},
                "env": [f"{key}={value}" for key, value in asked.env.items()],
            },
            "root": {"path": str(self.machine.work / "rootfs")},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                *(
                    {
                        "destination": mount.target,
                        "type": "bind",
                        "source": str(mount.source),
                        "options": ["rbind", "ro" if mount.read_only else "rw"],
                    }
                    for mount in asked.mounts
                ),
            ],
            "linux": {"namespaces": [{"type": "pid"}, {"type": "mount"}], "cgroupsPath": options[0]},
        }
        bundle = self.machine.work / "bundle"
        bundle.mkdir()
        (bundle / "config.json").write_text(json.dumps(config))
        words = ("run", "--detach", "--bundle", bundle, asked.name)
        self.machine.run(
            "sh", "-c", f'exec "$@" >>{self.machine.work}/runsc.log 2>&1', "sh", *self._runsc, *words
        )

    def enter(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        words = [f"--env={key}={value}" for key, value in env.items()]
        # In the background: with --detach it waits ten seconds for itself.
        self.machine.daemon(*self._runsc, "exec", *words, name, *command)

    def ids(self, name: str) -> dict[str, str]:
        listed = self.machine.run(*self._runsc, "list", "-quiet").split()
        return {"runsc list": next(each for each in listed if each == name)}

    def stop(self, name: str) -> None:
        self.machine.run(*self._runsc, "delete", "-force", name)
