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

from resolver.errors import WorkerFailed
from resolver.workers import Worker
from tests.fakes.gpu import DEFAULT_DEVICES
from tests.fakes.state import Fault, Hang
from tests.unit.conftest import Driver

FIRST, SECOND = (device.uuid for device in DEFAULT_DEVICES)


class Nvml:
    def __init__(self, timeout: float = 5.0) -> None:
        paths = sysconfig.get_paths()
        self.worker = Worker("nvml worker", "resolver.gpu.nvml_worker", paths["purelib"], timeout=timeout)
        self._runner = asyncio.Runner()

    def close(self) -> None:
        self.worker.stop()
        self._runner.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        answer = self._runner.run(self.worker.request(json.dumps(request).encode()))
        return dict(json.loads(answer))

    def devices(self) -> dict[str, Any]:
        return self.ask(call="devices")

    def samples(self, uuid: str = FIRST, since: int | None = None) -> dict[str, Any]:
        since = int((time.time() - 10) * 1e6) if since is None else since
        return self.ask(call="samples", uuid=uuid, since=since)


@pytest.fixture
def nvml(driver: Driver) -> Iterator[Nvml]:
    nvml = Nvml()
    yield nvml
    nvml.close()


def test_devices(nvml: Nvml) -> None:
    assert nvml.devices() == {
        "driver_version": "550.54.15",
        "devices": [
            {"index": 0, "uuid": FIRST, "name": "NVIDIA Stand-in 24GB", "mig": False},
            {"index": 1, "uuid": SECOND, "name": "NVIDIA Stand-in 24GB", "mig": False},
        ],
    }


def test_mig_mode_is_told(driver: Driver, nvml: Nvml) -> None:
    driver.gpu.set_devices([replace(DEFAULT_DEVICES[0], mig_enabled=True), DEFAULT_DEVICES[1]])
    assert [device["mig"] for device in nvml.devices()["devices"]] == [True, False]
    assert nvml.samples(FIRST)["status"] == "unsupported"
    assert nvml.samples(SECOND)["status"] == "ok"


def test_samples(driver: Driver, nvml: Nvml) -> None:
    assert nvml.samples() == {"status": "ok", "samples": [], "dropped": []}  # NOT_FOUND is idle
    early, late = driver.sample(4711, 30, age_s=2), driver.sample(4712, 100, age_s=1)
    driver.sample(4713, 50, device=1)
    assert sorted(nvml.samples()["samples"]) == [[4711, early, 30], [4712, late, 100]]
    assert nvml.samples(since=early)["samples"] == [[4712, late, 100]]
    assert nvml.samples(since=late)["samples"] == []
    assert [pid for pid, _, _ in nvml.samples(SECOND)["samples"]] == [4713]


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
        assert answer == {"status": "unsupported", "text": "Not Supported"}


def test_the_other_call_answers_alike(driver: Driver, nvml: Nvml) -> None:
    driver.gpu.set_faults(Fault.PROCESS_UTILIZATION_UNSUPPORTED)
    assert nvml.samples() == {"status": "ok", "samples": [], "dropped": []}
    stamp = driver.sample(4711, 30)
    assert nvml.samples()["samples"] == [[4711, stamp, 30]]
    driver.gpu.set_faults(Fault.PROCESS_UTILIZATION_UNSUPPORTED, grow=2)
    assert [4711, stamp, 30] in nvml.samples()["samples"]
    driver.gpu.set_faults(Fault.PROCESS_UTILIZATION_UNSUPPORTED | Fault.PROCESSES_INFO_UNSUPPORTED)
    assert nvml.samples()["status"] == "unsupported"


def test_the_list_may_grow_between_the_calls(driver: Driver, nvml: Nvml) -> None:
    stamp = driver.sample(4711, 30)
    driver.gpu.set_faults(grow=3)
    assert [4711, stamp, 30] in nvml.samples()["samples"]
    driver.gpu.set_faults()
    assert nvml.samples()["samples"] == [[4711, stamp, 30]]
    driver.gpu.set_faults(grow=1000)  # it never stops growing: an error, neither a loop nor an empty list
    assert nvml.samples()["error"] == "InsufficientSize"


