"""The NVML worker as the daemon runs it: a real child, the real nvidia-ml-py, and a fake driver."""

import asyncio
import json
import os
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from resolver.workers.nvml_samples import LEGACY_REFUSED
from resolver.workers.supervisor import WorkerProcess
from tests.fakes.gpu import DEFAULT_DEVICES, Mig
from tests.fakes.state import Answer, Fault
from tests.patience import PATIENCE_S
from tests.unit.conftest import Driver

FIRST, SECOND = (device.uuid for device in DEFAULT_DEVICES)


class Nvml:
    def __init__(self, timeout: float = 60.0) -> None:
        paths = sysconfig.get_paths()
        self.worker = WorkerProcess("nvml worker", "resolver.workers.nvml", paths["purelib"], timeout=timeout)
        self._runner = asyncio.Runner()

    def close(self) -> None:
        self.worker.stop(PATIENCE_S)
        self._runner.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        answer = self._runner.run(self.worker.request(json.dumps(request).encode()))
        return dict(json.loads(answer))

    def devices(self) -> dict[str, Any]:
        return self.ask(call="devices")

    def several(self, uuid: str = FIRST) -> dict[str, Any]:
        return self.ask(call="several", uuids=[uuid])

    def samples(self, uuid: str = FIRST) -> dict[str, Any]:
        return dict(self.several(uuid)["answers"][0])


@pytest.fixture
def nvml(driver: Driver) -> Iterator[Nvml]:
    nvml = Nvml()
    yield nvml
    nvml.close()


NOBODY = {"memory": {}, "power": 180.0, "mps": []}


def test_devices(driver: Driver, nvml: Nvml) -> None:
    first, second = (replace(device, nvlinks=4) for device in DEFAULT_DEVICES)
    driver.gpu.set_devices([DEFAULT_DEVICES[0], replace(second, ecc=None, minor=7, power_mw=70_500)])
    first_gpu = {
        "device_index": 0,
        "uuid": FIRST,
        "name": "NVIDIA Stand-in 24GB",
        "minor": 1,
        "pci_address": "0000:3c:00.0",
        "mig": False,
        "nvlinks": None,
        "virtualization": "none",
        "memory_total": 24 << 30,
        "memory_used": 0,
        "utilization": 0,
        "memory_utilization": 0,
        "temperature": 61,
        "power": 180.0,
        "ecc_uncorrected": 0,
        "numa_node": None,  # the machine has no such PCI device
        "pcie_root": None,
        "cpu_socket": None,
    }
    other = first_gpu | {"device_index": 1, "uuid": SECOND, "minor": 7, "power": 70.5}
    other |= {"pci_address": "0000:42:00.0", "nvlinks": {"0000:41:00.0": 4}, "ecc_uncorrected": None}
    devices = [{"gpu": first_gpu, "failed": {}}, {"gpu": other, "failed": {}}]
    assert nvml.devices() == {"driver_version": "550.54.15", "devices": devices}
    driver.gpu.set_devices([first, second, replace(second, uuid="GPU-3", minor=2)])
    links = [device["gpu"]["nvlinks"] for device in nvml.devices()["devices"]]
    assert links == [{"0000:3b:00.0": 4}, {"0000:3c:00.0": 4}, {"0000:3e:00.0": 4}]


def test_xid_errors_come_with_the_samples_of_any_device(driver: Driver, nvml: Nvml) -> None:
    driver.gpu.raise_xid(1, 13)  # before the worker started
    nvml.devices()
    asked, answers = time.monotonic(), [nvml.several()]
    assert answers[0]["xids"] == []
    for xid in (31, 79, 31):
        driver.gpu.raise_xid(1, xid)
    while not answers[-1]["xids"]:
        answers.append(nvml.several())
    assert time.monotonic() - asked >= 1.0  # once a second at most
    assert answers[-1]["xids"] == [[SECOND, 31, 2], [SECOND, 79, 1]]
    time.sleep(1.0)
    assert nvml.several()["xids"] == []


@pytest.mark.parametrize("code", [3, 13, 999], ids=str)
def test_a_driver_without_events_is_asked_all_else(driver: Driver, nvml: Nvml, code: int) -> None:
    driver.gpu.set_errors({Answer.EVENTS: code})
    assert [each["gpu"]["uuid"] for each in nvml.devices()["devices"]] == [FIRST, SECOND]
    assert nvml.samples()["status"] == "ok"


