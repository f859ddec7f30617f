"""The NVML stand-in, through the real nvidia-ml-py: as strict as the original, also where that can't be fetched."""

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.fakes import build
from tests.fakes.chain import Chain
from tests.fakes.gpu import DEFAULT_DEVICES, Load
from tests.fakes.nvml_probe import NvmlCallError, Probe, device
from tests.unit.conftest import Driver, driver  # noqa: F401 - a fixture

FIRST, FOREIGN_NS = DEFAULT_DEVICES[0].uuid, 4026599999


def _host(pid: int) -> Chain:
    return Chain(((os.stat("/proc/self/ns/pid").st_ino, pid),))


@pytest.fixture
def probe(driver: Driver) -> Iterator[Callable[[str], Probe]]:  # noqa: F811
    """NVML in a process of its own, of a release of the driver."""
    driver.gpu.skips_first_place = False
    with ExitStack() as stack:

        def start(version: str) -> Probe:
            driver.install(version)
            nvml = stack.enter_context(Probe(dict(os.environ)))
            nvml("nvmlInit")
            return nvml

        yield start


@pytest.mark.parametrize(
    ("call", "arguments", "error"),
    [
        ("nvmlDeviceGetHandleByIndex", (2,), "InvalidArgument"),
        ("nvmlDeviceGetHandleByUUID", ("GPU-other",), "NotFound"),
        ("nvmlDeviceGetTemperature", (device(0), 7), "InvalidArgument"),
        ("nvmlDeviceGetMemoryInfo", (device(0), 0x03000028), "ArgumentVersionMismatch"),
    ],
)
def test_a_wrong_argument_has_its_own_error(
    probe: Callable[[str], Probe], call: str, arguments: tuple[object, ...], error: str
) -> None:
    with pytest.raises(NvmlCallError, match=f"NVMLError_{error}$"):
        probe("550.54.15")(call, *arguments)


@pytest.mark.parametrize("call", ["nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo"])
def test_value_is_the_share_of_active_periods(
    driver: Driver,  # noqa: F811
    probe: Callable[[str], Probe],
    call: str,
) -> None:
    nvml = probe("550.54.15")
    start = 2 * 10**15  # later than what the driver itself samples
    for after, pid, sm in ((100, 11, 1), (200, 12, 2), (300, 11, 3), (400, 13, 4)):
        driver.gpu.add_sample(_host(pid), 0, Load(sm=sm, mem=5, enc=6, dec=7), start + after)
    driver.gpu.add_sample(_host(99), 1, Load(sm=9), start + 500)

    def seen(since: int) -> set[tuple[int, int, int]]:
        found = nvml(call, device(0), start + since)
        return {(each["timeStamp"] - start, each["pid"], each["smUtil"]) for each in found}

    assert seen(0) == {(200, 12, 1), (300, 11, 1), (400, 13, 1)}
    assert seen(299) == {(300, 11, 2), (400, 13, 2)}
    assert seen(300) == {(400, 13, 4)}
    with pytest.raises(NvmlCallError, match="NVMLError_NotFound"):
        seen(400)
    (newest,) = nvml(call, device(0), start + 300)
    assert (newest["memUtil"], newest["encUtil"], newest["decUtil"]) == (5, 6, 7)


@pytest.mark.parametrize(
    ("version", "call", "error"),
    [
        ("470.223.02", "nvmlDeviceGetComputeRunningProcesses_v3", "NVMLError_FunctionNotFound"),
        ("470.223.02", "nvmlDeviceGetComputeRunningProcesses", "NVMLLibraryMismatchError"),  # no NVMLError
        ("470.223.02", "nvmlDeviceGetComputeRunningProcesses_v2", ""),
        ("535.183.01", "nvmlDeviceGetComputeRunningProcesses", ""),
        ("535.183.01", "nvmlDeviceGetProcessesUtilizationInfo", "NVMLError_FunctionNotFound"),
    ],
)
def test_older_drivers_lack_the_newer_calls(
    probe: Callable[[str], Probe], version: str, call: str, error: str
) -> None:
    nvml, arguments = probe(version), (device(0), *([0] if call.endswith("Info") else []))
    if not error:
        assert nvml(call, *arguments) == []
        return
    with pytest.raises(NvmlCallError, match=error):
        nvml(call, *arguments)


@pytest.mark.parametrize("version", ["535.104.05", "560.35.03", "565.57.01", "570.86.15"])
def test_the_host_sees_host_pids_on_every_driver(
    driver: Driver,  # noqa: F811
    probe: Callable[[str], Probe],
    version: str,
) -> None:
    nvml = probe(version)
    with driver.client() as client:
        client.context(FIRST, 5 << 20)
        driver.gpu.add_sample(Chain((*_host(4242).levels, (FOREIGN_NS, 7))), 0, Load(sm=20))
        (entry,) = nvml("nvmlDeviceGetComputeRunningProcesses", device(0))
    assert (entry["pid"], entry["usedGpuMemory"]) == (os.getpid(), 5 << 20)
    assert [each["pid"] for each in nvml("nvmlDeviceGetProcessUtilization", device(0), 0)] == [4242]


def test_no_symbol_is_exported_that_nvml_does_not_have() -> None:
    library = build.library_dir(build.build(), "550.54.15") / "libnvidia-ml.so.1"
    command = ("readelf", "--dyn-syms", "--wide", str(library))
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    exported = re.findall(r"GLOBAL DEFAULT +\d+ (\S+)", table)
    assert len(exported) > 20
    assert [name for name in exported if not name.startswith("nvml")] == []