def test_values_that_cannot_be_are_told_apart(driver: Driver, nvml: Nvml) -> None:
    stamp = driver.sample(4711, 30)
    driver.gpu.set_faults(Fault.PID_ZERO)
    answer = nvml.samples()
    assert answer["samples"] == [[4711, stamp, 30]]
    assert [pid for pid, _, _ in answer["dropped"]] == [0]
    driver.gpu.set_faults(Fault.VALUES_ABOVE_100)
    assert nvml.samples() == {"status": "ok", "samples": [], "dropped": [[4711, stamp, 230]]}


def test_an_unknown_device_is_an_error_and_not_idle(nvml: Nvml) -> None:
    answer = nvml.samples("GPU-00000000-0000-0000-0000-000000000000")
    assert answer["error"] == "NotFound"


def test_a_lost_gpu_hides_no_other_and_comes_back(driver: Driver, nvml: Nvml) -> None:
    assert len(nvml.devices()["devices"]) == 2
    driver.gpu.set_devices([replace(DEFAULT_DEVICES[0], lost=True), DEFAULT_DEVICES[1]])
    answer = nvml.samples(FIRST)
    assert (answer["error"], answer["text"]) == ("GpuIsLost", "GPU is lost")
    for _ in range(3):
        lost, well = nvml.devices()["devices"]
        assert (lost["uuid"], lost["error"], well["uuid"]) == ("", "GPU is lost", SECOND)
        assert nvml.samples(SECOND)["status"] == "ok"
    driver.gpu.set_devices(DEFAULT_DEVICES)
    assert [device["uuid"] for device in nvml.devices()["devices"]] == [FIRST, SECOND]
    assert nvml.samples(FIRST)["status"] == "ok"
    assert nvml.worker.failures == 0


def test_a_driver_that_goes_and_comes(driver: Driver, nvml: Nvml) -> None:
    nvml.devices()
    driver.gpu.set_faults(Fault.DRIVER_NOT_LOADED)
    for _ in range(3):
        assert nvml.devices()["error"] == "DriverNotLoaded"
        assert nvml.samples()["error"] == "DriverNotLoaded"
    driver.gpu.set_faults()
    assert len(nvml.devices()["devices"]) == 2
    assert (nvml.worker.starts, nvml.worker.failures) == (1, 0)


def test_a_library_that_is_not_there_is_waited_for(driver: Driver, nvml: Nvml) -> None:
    driver.remove()
    for _ in range(2):
        assert nvml.devices()["error"] == "LibraryNotFound"
    driver.install("550.54.15")
    assert len(nvml.devices()["devices"]) == 2
    assert nvml.worker.starts == 1


@pytest.mark.parametrize("hang", [Hang.INIT, Hang.COUNT, Hang.UTILIZATION])
def test_a_call_that_hangs_costs_one_worker(driver: Driver, hang: Hang) -> None:
    nvml = Nvml(timeout=0.5)
    try:
        driver.gpu.set_faults(hang=hang)
        with pytest.raises(WorkerFailed, match=r"did not answer within 0\.5 s"):
            nvml.samples()
        driver.gpu.set_faults()
        assert nvml.samples()["status"] == "ok"
        assert (nvml.worker.starts, nvml.worker.failures) == (2, 1)
    finally:
        nvml.close()


def test_an_unknown_request_ends_the_child(nvml: Nvml) -> None:
    with pytest.raises(WorkerFailed, match="ended with code 1"):
        nvml.ask(call="shutdown")
    assert len(nvml.devices()["devices"]) == 2


def test_descriptors_do_not_pile_up(driver: Driver, nvml: Nvml) -> None:
    counts = set()
    for turn in range(60):
        driver.gpu.set_faults(Fault.DRIVER_NOT_LOADED if turn % 2 else 0)
        nvml.devices()
        counts.add(len(os.listdir(f"/proc/{nvml.worker.host_pid}/fd")))
    assert len(counts) == 1