def test_instances_are_told_with_their_memory(driver: Driver, nvml: Nvml) -> None:
    migs = (Mig("MIG-a", 3, 0, memory_used=7), Mig("", 0), Mig("MIG-b", 5, 1, 10 << 30))
    first = replace(DEFAULT_DEVICES[0], mig_enabled=True, migs=migs, ecc=(2, 40))
    driver.gpu.set_devices([first, DEFAULT_DEVICES[1]])
    mig_gpu, second = nvml.devices()["devices"]
    assert [list(each.values()) for each in mig_gpu["gpu"]["mig_instances"]] == [
        ["MIG-a", 3, 0, 5 << 30, 7, "1g.5gb"],
        ["MIG-b", 5, 1, 10 << 30, 0, "2g.10gb"],
    ]
    assert mig_gpu["gpu"]["utilization"] is None  # the driver reports none in MIG mode
    assert mig_gpu["gpu"]["ecc_uncorrected"] == 2  # since the driver was loaded
    assert mig_gpu["failed"] == {}
    assert "mig_instances" not in second["gpu"]


#: Each call that reads a value, its name, and the fields that are None without it.
VALUES = {
    Answer.NAME: ("name", ()),
    Answer.MINOR: ("minor", ("minor",)),
    Answer.MIG_MODE: ("mig", ()),
    Answer.MEMORY: ("memory", ("memory_total", "memory_used")),
    Answer.RATES: ("rates", ("utilization", "memory_utilization")),
    Answer.TEMPERATURE: ("temperature", ("temperature",)),
    Answer.POWER: ("power", ("power",)),
    Answer.ECC: ("ecc_uncorrected", ("ecc_uncorrected",)),
    Answer.MIG_DEVICES: ("mig_instances", ()),
}
LOST, RESET, LIBRARY = 15, 16, {1: "Uninitialized", 9: "DriverNotLoaded", 18: "LibRmVersionMismatch"}
EVERY_ERROR = [*range(1, 31), 999]


@pytest.mark.parametrize("call", VALUES, ids=lambda call: call.name)
def test_failing_value_alone_is_none_with_reason(driver: Driver, nvml: Nvml, call: Answer) -> None:
    device = replace(DEFAULT_DEVICES[0], mig_enabled=call is Answer.MIG_DEVICES)
    driver.gpu.set_devices([device, DEFAULT_DEVICES[1]])
    sound, other = nvml.devices()["devices"]
    name, fields = VALUES[call]
    for code in EVERY_ERROR:
        driver.gpu.set_devices([replace(device, errors={call: code}), DEFAULT_DEVICES[1]])
        answer = nvml.devices()
        if code in LIBRARY:
            assert answer["error"] == LIBRARY[code]
            continue
        answered, beside = answer["devices"]
        assert beside == other
        if code in (LOST, RESET):
            assert answered["error"] == ("GpuIsLost" if code == LOST else "ResetRequired")
            assert answered["gpu"] == {"device_index": 0, "uuid": FIRST}
            continue
        expected = sound["gpu"] | dict.fromkeys(fields)
        expected |= {"name": ""} if call is Answer.NAME else {}
        if call is Answer.MIG_MODE and code not in (3, 13):
            expected["mig"] = None
        assert answered["gpu"] == expected
        assert set(answered["failed"]) == (set() if code in (3, 13) else {name})
        assert all(reason.endswith(")") for reason in answered["failed"].values())
    driver.gpu.set_devices([device, DEFAULT_DEVICES[1]])
    assert nvml.devices()["devices"] == [sound, other]
    assert (nvml.worker.starts, nvml.worker.failures) == (1, 0)


def test_processes_and_their_memory(driver: Driver, nvml: Nvml) -> None:
    with driver.client() as known, driver.client() as unknown:
        known.context(FIRST, 3 << 30)
        pid = str(known.host_pid)
        assert nvml.samples()["memory"] == {pid: 3 << 30}
        unknown.context(FIRST, -1)
        assert nvml.samples()["memory"] == {pid: None}  # both belong to one process, so the sum is not 3 GiB
        known.close()
        assert nvml.samples()["memory"] == {pid: None}
        assert nvml.samples(SECOND)["memory"] == {}
        unknown.context(FIRST, 2 << 20, how="mps")
        for errors, memory, mps in (
            ({}, {pid: 2 << 20}, [unknown.host_pid]),
            ({Answer.PROCESS_LIST: 999}, None, [unknown.host_pid]),
            ({Answer.MPS_LIST: 999}, None, None),  # a partial list would imply that its clients use no memory
            ({Answer.MPS_LIST: 3}, {}, []),
            ({Answer.MPS_LIST: 13}, {}, []),
        ):
            driver.gpu.set_errors(errors)
            answer = nvml.samples()
            assert (answer["memory"], answer["mps"]) == (memory, mps), errors


