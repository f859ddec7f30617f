"""The NVML worker as the daemon runs it: a real child, the real nvidia-ml-py, a driver that is a stand-in."""

from __future__ import annotations

import asyncio
import json
import os
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from resolver.workers.nvml import LEGACY_REFUSED
from resolver.workers.supervisor import WorkerProcess
from tests.fakes.gpu import DEFAULT_DEVICES, Mig
from tests.fakes.state import Answer, Fault
from tests.unit.conftest import Driver

FIRST, SECOND = (device.uuid for device in DEFAULT_DEVICES)


class Nvml:
    def __init__(self, timeout: float = 60.0) -> None:
        paths = sysconfig.get_paths()
        self.worker = WorkerProcess("nvml worker", "resolver.workers.nvml", paths["purelib"], timeout=timeout)
        self._runner = asyncio.Runner()

    def close(self) -> None:
        self.worker.stop()
        self._runner.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        answer = self._runner.run(self.worker.request(json.dumps(request).encode()))
        return dict(json.loads(answer))

    def devices(self) -> dict[str, Any]:
        return self.ask(call="devices")

    def processes(self, uuid: str = FIRST) -> dict[str, Any]:
        return dict(self.ask(call="several", devices=[[uuid, False]])["answers"][0])

    def samples(self, uuid: str = FIRST) -> dict[str, Any]:
        return dict(self.ask(call="several", devices=[[uuid, True]])["answers"][0])


@pytest.fixture
def nvml(driver: Driver) -> Iterator[Nvml]:
    nvml = Nvml()
    yield nvml
    nvml.close()


NOBODY = {"processes": [], "power": 180.0, "mps": [], "count": 2}


def test_devices(driver: Driver, nvml: Nvml) -> None:
    driver.gpu.set_devices(
        [DEFAULT_DEVICES[0], replace(DEFAULT_DEVICES[1], ecc=None, minor=7, power_mw=70_500)]
    )
    told = {
        "index": 0,
        "uuid": FIRST,
        "failed": {},
        "name": "NVIDIA Stand-in 24GB",
        "minor": 1,
        "pci_address": "0000:3c:00.0",
        "mig": False,
        "nvlinks": None,
        "virtualization": "none",
        "memory": [24 << 30, 0],
        "rates": [0, 0],
        "temperature": 61,
        "power": 180.0,
        "ecc": 0,
        "numa_node": None,  # the machine has no such PCI device
        "pcie_root": None,
        "cpu_socket": None,
    }
    other = told | {"index": 1, "uuid": SECOND, "minor": 7, "power": 70.5, "ecc": None}
    other["pci_address"] = "0000:42:00.0"
    assert nvml.devices() == {"driver_version": "550.54.15", "devices": [told, other]}


def test_nvlinks_are_counted_by_their_other_end(driver: Driver, nvml: Nvml) -> None:
    first, second = (replace(device, nvlinks=4) for device in DEFAULT_DEVICES)
    driver.gpu.set_devices([first, second, replace(second, uuid="GPU-3", minor=2)])
    told = [device["nvlinks"] for device in nvml.devices()["devices"]]
    assert told == [{"0000:3b:00.0": 4}, {"0000:3c:00.0": 4}, {"0000:3e:00.0": 4}]


def test_details_are_read_on_request(driver: Driver, nvml: Nvml) -> None:
    made = replace(DEFAULT_DEVICES[0], throttle=0x4, energy_mj=1500, pcie=(4, 16, 3), ecc_corrected=9)
    driver.gpu.set_devices([made, replace(DEFAULT_DEVICES[1], ecc=None, mig_enabled=True)])
    first, second = nvml.ask(call="devices", details=True)["devices"]
    assert first["details"] == {
        "sm_clock": 1410,
        "memory_clock": 1593,
        "throttle": 4,
        "power_limit": 400.0,
        "energy": 1.5,
        "pcie_generation": 4,
        "pcie_width": 16,
        "pcie_replays": 3,
        "ecc_corrected": 9,
        "encoder": 0,
        "decoder": 0,
    }
    # A value that the driver lacks is None, not a failure.
    assert (second["details"]["ecc_corrected"], second["details"]["encoder"], second["failed"]) == (
        None,
        None,
        {},
    )


