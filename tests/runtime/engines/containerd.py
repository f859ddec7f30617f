"""containerd, by its own client ``ctr``."""

import json
from collections.abc import Mapping, Sequence

from tests.runtime.engines.engine import Asked, Engine
from tests.runtime.engines.image import NAME
from tests.runtime.engines.machine import Machine

_CRI = "io.containerd.grpc.v1.cri"
_CONFIG = """version = 2
disabled_plugins = {disabled}
root = "{work}/containerd"
state = "/run/containerd"
[grpc]
address = "/run/containerd.sock"
"""


class Containerd(Engine):
    """An own containerd, with the namespace that Kubernetes uses."""

    def __init__(self, machine: Machine, cri: str = "") -> None:
        """``cri`` are the settings of its CRI; without them the CRI is off."""
        super().__init__(machine)
        self._ctr = ("ctr", "--address", "/run/containerd.sock", "--namespace", "k8s.io")
        config = machine.work / "containerd.toml"
        text = _CONFIG.format(work=machine.work, disabled=json.dumps([] if cri else [_CRI]))
        config.write_text(text + (f'[plugins."{_CRI}"]\n{cri}' if cri else ""))
        machine.daemon("containerd", "--config", config)
        machine.until(*self._ctr, "version")
        machine.run(*self._ctr, "images", "import", machine.work / "image.tar")

    def start(self, asked: Asked, *options: str) -> None:
        # Of the controllers that a limit needs version 2 may have none.
        words = ["run", "--detach", "--cpu-shares", "0", *options]
        for mount in asked.mounts:
            kind = "ro" if mount.read_only else "rw"
            words += ["--mount", f"type=bind,src={mount.source},dst={mount.target},options=rbind:{kind}"]
        words += [f"--env={key}={value}" for key, value in asked.env.items()]
        self.machine.run(*self._ctr, *words, NAME, asked.name, *asked.command)

    def enter(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:  # noqa: ARG002 - its containers' own
        self.machine.run(*self._ctr, "tasks", "exec", "--detach", "--exec-id", "more", name, *command)

    def ids(self, name: str) -> dict[str, str]:
        listed = {}
        for kind in ("containers", "tasks"):
            names = self.machine.run(*self._ctr, kind, "list", "--quiet").split()
            listed[f"ctr {kind} list"] = next(each for each in names if each == name)
        return listed

    def stop(self, name: str) -> None:
        self.machine.run(*self._ctr, "tasks", "rm", "--force", name)
        self.machine.run(*self._ctr, "containers", "rm", name)