@pytest.mark.parametrize("call", [Answer.PROCESS_LIST, Answer.UTILIZATION], ids=lambda call: call.name)
def test_processes_and_samples_fail_each_for_itself(driver: Driver, nvml: Nvml, call: Answer) -> None:
    driver.sample(4711, 30)
    with driver.client() as client:
        client.context(FIRST, 1 << 20)
        for code in EVERY_ERROR:
            driver.gpu.set_errors({call: code})
            answer = nvml.samples()
            if code in (LOST, RESET, *LIBRARY):
                assert (answer["status"], answer["why"][-1]) == ("failed", ")")
            elif call is Answer.PROCESS_LIST:
                assert (answer["memory"], answer["newest"]) == (None, {"4711": 30})
            else:
                assert answer["memory"] == {str(client.host_pid): 1 << 20}
                statuses = {6: "ok", 3: "unsupported", 13: "unsupported"}  # NOT_FOUND means idle
                assert answer["status"] == statuses.get(code, "failed"), code
                assert answer.get("newest", {}) == {}


def test_a_list_may_grow_between_the_calls_and_be_old(driver: Driver, nvml: Nvml) -> None:
    with driver.client() as client:
        client.context(FIRST, 1 << 20)
        for version in ("470.256.02", "510.108.03", "550.54.15"):
            driver.install(version)
            nvml.worker.stop(PATIENCE_S)
            driver.gpu.set_faults(grow=3)
            listed = {str(client.host_pid): 1 << 20}
            assert nvml.samples()["memory"].items() > listed.items()
            driver.gpu.set_faults()
            assert nvml.samples()["memory"] == listed


def test_samples(driver: Driver, nvml: Nvml) -> None:
    idle = {"why": "", "newest": {}, "shares": {}, "periods": [], "start": 0, "idle": True}
    assert nvml.samples() == {**NOBODY, "status": "ok", **idle}
    driver.sample(4711, 30, age_s=2)
    late = driver.sample(4712, 100)
    driver.sample(4713, 50, device=1)
    answer = nvml.samples()
    assert (answer["newest"], answer["idle"], answer["shares"]) == ({"4712": 100}, False, {"4712": 100})
    assert [late, 100] in answer["periods"]
    assert [late, 100] not in nvml.samples()["periods"]
    assert list(nvml.samples(SECOND)["newest"]) == ["4713"]


@pytest.mark.parametrize(("code", "status"), [(3, "unsupported"), (6, "failed"), (13, "unsupported")])
def test_without_samples_of_the_device_none_is_dated(
    driver: Driver, nvml: Nvml, code: int, status: str
) -> None:
    driver.gpu.set_errors({Answer.PERIODS: code})
    driver.sample(4711, 30)
    answer = nvml.samples()
    assert (answer["status"], answer.get("newest")) == (status, None)


@pytest.mark.parametrize("version", ["470.256.02", "510.108.03", "550.54.15"])
def test_refused_call_is_named_where_the_other_answers(driver: Driver, nvml: Nvml, version: str) -> None:
    driver.install(version)
    driver.sample(4711, 30)
    assert nvml.devices()["driver_version"] == version
    assert nvml.samples()["newest"] == {"4711": 30}
    driver.gpu.set_faults(Fault.PROCESS_UTILIZATION_UNSUPPORTED, grow=2)
    answer = nvml.samples()
    if version == "550.54.15":  # the first release with the other call
        assert answer["newest"]["4711"] in (15, 10, 30)
        assert answer["why"] == nvml.samples()["why"] == LEGACY_REFUSED
        driver.gpu.set_faults(Fault.PROCESS_UTILIZATION_UNSUPPORTED | Fault.PROCESSES_INFO_UNSUPPORTED)
        answer = nvml.samples()
    driver.gpu.set_faults(Fault.PROCESS_UTILIZATION_UNSUPPORTED | Fault.PROCESSES_INFO_UNSUPPORTED)
    assert nvml.samples() == {"status": "unsupported", "why": "Not Supported", **NOBODY}


def test_entries_of_32_bytes_are_read_right(driver: Driver, nvml: Nvml) -> None:
    driver.install("535.86.10")
    with driver.client() as one, driver.client() as two, driver.client() as three:
        for client in (one, two, three):
            client.context(FIRST, 1 << 30)
        assert nvml.samples()["memory"] == {str(one.host_pid): 3 << 30}, "all are one process's"


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
