"""The fake NVML answers as NVIDIA's libnvidia-ml does over a simulated resource manager in the same state.

Each test is one case: a release, a state of the driver, a call. `make nvml` runs them; they need Debian's
package archive, once.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import pytest

from tests.fakes import build
from tests.fakes.chain import Chain
from tests.fakes.gpu import Device, Gpu, Load
from tests.fakes.nvml_probe import NvmlCallError, Probe, device
from tests.fakes.rm.fetch import RELEASES, library
from tests.fakes.state import Answer, Fault

pytestmark = pytest.mark.nvidia

DEVICES: Final = tuple(
    Device(f"GPU-0102030{i}-0506-0708-090a-0b0c0d0e0f10", name=f"NVIDIA Simulated {i}", minor=i)
    for i in range(2)
)
PERIOD, SECOND = 139_000, 1_000_000
NOW: Final = time.time_ns() // 1000
SIZE, OTHER_SIZE = "nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo"
OWN_SAMPLES: Final = 1  # NVML_GPU_UTILIZATION_SAMPLES


def _chain(pid: int) -> Chain:
    return Chain(((os.stat("/proc/self/ns/pid").st_ino, pid),))


def _first(**changes: Any) -> Callable[[Gpu], None]:
    return lambda gpu: gpu.set_devices([Device(DEVICES[0].uuid, minor=0, **changes), DEVICES[1]])


def _ring(*parts: tuple[int, Load] | None, faults: int = 0) -> Callable[[Gpu], None]:
    """Fill the first device's ring with ten seconds of periods: these in turn, None for an idle one."""

    def fill(gpu: Gpu) -> None:
        gpu.set_faults(faults)
        for number in range(72):
            end, part = NOW - (71 - number) * PERIOD, parts[number % len(parts)]
            gpu.add_sample(Chain(()), 0, Load(), end)
            if part is not None:
                gpu.add_sample(_chain(part[0]), 0, part[1], end)

    return fill


BUSY: Final = Load(sm=30, mem=10)
STATES: Final[dict[str, Callable[[Gpu], None]]] = {
    "never busy": _ring(None),
    "steady": _ring((4711, BUSY)),
    "bursts": _ring((4711, Load(sm=80)), None, None),
    "varying": _ring(*((4711, Load(sm=load)) for load in (20, 40, 60, 80))),
    "in turn": _ring((4711, Load(sm=90)), (4712, Load(sm=90))),
    "three in turn": _ring((4711, Load(sm=90)), (4712, Load(sm=30)), (4713, Load(sm=60)), None),
    "above 100": _ring((4711, Load(sm=180))),
    "lost": _first(lost=True),
    "MIG": _first(mig_enabled=True),
    "no MIG": _first(errors={Answer.MIG_MODE: 3}),
    "refused": lambda gpu: gpu.set_faults(
        Fault.PROCESS_UTILIZATION_UNSUPPORTED | Fault.PROCESSES_INFO_UNSUPPORTED
    ),
    "vGPU": _ring((4711, Load(sm=30, mem=10)), faults=Fault.VGPU),
    "not loaded": lambda gpu: gpu.set_faults(Fault.DRIVER_NOT_LOADED),
    "another version": lambda gpu: setattr(gpu, "driver_version", "560.35.03"),
}


class Call(NamedTuple):
    name: str
    arguments: tuple[object, ...]
    states: tuple[str, ...]
    since: int = 500  # 470 reads samples, lists and modes through controls that are not simulated