def test_without_that_no_call_is_made_for_them(driver: Driver, nvml: Nvml) -> None:
    """A call that would be made answers that the GPU is lost."""
    driver.gpu.set_devices([replace(DEFAULT_DEVICES[0], errors={Answer.DETAILS: LOST}), DEFAULT_DEVICES[1]])
    first, _ = nvml.devices()["devices"]
    assert "error" not in first
    assert "details" not in first
    assert nvml.ask(call="devices", details=True)["devices"][0]["error"] == "GpuIsLost"


def test_xid_errors_come_with_the_samples_of_any_device(driver: Driver, nvml: Nvml) -> None:
    driver.gpu.raise_xid(1, 13)  # before the worker was there
    nvml.devices()
    asked, answers = time.monotonic(), [nvml.samples()]
    assert "xids" not in answers[0]
    for xid in (31, 79, 31):
        driver.gpu.raise_xid(1, xid)
    while "xids" not in answers[-1]:
        answers.append(nvml.samples())
    assert time.monotonic() - asked >= 1.0  # once a second at most
    assert answers[-1]["xids"] == [[SECOND, 31, 2], [SECOND, 79, 1]]
    time.sleep(1.0)
    assert "xids" not in nvml.samples()


@pytest.mark.parametrize("code", [3, 13, 999], ids=str)
def test_a_driver_without_events_is_asked_all_else(driver: Driver, nvml: Nvml, code: int) -> None:
    driver.gpu.set_errors({Answer.EVENTS: code})
    assert [each["uuid"] for each in nvml.devices()["devices"]] == [FIRST, SECOND]
    assert nvml.samples()["status"] == "ok"


def test_uncorrected_errors_count_since_driver_load(driver: Driver, nvml: Nvml) -> None:
    driver.gpu.set_devices([replace(DEFAULT_DEVICES[0], ecc=(2, 40)), DEFAULT_DEVICES[1]])
    assert [device["ecc"] for device in nvml.devices()["devices"]] == [2, 0]


def test_instances_are_told_with_their_memory(driver: Driver, nvml: Nvml) -> None:
    migs = (Mig("MIG-a", 3, 0, memory_used=7), Mig("", 0), Mig("MIG-b", 5, 1, 10 << 30))
    driver.gpu.set_devices([replace(DEFAULT_DEVICES[0], mig_enabled=True, migs=migs), DEFAULT_DEVICES[1]])
    first, second = nvml.devices()["devices"]
    assert first["mig_instances"] == [
        ["MIG-a", 3, 0, 5 << 30, 7, "1g.5gb"],
        ["MIG-b", 5, 1, 10 << 30, 0, "2g.10gb"],
    ]
    assert first["rates"] is None  # in MIG mode the driver does not tell it
    assert first["failed"] == {}
    assert "mig_instances" not in second


VALUES = {
    Answer.NAME: "name",
    Answer.MINOR: "minor",
    Answer.MIG_MODE: "mig",
    Answer.MEMORY: "memory",
    Answer.RATES: "rates",
    Answer.TEMPERATURE: "temperature",
    Answer.POWER: "power",
    Answer.ECC: "ecc",
    Answer.MIG_DEVICES: "mig_instances",
}
LOST, RESET, LIBRARY = 15, 16, {1: "Uninitialized", 9: "DriverNotLoaded", 18: "LibRmVersionMismatch"}
EVERY_ERROR = [*range(1, 31), 999]


@pytest.mark.parametrize("call", VALUES, ids=lambda call: call.name)
def test_failing_value_alone_is_none_with_reason(driver: Driver, nvml: Nvml, call: Answer) -> None:
    device = replace(DEFAULT_DEVICES[0], mig_enabled=call is Answer.MIG_DEVICES)
    driver.gpu.set_devices([device, DEFAULT_DEVICES[1]])
    sound, other = nvml.devices()["devices"]
    for code in EVERY_ERROR:
        driver.gpu.set_devices([replace(device, errors={call: code}), DEFAULT_DEVICES[1]])
        answer = nvml.devices()
        if code in LIBRARY:
            assert answer["error"] == LIBRARY[code]
            continue
        told, beside = answer["devices"]
        assert beside == other
        if code in (LOST, RESET):
            assert told["error"] == ("GpuIsLost" if code == LOST else "ResetRequired")
            assert (told["index"], told["uuid"]) == (0, FIRST)
            continue
        absent = False if call is Answer.MIG_MODE and code in (3, 13) else None
        expected = sound | {VALUES[call]: absent, "failed": told["failed"]}
        assert told == expected
        assert set(told["failed"]) == (set() if code in (3, 13) else {VALUES[call]})
        assert all(reason.endswith(")") for reason in told["failed"].values())
    driver.gpu.set_devices([device, DEFAULT_DEVICES[1]])
    assert nvml.devices()["devices"] == [sound, other]
    assert (nvml.worker.starts, nvml.worker.failures) == (1, 0)


