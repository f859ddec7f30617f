"""LXC: containers by name, which have no id."""

import shutil
from collections.abc import Mapping, Sequence

from tests.runtime.engines.engine import Asked, Engine
from tests.runtime.engines.machine import Machine


class Lxc(Engine):
    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._path = machine.work / "lxc"

    def start(self, asked: Asked, *options: str) -> None:
        place = self._path / asked.name
        shutil.copytree(self.machine.work / "rootfs", place / "rootfs", symlinks=True)
        lines = [
            f"lxc.rootfs.path = dir:{place / 'rootfs'}",
            f"lxc.uts.name = {asked.name}",
            "lxc.mount.auto = proc:rw sys:ro",
            "lxc.net.0.type = empty",
            "lxc.apparmor.profile = unconfined",
            "lxc.cgroup.relative = 1",  # relative to its cgroup instead of PID 1's
            *(f"lxc.environment = {key}={value}" for key, value in asked.env.items()),
            *options,
        ]
        for mount in asked.mounts:
            kind = "ro" if mount.read_only else "rw"
            lines.append(
                f"lxc.mount.entry = {mount.source} {mount.target[1:]} none bind,{kind},create=dir 0 0"
            )
        (place / "config").write_text("\n".join([*lines, ""]))
        self._tell("lxc-start", asked.name, "--daemon", "--", *asked.command)

    def enter(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        words = [f"--set-var={key}={value}" for key, value in env.items()]
        self.machine.daemon("lxc-attach", f"--lxcpath={self._path}", f"--name={name}", *words, "--", *command)

    def ids(self, name: str) -> dict[str, str]:
        return {"lxc-ls": next(each for each in self._tell("lxc-ls").split() if each == name)}

    def stop(self, name: str) -> None:
        self._tell("lxc-stop", name, "--kill")

    def _tell(self, command: str, name: str = "", *words: str) -> str:
        named = [f"--name={name}"] if name else []
        return self.machine.run(command, f"--lxcpath={self._path}", *named, *words)