LOADS: Final = ("steady", "bursts", "varying", "in turn", "three in turn")
ALL_LOADS: Final = ("never busy", *LOADS, "above 100")
TROUBLE: Final = ("lost", "MIG", "refused")
FIRST: Final = device(0)
CALLS: Final = (
    Call("nvmlDeviceGetCount", (), ("steady", "lost"), since=470),
    Call("nvmlSystemGetDriverVersion", (), ("steady",), since=470),
    Call("nvmlDeviceGetUUID", (FIRST,), ("steady", "lost"), since=470),
    Call("nvmlDeviceGetName", (FIRST,), ("steady",), since=470),
    Call("nvmlDeviceGetMinorNumber", (device(1),), ("steady",), since=470),
    Call("nvmlDeviceGetHandleByIndex", (2,), ("steady",), since=470),
    Call("nvmlDeviceGetHandleByUUID", ("GPU-other",), ("steady",), since=470),
    Call("nvmlDeviceGetPciInfo", (device(1),), ("steady",), since=470),
    Call("nvmlDeviceGetMemoryInfo", (FIRST,), ("steady", "lost"), since=470),
    Call("nvmlDeviceGetMigMode", (FIRST,), ("steady", "MIG", "no MIG", "lost")),
    Call("nvmlDeviceGetVirtualizationMode", (FIRST,), ("steady", "vGPU")),
    Call("nvmlDeviceGetUtilizationRates", (FIRST,), ("lost",)),
    Call("nvmlDeviceGetSupportedEventTypes", (FIRST,), ("steady", "vGPU")),
    *(
        Call("events", (FIRST, *kind), ("steady", "vGPU"))
        for kind in ((8, 0), (8, 50), (0x19C, 0), (1 << 40, 0))
    ),
    Call("nvmlDeviceGetComputeRunningProcesses_v2", (FIRST,), ("steady", "lost")),
    Call("nvmlDeviceGetComputeRunningProcesses", (FIRST,), ("steady",)),
    Call("nvmlDeviceGetMPSComputeRunningProcesses_v2", (FIRST,), ("steady",)),
    Call(SIZE, (FIRST, 0), (*ALL_LOADS, *TROUBLE, "vGPU")),
    Call(SIZE, (FIRST, NOW - SECOND), (*ALL_LOADS, "vGPU")),
    Call(SIZE, (FIRST, NOW - 5 * SECOND), LOADS),
    Call(SIZE, (FIRST, NOW + SECOND), ("steady",)),
    Call(OTHER_SIZE, (FIRST, 0), (*ALL_LOADS, *TROUBLE, "vGPU"), since=550),
    Call(OTHER_SIZE, (FIRST, NOW - SECOND), ALL_LOADS, since=550),
    Call("room", (SIZE, FIRST, 0, 0), ("never busy", "steady")),
    Call("room", (SIZE, FIRST, 71, 0), ("never busy", "steady")),
    Call("room", (SIZE, FIRST, 72, 0), ("never busy", "steady")),
    Call("room", (SIZE, FIRST, 100, 0), ("steady",)),
    Call("room", (OTHER_SIZE, FIRST, 0, 0), ("never busy", "steady"), since=550),
    Call("room", (OTHER_SIZE, FIRST, 72, 0), ("never busy", "steady"), since=550),
    Call("nvmlDeviceGetSamples", (FIRST, OWN_SAMPLES, 0), (*ALL_LOADS, "lost", "MIG", "vGPU")),
    Call("nvmlDeviceGetSamples", (FIRST, OWN_SAMPLES, NOW - SECOND), ALL_LOADS),
    Call("nvmlDeviceGetSamples", (FIRST, OWN_SAMPLES, NOW), ("steady",)),
    Call("nvmlInit", (), ("not loaded", "another version"), since=470),
)
ROWS: Final = [
    pytest.param(version, state, call, id=f"{version} {state} {call.name} {number}")
    for version in RELEASES
    for number, call in enumerate(CALLS)
    if int(version[:3]) >= call.since
    for state in call.states
]


class Pair:
    def __init__(self, stack: ExitStack, version: str, state: str) -> None:
        root = Path(stack.enter_context(TemporaryDirectory()))
        gpu = Gpu(root / "state", root / "sock", version, DEVICES, sample_period_s=1e6)
        stack.enter_context(gpu)
        gpu.skips_first_place = False
        gpu.connect(_chain(4711), 0, Load(memory=5 << 20))
        STATES[state](gpu)
        self.answers = []
        for directory in (build.library_dir(build.build(), version), library(version)):
            environment = {
                **os.environ,
                "LD_LIBRARY_PATH": str(directory),
                "NVML_STANDIN_STATE": str(root / "state"),
            }
            probe = stack.enter_context(Probe(environment))
            if state not in ("not loaded", "another version"):
                probe("nvmlInit")
            self.answers.append(probe)

    def ask(self, call: Call) -> list[Any]:
        found: list[Any] = []
        for probe in self.answers:
            try:
                found.append(probe(call.name, *call.arguments))
            except NvmlCallError as error:
                found.append(str(error))
        return found


def alike(one: Any, other: Any) -> bool:
    """Return True if answers are equal, except for the order of processes and the library's rounding.

    The library converts time stamps between clocks, some microseconds off, and rounds floating-point sums up.
    """
    if isinstance(one, list) and isinstance(other, list):
        key = lambda each: each.get("pid", 0) if isinstance(each, dict) else 0  # noqa: E731
        pairs = zip(sorted(one, key=key), sorted(other, key=key), strict=False)
        return len(one) == len(other) and all(alike(*pair) for pair in pairs)
    if isinstance(one, dict) and isinstance(other, dict):
        near = {"timeStamp": 1000} | dict.fromkeys(("smUtil", "memUtil"), 1)
        return one.keys() == other.keys() and all(
            abs(one[name] - other[name]) <= near[name] if name in near else alike(one[name], other[name])
            for name in one
        )
    return bool(one == other)


@pytest.fixture(scope="module")
def pairs() -> Iterator[Callable[[str, str], Pair]]:
    with ExitStack() as stack:
        yield cache(lambda version, state: Pair(stack, version, state))


@pytest.mark.parametrize(("version", "state", "call"), ROWS)
def test_stand_in_answers_as_nvidias_library(
    pairs: Callable[[str, str], Pair], version: str, state: str, call: Call
) -> None:
    standin, nvidia = pairs(version, state).ask(call)
    assert alike(standin, nvidia), f"stand-in: {standin}\nNVIDIA's: {nvidia}"


def test_table_is_large_enough() -> None:
    assert len(ROWS) >= 60