@pytest.mark.parametrize("call", [Answer.HANDLE, Answer.UUID, Answer.ANY], ids=lambda call: call.name)
def test_a_device_that_cannot_be_opened_hides_no_other(driver: Driver, nvml: Nvml, call: Answer) -> None:
    _sound, other = nvml.devices()["devices"]
    for code in EVERY_ERROR:
        driver.gpu.set_devices([replace(DEFAULT_DEVICES[0], errors={call: code}), DEFAULT_DEVICES[1]])
        answer = nvml.devices()
        if code in LIBRARY:
            assert answer["error"] == LIBRARY[code]
            continue
        broken, beside = answer["devices"]
        assert beside == other
        assert (broken["index"], broken["uuid"]) == (0, "")
        assert broken["error"]
        assert broken["text"]


# ---- processes --------------------------------------------------------------------------------


def test_processes_and_their_memory(driver: Driver, nvml: Nvml) -> None:
    with driver.client() as known, driver.client() as unknown:
        known.context(FIRST, 3 << 30)
        assert nvml.samples()["processes"] == [[known.host_pid, 3 << 30]]
        unknown.context(FIRST, -1)
        assert nvml.samples()["processes"] == [
            [known.host_pid, None]
        ]  # the same process: it is not 3 GiB in all
        known.close()
        assert nvml.samples()["processes"] == [[known.host_pid, None]]
        assert nvml.samples(SECOND)["processes"] == []


def test_clients_of_mps_are_in_the_list(driver: Driver, nvml: Nvml) -> None:
    with driver.client() as client:
        client.context(FIRST, 2 << 20, how="mps")
        answer = nvml.samples()
        assert answer["processes"] == [[client.host_pid, 2 << 20]]
        assert answer["mps"] == [client.host_pid]
        driver.gpu.set_errors({Answer.PROCESS_LIST: 999})
        answer = nvml.samples()
        assert (answer["processes"], answer["mps"]) == (None, [client.host_pid])
        driver.gpu.set_errors({Answer.MPS_LIST: 999})
        answer = nvml.samples()  # half a list would say that its clients use no memory
        assert (answer["processes"], answer["mps"]) == (None, None)
        for absent in (3, 13):
            driver.gpu.set_errors({Answer.MPS_LIST: absent})
            assert nvml.processes() == NOBODY


@pytest.mark.parametrize("call", [Answer.PROCESS_LIST, Answer.UTILIZATION], ids=lambda call: call.name)
def test_processes_and_samples_fail_each_for_itself(driver: Driver, nvml: Nvml, call: Answer) -> None:
    stamp = driver.sample(4711, 30)
    with driver.client() as client:
        client.context(FIRST, 1 << 20)
        for code in EVERY_ERROR:
            driver.gpu.set_errors({call: code})
            answer = nvml.samples()
            if code in (LOST, RESET, *LIBRARY):
                assert answer["code"] == code
            elif call is Answer.PROCESS_LIST:
                assert (answer["processes"], answer["samples"]) == (None, [[4711, stamp, 30]])
            else:
                assert answer["processes"] == [[client.host_pid, 1 << 20]]
                statuses = {6: "ok", 3: "unsupported", 13: "unsupported"}  # NOT_FOUND is idle
                assert answer["status"] == statuses.get(code, "failed"), code
                assert answer.get("samples", []) == []


def test_a_list_may_grow_between_the_calls_and_be_old(driver: Driver, nvml: Nvml) -> None:
    with driver.client() as client:
        client.context(FIRST, 1 << 20)
        for version in ("470.256.02", "510.108.03", "550.54.15"):
            driver.install(version)
            nvml.worker.stop()
            driver.gpu.set_faults(grow=3)
            assert [client.host_pid, 1 << 20] in nvml.samples()["processes"]
            driver.gpu.set_faults()
            assert nvml.samples()["processes"] == [[client.host_pid, 1 << 20]]


# ---- samples ----------------------------------------------------------------------------------


