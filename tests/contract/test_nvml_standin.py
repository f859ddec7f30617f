"""The NVML stand-in, through the real nvidia-ml-py: as strict as NVIDIA's library, without need of it."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.fakes import build
from tests.fakes.chain import Chain
from tests.fakes.gpu import Load
from tests.fakes.nvml_probe import NvmlCallError, Probe, device
from tests.programs import completed
from tests.unit.conftest import Driver, driver  # noqa: F401 - a fixture


def _host(pid: int) -> Chain:
    return Chain(((os.stat("/proc/self/ns/pid").st_ino, pid),))


@pytest.fixture
def probe(driver: Driver) -> Iterator[Callable[[str], Probe]]:  # noqa: F811
    driver.gpu.skips_first_place = False
    with ExitStack() as stack:

        def start(version: str) -> Probe:
            driver.install(version)
            nvml = stack.enter_context(Probe(dict(os.environ)))
            nvml("nvmlInit")
            return nvml

        yield start


@pytest.mark.parametrize(
    ("version", "call", "arguments", "error"),
    [
        ("470.223.02", "nvmlDeviceGetComputeRunningProcesses_v3", (device(0),), "FunctionNotFound"),
        ("470.223.02", "nvmlDeviceGetComputeRunningProcesses", (device(0),), "NVMLLibraryMismatchError"),
        ("470.223.02", "nvmlDeviceGetComputeRunningProcesses_v2", (device(0),), ""),
        ("535.183.01", "nvmlDeviceGetComputeRunningProcesses", (device(0),), ""),
        ("535.183.01", "nvmlDeviceGetProcessesUtilizationInfo", (device(0), 0), "FunctionNotFound"),
        ("550.54.15", "nvmlDeviceGetHandleByIndex", (2,), "InvalidArgument"),
        ("550.54.15", "nvmlDeviceGetHandleByUUID", ("GPU-other",), "NotFound"),
        ("550.54.15", "nvmlDeviceGetTemperature", (device(0), 7), "InvalidArgument"),
        ("550.54.15", "nvmlDeviceGetMemoryInfo", (device(0), 0x03000028), "ArgumentVersionMismatch"),
    ],
)
def test_older_calls_and_wrong_arguments_have_their_errors(
    probe: Callable[[str], Probe], version: str, call: str, arguments: tuple[object, ...], error: str
) -> None:
    nvml = probe(version)
    if not error:
        assert nvml(call, *arguments) == []
        return
    with pytest.raises(NvmlCallError, match=f"(NVMLError_)?{error}$"):
        nvml(call, *arguments)


@pytest.mark.parametrize("call", ["nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo"])
def test_value_is_the_share_of_active_periods(
    driver: Driver,  # noqa: F811
    probe: Callable[[str], Probe],
    call: str,
) -> None:
    nvml, start = probe("550.54.15"), 2 * 10**15  # later than the driver's own samples
    for after, pid, sm in ((100, 11, 1), (200, 12, 2), (300, 11, 3), (400, 13, 4)):
        driver.gpu.add_sample(_host(pid), 0, Load(sm=sm, mem=5, enc=6, dec=7), start + after)
    driver.gpu.add_sample(_host(99), 1, Load(sm=9), start + 500)
    for since, values in (
        (0, {(200, 12, 1), (300, 11, 1), (400, 13, 1)}),
        (299, {(300, 11, 2), (400, 13, 2)}),
        (300, {(400, 13, 4)}),
    ):
        samples = nvml(call, device(0), start + since)
        assert {
            (sample["timeStamp"] - start, sample["pid"], sample["smUtil"]) for sample in samples
        } == values
    (newest,) = samples
    assert (newest["memUtil"], newest["encUtil"], newest["decUtil"]) == (5, 6, 7)
    with pytest.raises(NvmlCallError, match="NVMLError_NotFound"):
        nvml(call, device(0), start + 400)


def test_no_symbol_is_exported_that_nvml_does_not_have() -> None:
    library = build.library_dir(build.build(), "550.54.15") / "libnvidia-ml.so.1"
    table = completed("readelf", "--dyn-syms", "--wide", str(library), check=True).stdout
    exported = re.findall(r"GLOBAL DEFAULT +\d+ (\S+)", table)
    assert len(exported) > 20
    assert [name for name in exported if not name.startswith("nvml")] == []
