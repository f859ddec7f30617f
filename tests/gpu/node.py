"""Miniature nodes whose tenants use CUDA: on a real GPU, or on the stand-ins for the same libraries."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Final, Self

from tests.fakes import build
from tests.fakes.cgroups import CgroupTree
from tests.fakes.gpu import Device
from tests.fakes.node import Node

#: In the place of a driver's socket: the tenant goes through libcuda.so.1 (tests/fakes/tenant/cuda.c).
CUDA: Final = Path("cuda")


class StandinNode(Node):
    """A node without a GPU: CUDA and NVML are stand-ins over one driver, all else is as on a real node."""

    def __enter__(self) -> Self:
        super().__enter__()
        self.gpu.turns = True
        self._socket, self.driver_socket = self.driver_socket, CUDA
        return self

    def stand_in(self) -> dict[str, str]:
        plain = super().stand_in()
        libraries = f"{self.built / 'cuda'}:{plain['LD_LIBRARY_PATH']}"
        return plain | _inherited() | {"LD_LIBRARY_PATH": libraries, "CUDA_STANDIN_DRIVER": str(self._socket)}


class RealNode(Node):
    """The GPU and driver of this machine, with made containers, cgroups, and HAMi's directory."""

    def __init__(self, root: Path, driver_version: str, device: Device) -> None:
        super().__init__(root, driver_version, (device,))
        self.driver_socket = CUDA

    def __enter__(self) -> Self:
        self.built = build.build()
        self.containers_dir.mkdir(parents=True)
        self.cgroups = CgroupTree()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self.root / "vgpu", ignore_errors=True)
            stack.callback(self.cgroups.close)
            for container in self.containers:
                stack.callback(container.stop)

    def stand_in(self) -> dict[str, str]:
        return _inherited()


def _inherited() -> dict[str, str]:
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "CUDA_DEVICE_ORDER") if name in os.environ}
