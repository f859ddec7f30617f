"""The NVML stand-in, through the real nvidia-ml-py: as strict as the original."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fakes import build
from tests.fakes.chain import Chain
from tests.fakes.gpu import DEFAULT_DEVICES, Gpu, Load
from tests.fakes.nvml_probe import NvmlCallError, Probe, device

FOREIGN_NS = 4026599999


class Client:
    """The test process itself, as a GPU user."""

    def __init__(self, gpu: Gpu) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(gpu.socket_path))

    def ask(self, text: str) -> str:
        self.socket.sendall(text.encode() + b"\n")
        return self.socket.recv(256).decode().strip()

    def close(self) -> None:
        self.socket.close()


class Bench:
    """A driver, and ways to look at it."""

    def __init__(self, root: Path, stack: ExitStack, driver_version: str) -> None:
        self.root, self.stack = root, stack
        self.gpu = stack.enter_context(
            Gpu(root / "state", root / "driver.sock", driver_version, sample_period_s=0.02)
        )
        self.library = build.library_dir(build.build(), driver_version)

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.library),
            "NVML_STANDIN_STATE": str(self.root / "state"),
        }

    def probe(self, *, init: bool = True) -> Probe:
        nvml = self.stack.enter_context(Probe(self.environment()))
        if init:
            nvml("nvmlInit")
        return nvml

    def client(self, index: int = 0, load: int = 0, memory: int = 1 << 20) -> Client:
        client = Client(self.gpu)
        self.stack.callback(client.close)
        assert client.ask(f"context {DEFAULT_DEVICES[index].uuid} {memory}") == "ok"
        assert client.ask(f"load {DEFAULT_DEVICES[index].uuid} {load}") == "ok"
        return client


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def bench(tmp_path: Path, stack: ExitStack) -> Bench:
    return Bench(tmp_path, stack, "550.54.15")


def _host(pid: int) -> Chain:
    return Chain(((os.stat("/proc/self/ns/pid").st_ino, pid),))


# ---- start and end -----------------------------------------------------------------------------


def test_a_library_that_is_newer_than_the_driver_does_not_start(bench: Bench) -> None:
    bench.gpu.driver_version = "535.104.05"
    with pytest.raises(NvmlCallError, match="NVMLError_LibRmVersionMismatch"):
        bench.probe()


# ---- the system and its devices ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "arguments", "error"),
    [
        ("nvmlDeviceGetHandleByIndex", (2,), "InvalidArgument"),
        ("nvmlDeviceGetHandleByUUID", ("GPU-nobody",), "NotFound"),
        ("nvmlDeviceGetTemperature", (device(0), 7), "InvalidArgument"),
        ("nvmlDeviceGetMemoryInfo", (device(0), 0x03000028), "ArgumentVersionMismatch"),
    ],
)
def test_a_wrong_argument_has_its_own_error(
    bench: Bench, call: str, arguments: tuple[object, ...], error: str
) -> None:
    with pytest.raises(NvmlCallError, match=f"NVMLError_{error}$"):
        bench.probe()(call, *arguments)


# ---- samples -----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo"])
def test_value_is_the_share_of_active_periods(bench: Bench, call: str) -> None:
    nvml = bench.probe()
    for time_us, pid, sm in ((100, 11, 1), (200, 12, 2), (300, 11, 3), (400, 13, 4)):
        bench.gpu.add_sample(_host(pid), 0, Load(sm=sm, mem=5, enc=6, dec=7), time_us)
    bench.gpu.add_sample(_host(99), 1, Load(sm=9), 500)

    def seen(since_us: int) -> set[tuple[int, int, int]]:
        return {(s["timeStamp"], s["pid"], s["smUtil"]) for s in nvml(call, device(0), since_us)}

    assert seen(0) == {(200, 12, 1), (300, 11, 1), (400, 13, 1)}
    assert seen(299) == {(300, 11, 2), (400, 13, 2)}
    assert seen(300) == {(400, 13, 4)}
    with pytest.raises(NvmlCallError, match="NVMLError_NotFound"):
        seen(400)
    (newest,) = nvml(call, device(0), 300)
    assert (newest["memUtil"], newest["encUtil"], newest["decUtil"]) == (5, 6, 7)


# ---- releases of the driver --------------------------------------------------------------------


def test_older_drivers_lack_the_newer_calls(tmp_path: Path, stack: ExitStack) -> None:
    old = Bench(tmp_path, stack, "470.223.02")
    old.client(load=1)
    nvml = old.probe()
    with pytest.raises(NvmlCallError, match="NVMLError_FunctionNotFound"):
        nvml("nvmlDeviceGetComputeRunningProcesses_v3", device(0))
    with pytest.raises(NvmlCallError, match="NVMLLibraryMismatchError"):  # which is no NVMLError at all
        nvml("nvmlDeviceGetComputeRunningProcesses", device(0))
    assert nvml("nvmlDeviceGetComputeRunningProcesses_v2", device(0))[0]["pid"] == os.getpid()
    (tmp_path / "535").mkdir()
    nvml = Bench(tmp_path / "535", stack, "535.183.01").probe()
    assert nvml("nvmlDeviceGetComputeRunningProcesses", device(0)) == []
    with pytest.raises(NvmlCallError, match="NVMLError_FunctionNotFound"):
        nvml("nvmlDeviceGetProcessesUtilizationInfo", device(0), 0)


@pytest.mark.parametrize("driver_version", ["535.104.05", "560.35.03", "565.57.01", "570.86.15"])
def test_the_host_sees_host_pids_on_every_driver(
    tmp_path: Path, stack: ExitStack, driver_version: str
) -> None:
    bench = Bench(tmp_path, stack, driver_version)
    bench.client(load=10, memory=5 << 20)
    nvml = bench.probe()
    chain = Chain((*_host(4242).levels, (FOREIGN_NS, 7)))
    bench.gpu.add_sample(chain, 0, Load(sm=20))
    (entry,) = nvml("nvmlDeviceGetComputeRunningProcesses", device(0))
    assert (entry["pid"], entry["usedGpuMemory"]) == (os.getpid(), 5 << 20)
    samples = nvml("nvmlDeviceGetProcessUtilization", device(0), 0)
    assert {s["pid"] for s in samples} == {os.getpid(), 4242}


def test_no_symbol_is_exported_that_nvml_does_not_have(bench: Bench) -> None:
    table = subprocess.run(
        ["readelf", "--dyn-syms", "--wide", str(bench.library / "libnvidia-ml.so.1")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    exported = re.findall(r"GLOBAL DEFAULT +\d+ (\S+)", table)
    assert len(exported) > 20
    assert [name for name in exported if not name.startswith("nvml")] == []
