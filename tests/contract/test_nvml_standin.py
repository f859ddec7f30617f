"""The NVML stand-in, through the real nvidia-ml-py: as strict as the original, also where that can't be fetched."""

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.fakes import build
from tests.fakes.chain import Chain
from tests.fakes.gpu import DEFAULT_DEVICES
from tests.fakes.nvml_probe import NvmlCallError, Probe, device
from tests.unit.conftest import Driver, driver  # noqa: F401 - a fixture

FIRST, FOREIGN_NS = DEFAULT_DEVICES[0].uuid, 4026599999


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


def test_no_symbol_is_exported_that_nvml_does_not_have() -> None:
    library = build.library_dir(build.build(), "550.54.15") / "libnvidia-ml.so.1"
    command = ("readelf", "--dyn-syms", "--wide", str(library))
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    exported = re.findall(r"GLOBAL DEFAULT +\d+ (\S+)", table)
    assert len(exported) > 20
    assert [name for name in exported if not name.startswith("nvml")] == []
