"""A miniature driver for the tests of NVML's callers."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.fakes import build
from tests.fakes.chain import Chain
from tests.fakes.gpu import DEFAULT_DEVICES, Gpu, Load


class Client:
    """A connection to the driver, which takes the test process for a CUDA program."""

    host_pid = os.getpid()

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(gpu.socket_path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def context(self, uuid: str, memory: int, *, how: str = "context") -> None:
        """Use memory on a device, in bytes; -1 makes it unknown. ``how`` is ``context`` or ``mps``."""
        self.ask(f"{how} {uuid} {memory}")

    def load(self, uuid: str, sm: int) -> None:
        self.ask(f"load {uuid} {sm}")

    def ask(self, command: str) -> None:
        self._socket.sendall(command.encode() + b"\n")
        assert self._socket.recv(256) == b"ok\n"

    def close(self) -> None:
        """End the process in the driver's view."""
        if self._socket.fileno() >= 0:
            connected = len(self._gpu.clients())
            self._socket.close()
            while len(self._gpu.clients()) == connected:
                time.sleep(0.001)


class Driver:
    """The fake driver, and the library that child processes load."""

    def __init__(self, gpu: Gpu, place: Path) -> None:
        self.gpu = gpu
        self._library = place / "lib" / "libnvidia-ml.so.1"
        self.install(gpu.driver_version)

    def install(self, version: str) -> None:
        """Install another driver and its library, as an upgrade does."""
        self.gpu.driver_version = version
        self._library.unlink(missing_ok=True)
        self._library.parent.mkdir(exist_ok=True)
        self._library.symlink_to(build.library_dir(build.build(), version) / self._library.name)

    def remove(self) -> None:
        self._library.unlink()

    def client(self) -> Client:
        """Connect the test process as a user of a GPU."""
        return Client(self.gpu)

    def sample(self, host_pid: int, sm: int, device: int = 0, age_s: float = 0.0) -> int:
        """Add a sample of a process's load ``age_s`` ago; return its time stamp in us."""
        stamp = time.time_ns() // 1000 - int(age_s * 1e6)
        chain = Chain(((os.stat("/proc/self/ns/pid").st_ino, host_pid),))
        self.gpu.add_sample(chain, device, Load(sm=sm), stamp)
        return stamp


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "lib"))
    monkeypatch.setenv("NVML_STANDIN_STATE", str(tmp_path / "state"))
    with Gpu(tmp_path / "state", tmp_path / "driver.sock", "550.54.15", DEFAULT_DEVICES) as gpu:
        yield Driver(gpu, tmp_path)
