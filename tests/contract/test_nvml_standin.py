"""The NVML stand-in, through the real nvidia-ml-py: as strict as the original."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes import build
from tests.fakes.chain import Chain, read_chain
from tests.fakes.gpu import DEFAULT_DEVICES, Device, Gpu, Load, Mig
from tests.fakes.nvml_probe import NvmlCallError, Probe, device
from tests.fakes.state import Answer, Fault, Hang
from tests.patience import PATIENCE_S

SUCCESS, INVALID_ARGUMENT, INSUFFICIENT_SIZE = 0, 2, 7
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


def test_without_a_state_file_the_driver_is_not_loaded(bench: Bench) -> None:
    for variables in ({"NVML_STANDIN_STATE": "/nonexistent"}, {"NVML_STANDIN_STATE": os.devnull}):
        nvml = bench.stack.enter_context(Probe(bench.environment() | variables))
        with pytest.raises(NvmlCallError, match="NVMLError_DriverNotLoaded"):
            nvml("nvmlInit")


def test_without_the_library_nvidia_ml_py_says_so(bench: Bench) -> None:
    nvml = bench.stack.enter_context(Probe(bench.environment() | {"LD_LIBRARY_PATH": str(bench.root)}))
    with pytest.raises(NvmlCallError, match="NVMLError_LibraryNotFound"):
        nvml("nvmlInit")


def test_every_call_wants_init_and_every_shutdown_one_init(bench: Bench) -> None:
    nvml = bench.probe()
    nvml("nvmlInit")
    nvml("nvmlShutdown")
    assert nvml("nvmlDeviceGetCount") == 2
    nvml("nvmlShutdown")
    for call in ("nvmlDeviceGetCount", "nvmlSystemGetDriverVersion", "nvmlShutdown"):
        with pytest.raises(NvmlCallError, match="NVMLError_Uninitialized"):
            nvml(call)
    nvml("nvmlInit")
    assert nvml("nvmlDeviceGetCount") == 2


def test_a_library_that_is_newer_than_the_driver_does_not_start(bench: Bench) -> None:
    bench.gpu.driver_version = "535.104.05"
    with pytest.raises(NvmlCallError, match="NVMLError_LibRmVersionMismatch"):
        bench.probe()


def test_a_driver_can_go_and_come(bench: Bench) -> None:
    nvml = bench.probe()
    bench.gpu.set_faults(Fault.DRIVER_NOT_LOADED)
    for call in ("nvmlInit", "nvmlDeviceGetCount"):
        with pytest.raises(NvmlCallError, match="NVMLError_DriverNotLoaded"):
            nvml(call)
    bench.gpu.set_faults()
    assert nvml("nvmlDeviceGetCount") == 2


@pytest.mark.parametrize(
    ("hang", "call", "arguments"),
    [
        (Hang.INIT, "nvmlInit", ()),
        (Hang.COUNT, "nvmlDeviceGetCount", ()),
        (Hang.UTILIZATION, "nvmlDeviceGetProcessUtilization", (device(0), 0)),
        (Hang.PROCESS_LIST, "nvmlDeviceGetComputeRunningProcesses", (device(0),)),
        (Hang.DEVICE, "nvmlDeviceGetUUID", (device(0),)),
        (Hang.SHUTDOWN, "nvmlShutdown", ()),
    ],
)
def test_a_call_hangs_until_it_is_let_go(
    bench: Bench, hang: Hang, call: str, arguments: tuple[object, ...]
) -> None:
    bench.client(load=5)
    nvml = bench.probe()
    bench.gpu.set_faults(hang=hang)
    nvml.send(call, *arguments)
    assert not nvml.answers_within(0.2)
    bench.gpu.set_faults()
    nvml.receive()


# ---- the system and its devices ----------------------------------------------------------------


def test_versions(bench: Bench) -> None:
    nvml = bench.probe()
    assert nvml("nvmlSystemGetDriverVersion") == "550.54.15"
    assert nvml("nvmlSystemGetNVMLVersion") == "12.550.54.15"
    assert nvml("nvmlSystemGetCudaDriverVersion_v2") == 12020
    assert nvml("nvmlErrorString", 15) == "GPU is lost"


def test_devices_are_what_they_were_made(bench: Bench) -> None:
    nvml = bench.probe()
    bench.client(index=1, memory=3 << 30)
    for index, made in enumerate(DEFAULT_DEVICES):
        used = (3 << 30) if index == 1 else 0
        memory = {"total": made.memory_total, "free": made.memory_total - used, "used": used}
        assert nvml("nvmlDeviceGetUUID", device(index)) == made.uuid
        assert nvml("nvmlDeviceGetName", device(index)) == made.name
        assert nvml("nvmlDeviceGetIndex", device(index)) == index
        assert nvml("nvmlDeviceGetMinorNumber", device(index)) == made.minor
        assert nvml("nvmlDeviceGetMemoryInfo", device(index)) == memory
        assert nvml("nvmlDeviceGetMemoryInfo", device(index), 0x02000028) == memory | {
            "reserved": 0,
            "version": 0x02000028,
        }
        assert nvml("nvmlDeviceGetTemperature", device(index), 0) == made.temperature_c
        assert nvml("nvmlDeviceGetPowerUsage", device(index)) == made.power_mw
        assert nvml("nvmlDeviceGetMigMode", device(index)) == [0, 0]


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


@pytest.mark.parametrize(
    ("call", "pointers"),
    [
        ("nvmlDeviceGetUUID", 2),
        ("nvmlDeviceGetName", 2),
        ("nvmlDeviceGetIndex", 1),
        ("nvmlDeviceGetMinorNumber", 1),
        ("nvmlDeviceGetMemoryInfo", 1),
        ("nvmlDeviceGetUtilizationRates", 1),
        ("nvmlDeviceGetPowerUsage", 1),
        ("nvmlDeviceGetEnforcedPowerLimit", 1),
        ("nvmlDeviceGetTotalEnergyConsumption", 1),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", 1),
        ("nvmlDeviceGetCurrPcieLinkGeneration", 1),
        ("nvmlDeviceGetCurrPcieLinkWidth", 1),
        ("nvmlDeviceGetPcieReplayCounter", 1),
        ("nvmlDeviceGetEncoderUtilization", 2),
        ("nvmlDeviceGetDecoderUtilization", 2),
        ("nvmlDeviceGetSupportedEventTypes", 1),
        ("nvmlDeviceGetMigMode", 2),
        ("nvmlDeviceGetMaxMigDeviceCount", 1),
        ("nvmlDeviceGetEccMode", 2),
        ("nvmlDeviceGetMPSComputeRunningProcesses", 2),
        ("nvmlDeviceGetMPSComputeRunningProcesses_v2", 2),
        ("nvmlDeviceGetMPSComputeRunningProcesses_v3", 2),
        ("nvmlDeviceGetComputeRunningProcesses", 2),
        ("nvmlDeviceGetComputeRunningProcesses_v2", 2),
        ("nvmlDeviceGetComputeRunningProcesses_v3", 2),
        ("nvmlDeviceGetProcessUtilization", 3),
        ("nvmlDeviceGetProcessesUtilizationInfo", 1),
    ],
)
def test_null_is_an_invalid_argument(bench: Bench, call: str, pointers: int) -> None:
    assert bench.probe()("status_with_nulls", call, device(0), pointers) == INVALID_ARGUMENT


def test_a_handle_that_is_none_is_an_invalid_argument(bench: Bench) -> None:
    assert bench.probe()("status_with_nulls", "nvmlDeviceGetIndex", None, 1) == INVALID_ARGUMENT


def test_a_lost_device_is_lost_and_the_other_is_not(bench: Bench) -> None:
    nvml = bench.probe()
    bench.gpu.set_devices([Device(DEFAULT_DEVICES[0].uuid, lost=True), DEFAULT_DEVICES[1]])
    with pytest.raises(NvmlCallError, match="NVMLError_GpuIsLost"):
        nvml("nvmlDeviceGetUUID", device(0))
    assert nvml("nvmlDeviceGetUUID", device(1)) == DEFAULT_DEVICES[1].uuid


@pytest.mark.parametrize("code", [*range(1, 31), 999])
def test_each_error_is_answered_on_demand_and_is_the_one_of_the_binding(bench: Bench, code: int) -> None:
    nvml = bench.probe()
    name = nvml("error_class", code)
    on_first = replace(DEFAULT_DEVICES[0], errors={Answer.TEMPERATURE: code})
    bench.gpu.set_devices([on_first, DEFAULT_DEVICES[1]])
    with pytest.raises(NvmlCallError, match=f"^{name}$"):
        nvml("nvmlDeviceGetTemperature", device(0), 0)
    assert nvml("nvmlDeviceGetPowerUsage", device(0)) == 180_000
    assert nvml("nvmlDeviceGetTemperature", device(1), 0) == 61
    bench.gpu.set_errors({Answer.COUNT: code})
    with pytest.raises(NvmlCallError, match=f"^{name}$"):
        nvml("nvmlDeviceGetCount")
    assert nvml("nvmlErrorString", code) != ("Unknown Error" if code != 999 else "")


def test_uncorrected_errors_are_counted_twice_and_only_with_ecc(bench: Bench) -> None:
    nvml = bench.probe()
    bench.gpu.set_devices([replace(DEFAULT_DEVICES[0], ecc=(2, 40)), replace(DEFAULT_DEVICES[1], ecc=None)])
    corrected, uncorrected, volatile, aggregate, memory, l1 = 0, 1, 0, 1, 2, 0
    total, single = "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetMemoryErrorCounter"
    assert nvml("nvmlDeviceGetEccMode", device(0)) == [1, 1]
    assert nvml("nvmlDeviceGetEccMode", device(1)) == [0, 0]
    assert nvml(total, device(0), uncorrected, volatile) == 2
    assert nvml(total, device(0), uncorrected, aggregate) == 40
    assert nvml(total, device(0), corrected, volatile) == 0
    assert nvml(single, device(0), uncorrected, aggregate, memory) == 40
    assert nvml(single, device(0), uncorrected, aggregate, l1) == 0
    for call, arguments in ((total, (2, 0)), (total, (0, 2)), (single, (0, 0, 7))):
        with pytest.raises(NvmlCallError, match=r"NVMLError_InvalidArgument$"):
            nvml(call, device(0), *arguments)
    for call, arguments in ((total, (1, 0)), (single, (1, 0, 2))):
        with pytest.raises(NvmlCallError, match=r"NVMLError_NotSupported$"):
            nvml(call, device(1), *arguments)


def test_clocks_power_pcie_and_video_are_what_they_were_made(bench: Bench) -> None:
    made = replace(DEFAULT_DEVICES[0], throttle=0x44, energy_mj=5_000, pcie=(3, 8, 7), ecc_corrected=2)
    bench.gpu.set_devices([made, replace(DEFAULT_DEVICES[1], mig_enabled=True)])
    nvml = bench.probe()
    sm, memory = 1, 2
    for call, arguments, value in (
        ("nvmlDeviceGetClockInfo", (sm,), 1410),
        ("nvmlDeviceGetClockInfo", (memory,), 1593),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", (), 0x44),
        ("nvmlDeviceGetEnforcedPowerLimit", (), 400_000),
        ("nvmlDeviceGetTotalEnergyConsumption", (), 5_000),
        ("nvmlDeviceGetCurrPcieLinkGeneration", (), 3),
        ("nvmlDeviceGetCurrPcieLinkWidth", (), 8),
        ("nvmlDeviceGetPcieReplayCounter", (), 7),
        ("nvmlDeviceGetTotalEccErrors", (0, 0), 2),
    ):
        assert nvml(call, device(0), *arguments) == value, call
    client = bench.client()
    client.ask(f"load {made.uuid} 10 5 31 42")
    _until(lambda: nvml("nvmlDeviceGetEncoderUtilization", device(0))[0] == 31)
    assert nvml("nvmlDeviceGetDecoderUtilization", device(0))[0] == 42
    with pytest.raises(NvmlCallError, match=r"NVMLError_NotSupported$"):
        nvml("nvmlDeviceGetEncoderUtilization", device(1))
    with pytest.raises(NvmlCallError, match=r"NVMLError_InvalidArgument$"):
        nvml("nvmlDeviceGetClockInfo", device(0), 4)


def test_events_are_those_after_the_registration_each_once(bench: Bench) -> None:
    nvml = bench.probe()
    bench.gpu.raise_xid(0, 31)  # before anybody waits for it
    nvml("watch_xids", 2)
    assert nvml("next_xid", 0) == "Timeout"
    bench.gpu.raise_xid(1, 79)
    bench.gpu.raise_xid(0, 13)
    bench.gpu.raise_xid(1, 48)
    found = [nvml("next_xid", 0) for _ in range(3)]
    first, second = (made.uuid for made in DEFAULT_DEVICES)
    assert sorted(found) == sorted([[first, 13], [second, 79], [second, 48]])
    assert nvml("next_xid", 10) == "Timeout"
    bench.gpu.set_devices([replace(DEFAULT_DEVICES[0], lost=True), DEFAULT_DEVICES[1]])
    with pytest.raises(NvmlCallError, match=r"NVMLError_GpuIsLost$"):
        nvml("next_xid", 0)


def test_only_what_is_known_can_be_registered(bench: Bench) -> None:
    nvml = bench.probe()
    assert nvml("nvmlDeviceGetSupportedEventTypes", device(0)) == 8
    assert nvml("register_events", 8) is None
    with pytest.raises(NvmlCallError, match=r"NVMLError_NotSupported$"):
        nvml("register_events", 1)
    with pytest.raises(NvmlCallError, match=r"NVMLError_InvalidArgument$"):
        nvml("register_events", 1 << 40)


def test_instances_are_devices_of_their_own_with_less_to_tell(bench: Bench) -> None:
    nvml = bench.probe()
    migs = (Mig("MIG-a", 3, 1, 5 << 30, 7), Mig("", 0), Mig("MIG-b", 5))
    bench.gpu.set_devices([replace(DEFAULT_DEVICES[0], mig_enabled=True, migs=migs), DEFAULT_DEVICES[1]])
    assert nvml("nvmlDeviceGetMaxMigDeviceCount", device(0)) == 7
    assert nvml("nvmlDeviceGetMaxMigDeviceCount", device(1)) == 0
    memory = {"total": 5 << 30, "free": (5 << 30) - 7, "used": 7}
    assert nvml("of_instance", device(0), 0, "nvmlDeviceGetUUID") == "MIG-a"
    assert nvml("of_instance", device(0), 0, "nvmlDeviceGetGpuInstanceId") == 3
    assert nvml("of_instance", device(0), 0, "nvmlDeviceGetComputeInstanceId") == 1
    assert nvml("of_instance", device(0), 0, "nvmlDeviceGetMemoryInfo") == memory
    assert nvml("of_instance", device(0), 2, "nvmlDeviceGetUUID") == "MIG-b"
    for which, index, error in ((0, 1, "NotFound"), (0, 7, "InvalidArgument"), (1, 0, "NotSupported")):
        with pytest.raises(NvmlCallError, match=f"NVMLError_{error}$"):
            nvml("of_instance", device(which), index, "nvmlDeviceGetUUID")
    for call in ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetMinorNumber"):
        with pytest.raises(NvmlCallError, match=r"NVMLError_NotSupported$"):
            nvml("of_instance", device(0), 0, call)
    for call in ("nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetUtilizationRates"):
        with pytest.raises(NvmlCallError, match=r"NVMLError_NotSupported$"):
            nvml(call, device(0))


# ---- the process list --------------------------------------------------------------------------


def test_an_empty_process_list_is_a_success(bench: Bench) -> None:
    nvml = bench.probe()
    assert nvml("nvmlDeviceGetComputeRunningProcesses", device(0)) == []
    assert nvml("list_into", device(0), 0) == [SUCCESS, 0]


def test_the_process_list_has_who_is_connected(bench: Bench) -> None:
    nvml = bench.probe()
    client = bench.client(memory=777 << 20)
    entry = {
        "pid": os.getpid(),
        "usedGpuMemory": 777 << 20,
        "gpuInstanceId": 0xFFFFFFFF,
        "computeInstanceId": 0xFFFFFFFF,
    }
    assert nvml("nvmlDeviceGetComputeRunningProcesses_v2", device(0)) == [entry]
    assert nvml("nvmlDeviceGetComputeRunningProcesses_v3", device(0)) == [entry]
    assert nvml("nvmlDeviceGetComputeRunningProcesses", device(1)) == []
    client.close()
    _until(lambda: nvml("nvmlDeviceGetComputeRunningProcesses", device(0)) == [])


def test_a_client_of_mps_is_in_its_own_list_and_its_server_in_the_samples(bench: Bench) -> None:
    nvml = bench.probe()
    bench.gpu.mps_server = _host(4711)
    client = Client(bench.gpu)
    assert client.ask(f"mps {DEFAULT_DEVICES[0].uuid} 4096") == "ok"
    assert client.ask(f"load {DEFAULT_DEVICES[0].uuid} 35") == "ok"
    assert nvml("nvmlDeviceGetComputeRunningProcesses", device(0)) == []
    for call in ("nvmlDeviceGetMPSComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses_v2"):
        (entry,) = nvml(call, device(0))
        assert (entry["pid"], entry["usedGpuMemory"]) == (os.getpid(), 4096)
    assert {s["pid"] for s in nvml("nvmlDeviceGetProcessUtilization", device(0), 0)} == {4711}
    client.close()


def test_memory_that_is_not_available_is_none(bench: Bench) -> None:
    nvml = bench.probe()
    bench.client(memory=-1)
    (entry,) = nvml("nvmlDeviceGetComputeRunningProcesses", device(0))
    assert entry["usedGpuMemory"] is None
    assert nvml("nvmlDeviceGetMemoryInfo", device(0))["used"] == 0


def test_a_short_list_buffer_says_how_much_is_needed(bench: Bench) -> None:
    nvml = bench.probe()
    for _ in range(3):
        bench.client()
    assert nvml("list_into", device(0), 0) == [INSUFFICIENT_SIZE, 3]
    assert nvml("list_into", device(0), 2) == [INSUFFICIENT_SIZE, 3]
    assert nvml("list_into", device(0), 3) == [SUCCESS, 3]
    assert nvml("list_into", device(0), 9) == [SUCCESS, 3]


def test_a_list_can_name_a_thread_instead_of_the_process(bench: Bench) -> None:
    nvml = bench.probe()
    bench.client()  # the driver's own thread makes this process one with two threads
    bench.gpu.set_list_threads(on=True)
    (entry,) = nvml("nvmlDeviceGetComputeRunningProcesses", device(0))
    assert entry["pid"] != os.getpid()
    assert f"Tgid:\t{os.getpid()}\n" in Path(f"/proc/{entry['pid']}/status").read_text()


# ---- samples -----------------------------------------------------------------------------------


def test_idle_is_not_found(bench: Bench) -> None:
    nvml = bench.probe()
    bench.client(load=0)
    for call in ("nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo"):
        with pytest.raises(NvmlCallError, match="NVMLError_NotFound"):
            nvml(call, device(0), 0)


@pytest.mark.parametrize("call", ["nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo"])
def test_there_is_one_sample_per_process_and_it_is_the_newest_since(bench: Bench, call: str) -> None:
    nvml = bench.probe()
    for time_us, pid, sm in ((100, 11, 1), (200, 12, 2), (300, 11, 3), (400, 13, 4)):
        bench.gpu.add_sample(_host(pid), 0, Load(sm=sm, mem=5, enc=6, dec=7), time_us)
    bench.gpu.add_sample(_host(99), 1, Load(sm=9), 500)

    def seen(since_us: int) -> set[tuple[int, int, int]]:
        return {(s["timeStamp"], s["pid"], s["smUtil"]) for s in nvml(call, device(0), since_us)}

    assert seen(0) == {(200, 12, 2), (300, 11, 3), (400, 13, 4)}
    assert seen(299) == {(300, 11, 3), (400, 13, 4)}
    assert seen(300) == {(400, 13, 4)}
    with pytest.raises(NvmlCallError, match="NVMLError_NotFound"):
        seen(400)
    (newest,) = nvml(call, device(0), 300)
    assert (newest["memUtil"], newest["encUtil"], newest["decUtil"]) == (5, 6, 7)


def test_a_busy_process_is_sampled_again_and_again_and_stays_after_its_end(bench: Bench) -> None:
    nvml = bench.probe()
    client = bench.client(load=87)
    (first,) = nvml("nvmlDeviceGetProcessUtilization", device(0), 0)
    assert (first["pid"], first["smUtil"]) == (os.getpid(), 87)
    assert abs(first["timeStamp"] / 1e6 - time.time()) < 60
    _until(lambda: _has_sample(nvml, since_us=first["timeStamp"]))
    client.close()
    _until(lambda: nvml("nvmlDeviceGetComputeRunningProcesses", device(0)) == [])
    (last,) = nvml("nvmlDeviceGetProcessUtilization", device(0), 0)
    assert last["pid"] == os.getpid()
    with pytest.raises(NvmlCallError, match="NVMLError_NotFound"):
        nvml("nvmlDeviceGetProcessUtilization", device(0), last["timeStamp"])


def test_a_short_sample_buffer_says_how_much_is_needed(bench: Bench) -> None:
    nvml = bench.probe()
    for pid in (11, 12, 13):
        bench.gpu.add_sample(_host(pid), 0, Load(sm=1), 100)
    assert nvml("samples_into", device(0), 1, 0) == [INSUFFICIENT_SIZE, 3]
    assert nvml("samples_into", device(0), 3, 0) == [SUCCESS, 3]
    assert nvml("samples_into", device(0), 8, 0) == [SUCCESS, 3]


def test_the_list_of_samples_grows_between_question_and_fetch(bench: Bench) -> None:
    nvml = bench.probe()
    bench.client(load=10)
    bench.gpu.set_faults(grow=2)
    for _ in range(2):
        with pytest.raises(NvmlCallError, match="NVMLError_InsufficientSize"):
            nvml("nvmlDeviceGetProcessUtilization", device(0), 0)
    assert len(nvml("nvmlDeviceGetProcessUtilization", device(0), 0)) == 3
    bench.gpu.set_faults()
    assert len(nvml("nvmlDeviceGetProcessUtilization", device(0), 0)) == 1


def test_bad_values_and_pids_come_through_as_they_do_from_real_drivers(bench: Bench) -> None:
    nvml = bench.probe()
    bench.client(load=10)
    bench.gpu.set_faults(Fault.VALUES_ABOVE_100 | Fault.PID_ZERO)
    samples = {s["pid"]: s["smUtil"] for s in nvml("nvmlDeviceGetProcessUtilization", device(0), 0)}
    assert samples == {os.getpid(): 210, 0: 3}


def test_either_sample_call_can_be_unsupported_and_mig_has_neither(bench: Bench) -> None:
    nvml = bench.probe()
    bench.client(load=10)
    old, new = "nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo"
    bench.gpu.set_faults(Fault.PROCESS_UTILIZATION_UNSUPPORTED)
    with pytest.raises(NvmlCallError, match="NVMLError_NotSupported"):
        nvml(old, device(0), 0)
    assert len(nvml(new, device(0), 0)) == 1
    bench.gpu.set_faults(Fault.PROCESSES_INFO_UNSUPPORTED)
    with pytest.raises(NvmlCallError, match="NVMLError_NotSupported"):
        nvml(new, device(0), 0)
    assert len(nvml(old, device(0), 0)) == 1
    bench.gpu.set_faults()
    bench.gpu.set_devices([Device(DEFAULT_DEVICES[0].uuid, mig_enabled=True)])
    assert nvml("nvmlDeviceGetMigMode", device(0)) == [1, 1]
    for call in (old, new):
        with pytest.raises(NvmlCallError, match="NVMLError_NotSupported"):
            nvml(call, device(0), 0)


def test_the_device_is_as_busy_as_its_processes(bench: Bench) -> None:
    nvml = bench.probe()
    bench.client(load=30)
    _until(lambda: nvml("nvmlDeviceGetUtilizationRates", device(0)) == {"gpu": 30, "memory": 15})
    assert nvml("nvmlDeviceGetUtilizationRates", device(1)) == {"gpu": 0, "memory": 0}


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


def test_the_driver_refuses_what_makes_no_sense(bench: Bench) -> None:
    client = bench.client()
    for text in ("context GPU-nobody 1", f"load {DEFAULT_DEVICES[1].uuid} 5", "hello"):
        assert client.ask(text).startswith("error")


def test_a_chain_is_what_the_kernel_says() -> None:
    chain = read_chain(os.getpid())
    assert chain.host_pid == os.getpid()
    assert chain.pidns == os.stat("/proc/self/ns/pid").st_ino


def _has_sample(nvml: Probe, since_us: int) -> bool:
    try:
        return bool(nvml("nvmlDeviceGetProcessUtilization", device(0), since_us))
    except NvmlCallError:
        return False


def _until(condition: object, timeout_s: float = PATIENCE_S) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