def test_samples(driver: Driver, nvml: Nvml) -> None:
    idle = nvml.samples()
    assert abs(idle["now"] / 1e6 - time.time()) < 1
    assert idle == {
        **NOBODY,
        "status": "ok",
        "text": "",
        "samples": [],
        "shares": [],
        "periods": [],
        "start": 0,
        "idle": True,
        "now": idle["now"],
    }
    assert nvml.processes() == NOBODY
    driver.sample(4711, 30, age_s=2)
    late = driver.sample(4712, 100)
    driver.sample(4713, 50, device=1)
    answer = nvml.samples()
    assert (answer["samples"], answer["idle"]) == ([[4712, late, 100]], False)
    assert [late, 100] in answer["periods"]
    assert answer["shares"] == [[4712, 100]]
    assert [late, 100] not in nvml.samples()["periods"]
    assert [pid for pid, _, _ in nvml.samples(SECOND)["samples"]] == [4713]


@pytest.mark.parametrize("code", [3, 6, 13], ids=str)
def test_device_without_own_samples_has_those_of_processes(driver: Driver, nvml: Nvml, code: int) -> None:
    driver.gpu.set_errors({Answer.PERIODS: code})
    stamp = driver.sample(4711, 30)
    answer = nvml.samples()
    assert (answer["samples"], answer["periods"], answer["idle"]) == ([[4711, stamp, 30]], None, False)


@pytest.mark.parametrize("version", ["470.256.02", "510.108.03", "550.54.15"])
def test_old_drivers_without_the_newer_calls(driver: Driver, nvml: Nvml, version: str) -> None:
    driver.install(version)
    driver.sample(4711, 30)
    assert nvml.devices()["driver_version"] == version
    assert [sm for _, _, sm in nvml.samples()["samples"]] == [30]
    driver.gpu.set_faults(Fault.PROCESS_UTILIZATION_UNSUPPORTED)
    answer = nvml.samples()
    if version == "550.54.15":  # the first with the other call
        assert [sm for _, _, sm in answer["samples"]] == [30]
    else:
        assert answer == {"status": "unsupported", "text": "Not Supported", **NOBODY}


def test_entries_of_32_bytes_are_read_right(driver: Driver, nvml: Nvml) -> None:
    driver.install("535.86.10")
    with driver.client() as one, driver.client() as two, driver.client() as three:
        for client in (one, two, three):
            client.context(FIRST, 1 << 30)
        assert nvml.samples()["processes"] == [[one.host_pid, 3 << 30]], "all are one process's"


def test_the_other_call_answers_alike(driver: Driver, nvml: Nvml) -> None:
    driver.gpu.set_faults(Fault.PROCESS_UTILIZATION_UNSUPPORTED)
    assert nvml.samples()["samples"] == []
    stamp = driver.sample(4711, 30)
    assert nvml.samples()["samples"] == [[4711, stamp, 30]]
    assert nvml.samples()["text"] == LEGACY_REFUSED
    driver.gpu.set_faults(Fault.PROCESS_UTILIZATION_UNSUPPORTED, grow=2)
    assert [4711, stamp, 30] in nvml.samples()["samples"]
    driver.gpu.set_faults(Fault.PROCESS_UTILIZATION_UNSUPPORTED | Fault.PROCESSES_INFO_UNSUPPORTED)
    assert nvml.samples()["status"] == "unsupported"


def test_values_that_cannot_be_are_handed_on(driver: Driver, nvml: Nvml) -> None:
    stamp = driver.sample(4711, 30)
    driver.gpu.set_faults(Fault.PID_ZERO)
    assert [pid for pid, _, _ in nvml.samples()["samples"]] == [4711, 0]
    driver.gpu.set_faults(Fault.VALUES_ABOVE_100)
    answer = nvml.samples()
    assert answer["samples"] == [[4711, stamp, 230]]


def test_an_unknown_device_is_an_error_and_not_idle(nvml: Nvml) -> None:
    answer = nvml.samples("GPU-00000000-0000-0000-0000-000000000000")
    assert answer["error"] == "NotFound"


def test_a_library_that_is_not_there_is_waited_for(driver: Driver, nvml: Nvml) -> None:
    driver.remove()
    for _ in range(2):
        assert nvml.devices()["error"] == "LibraryNotFound"
    driver.install("550.54.15")
    assert len(nvml.devices()["devices"]) == 2
    assert nvml.worker.starts == 1


def test_descriptors_do_not_pile_up(driver: Driver, nvml: Nvml) -> None:
    counts = set()
    for turn in range(60):
        driver.gpu.set_faults(Fault.DRIVER_NOT_LOADED if turn % 2 else 0)
        nvml.devices()
        counts.add(len(os.listdir(f"/proc/{nvml.worker.host_pid}/fd")))
    assert len(counts) == 1
