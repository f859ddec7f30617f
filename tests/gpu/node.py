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
_PASSED_ON: Final = ("CUDA_STANDIN_DRIVER", "CUDA_DEVICE_ORDER")


class CudaNode(Node):
    def tenant_environment(self) -> dict[str, str]:
        environment = self.environment()
        passed_on = {name: environment[name] for name in _PASSED_ON if name in environment}
        return super().tenant_environment() | passed_on


class StandinNode(CudaNode):
    """No GPU: CUDA and NVML are stand-ins over one driver. Everything above them is as on a real one."""

    def __enter__(self) -> Self:
        super().__enter__()
        self.gpu.turns = True
        self._socket, self.driver_socket = self.driver_socket, CUDA
        return self

    def environment(self) -> dict[str, str]:
        plain = super().environment()
        libraries = f"{self.built / 'cuda'}:{plain['LD_LIBRARY_PATH']}"
        return plain | {"LD_LIBRARY_PATH": libraries, "CUDA_STANDIN_DRIVER": str(self._socket)}


class RealNode(CudaNode):
    """The GPU and its driver are this machine's; what is made is containers, a cgroup each, and HAMi's directory."""

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

    def environment(self) -> dict[str, str]:
        return dict(os.environ)
