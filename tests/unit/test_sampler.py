"""What is known of every device: values, idle, unknown; never one for another."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from resolver.gpu import sampler as module
from resolver.gpu.sampler import FAILED, OK, UNSUPPORTED, Collection, Sampler
from resolver.procfs import Procfs
from tests.fakes.gpu import DEFAULT_DEVICES
from tests.fakes.state import Fault, Hang
from tests.unit.conftest import Driver

FIRST, SECOND = (device.uuid for device in DEFAULT_DEVICES)


class Bench:
    def __init__(self) -> None:
        self.sampler = Sampler()
        self._runner = asyncio.Runner()

    def close(self) -> None:
        self.sampler.worker.stop()
        self._runner.close()

    def collect(self) -> Collection:
        return self._runner.run(self.sampler.collect())

    def load(self, uuid: str = FIRST) -> dict[int, int]:
        """What is known of one device: ``{pid: per cent}``."""
        collection = self.collect()
        assert collection.error == ""
        assert collection.devices[uuid].status == OK
        return {pid: sm for pid, (_, sm) in collection.devices[uuid].newest.items()}


@pytest.fixture
def bench(driver: Driver) -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


class Clock:
    """Wall clock of the sampler only; the driver keeps the real one."""

    def __init__(self) -> None:
        self.offset = 0.0

    def time(self) -> float:
        return time.time() + self.offset


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(time=clock.time, monotonic=time.monotonic))
    return clock


def test_nothing_runs(bench: Bench) -> None:
    before = time.time()
    collection = bench.collect()
    assert before <= collection.at <= time.time()
    assert (collection.error, collection.driver_version) == ("", "550.54.15")
    assert list(collection.devices) == [FIRST, SECOND]
    for device in collection.devices.values():
        assert (device.status, device.why, dict(device.newest), device.dropped) == (OK, "", {}, frozenset())


def test_the_newest_sample_of_each_process_counts(driver: Driver, bench: Bench) -> None:
    driver.sample(4711, 30, age_s=0.5)
    driver.sample(4711, 60, age_s=0.1)
    driver.sample(4712, 5, age_s=0.9)
    driver.sample(4713, 7, device=1)
    assert bench.load() == {4711: 60, 4712: 5}
    assert bench.load(SECOND) == {4713: 7}


def test_processes_that_ended_long_ago_do_not_come_back(driver: Driver, bench: Bench) -> None:
    driver.sample(4711, 30, age_s=5)
    driver.sample(4712, 30, age_s=1.1)
    assert bench.load() == {}


def test_a_sample_speaks_for_one_second_however_often_is_asked(driver: Driver, bench: Bench) -> None:
    driver.sample(4711, 30)
    began = time.monotonic()
    seen = []
    while time.monotonic() < began + 1.3:
        seen.append((time.monotonic() - began, bench.load()))
        time.sleep(0.05)
    assert all(load == {4711: 30} for at, load in seen if at < 0.9)
    assert all(load == {} for at, load in seen if at > 1.1)


def test_only_what_is_new_is_asked_for(driver: Driver, bench: Bench) -> None:
    stamp = driver.sample(4711, 30)
    bench.collect()
    assert bench.sampler._watermarks[FIRST] == stamp
    driver.sample(4711, 99, age_s=0.3)  # older than what was seen: a driver that answers late
    assert bench.load() == {4711: 30}


def test_a_time_stamp_from_the_future_is_taken_as_now(driver: Driver, bench: Bench) -> None:
    driver.sample(4711, 30, age_s=-3600)
    assert bench.load() == {4711: 30}
    assert bench.sampler._watermarks[FIRST] <= time.time() * 1e6
    driver.sample(4712, 40)
    assert bench.load()[4712] == 40


def test_a_clock_that_is_set_back_hides_nothing(driver: Driver, bench: Bench, clock: Clock) -> None:
    clock.offset = 3600.0
    driver.sample(4711, 30, age_s=-3600)
    assert bench.load() == {4711: 30}
    clock.offset = 0.0
    driver.sample(4711, 55)
    assert bench.load() == {4711: 55}
    driver.sample(4711, 0)
    driver.sample(4711, 66)
    assert bench.load() == {4711: 66}


def test_a_value_that_cannot_be_is_unknown_for_as_long_as_a_good_one_speaks(
    driver: Driver, bench: Bench, clock: Clock
) -> None:
    driver.sample(4711, 30, age_s=0.5)
    assert bench.load() == {4711: 30}
    driver.sample(4711, 230)
    unknown = bench.collect().devices[FIRST]
    assert unknown.dropped == {4711}
    assert bench.collect().devices[FIRST].dropped == {4711}  # asked again at once: still not idle
    assert bench.sampler.implausible == 1
    driver.sample(4711, 40)
    known = bench.collect().devices[FIRST]
    assert (known.dropped, known.newest[4711][1]) == (frozenset(), 40)
    driver.sample(4711, 240)
    clock.offset = 1.2
    idle = bench.collect().devices[FIRST]
    assert (idle.dropped, dict(idle.newest)) == (frozenset(), {})


def test_a_pid_of_zero_is_counted(driver: Driver, bench: Bench) -> None:
    driver.gpu.set_faults(Fault.PID_ZERO)
    device = bench.collect().devices[FIRST]
    assert (device.status, dict(device.newest), device.dropped) == (OK, {}, frozenset({0}))
    assert bench.sampler.implausible >= 1


def test_mig_is_unsupported(driver: Driver, bench: Bench) -> None:
    driver.gpu.set_devices([replace(DEFAULT_DEVICES[0], mig_enabled=True), DEFAULT_DEVICES[1]])
    driver.sample(4711, 30, device=1)
    devices = bench.collect().devices
    assert (devices[FIRST].status, dict(devices[FIRST].newest)) == (UNSUPPORTED, {})
    assert "MIG" in devices[FIRST].why
    assert devices[SECOND].status == OK


def test_a_driver_without_either_call_is_unsupported(driver: Driver, bench: Bench) -> None:
    driver.gpu.set_faults(Fault.PROCESS_UTILIZATION_UNSUPPORTED | Fault.PROCESSES_INFO_UNSUPPORTED)
    device = bench.collect().devices[FIRST]
    assert (device.status, device.why) == (UNSUPPORTED, "Not Supported")


def test_a_lost_device_has_failed_is_not_idle_and_comes_back(
    driver: Driver, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_INCOMPLETE_SECONDS", 0.0)
    driver.sample(4711, 30)
    assert bench.load() == {4711: 30}
    driver.gpu.set_devices([replace(DEFAULT_DEVICES[0], lost=True), DEFAULT_DEVICES[1]])
    device = bench.collect().devices[FIRST]
    assert (device.status, dict(device.newest)) == (FAILED, {})
    assert "GPU is lost" in device.why
    for _ in range(2):
        collection = bench.collect()
        assert FIRST not in collection.devices
        assert collection.devices[SECOND].status == OK
    driver.gpu.set_devices(DEFAULT_DEVICES)
    driver.sample(4711, 35)
    assert bench.load() == {4711: 35}


def test_devices_are_told_by_uuid_and_not_by_index(driver: Driver, bench: Bench) -> None:
    driver.sample(4711, 30, device=0)
    assert bench.load(FIRST) == {4711: 30}
    driver.gpu.set_devices([DEFAULT_DEVICES[1]])  # the first fell off the bus; samples go by index
    driver.sample(4712, 50, device=0)
    collection = bench.collect()
    assert collection.devices[FIRST].status == FAILED
    assert collection.devices[SECOND].newest[4712][1] == 50
    assert list(bench.collect().devices) == [SECOND]
    assert FIRST not in bench.sampler._watermarks | bench.sampler._newest | bench.sampler._dropped


@pytest.mark.parametrize("how", ["driver unloaded", "worker stopped", "driver hangs"])
def test_a_failure_is_not_idle(driver: Driver, bench: Bench, how: str) -> None:
    bench.sampler.worker.timeout = 0.3
    driver.sample(4711, 30)
    assert bench.load() == {4711: 30}
    if how == "worker stopped":
        assert bench.sampler.worker.host_pid
        os.kill(bench.sampler.worker.host_pid, signal.SIGSTOP)
    elif how == "driver unloaded":
        driver.gpu.set_faults(Fault.DRIVER_NOT_LOADED)
    else:
        driver.gpu.set_faults(hang=Hang.UTILIZATION)
    collection = bench.collect()
    assert collection.error or collection.devices[FIRST].status == FAILED
    assert not collection.error or not collection.devices
    assert collection.driver_version == "550.54.15"  # what hostpid must be is still known
    driver.gpu.set_faults()
    driver.sample(4711, 35)
    bench.collect()
    assert bench.load() == {4711: 35}


def test_a_killed_worker_is_not_even_noticed(driver: Driver, bench: Bench) -> None:
    bench.collect()
    assert bench.sampler.worker.host_pid
    with Procfs().open_handle(bench.sampler.worker.host_pid) as handle:
        os.kill(bench.sampler.worker.host_pid, signal.SIGKILL)
        while handle.alive():
            time.sleep(0.001)
    driver.sample(4711, 30)
    assert bench.load() == {4711: 30}


@pytest.mark.parametrize("directory", [False, True], ids=["library", "directory"])
def test_a_node_without_nvml_gets_it(
    driver: Driver, bench: Bench, monkeypatch: pytest.MonkeyPatch, *, directory: bool
) -> None:
    driver.remove(directory=directory)
    for _ in range(3):
        collection = bench.collect()
        assert "LibraryNotFound" in collection.error
        assert (collection.driver_version, dict(collection.devices)) == (None, {})
    assert bench.sampler.worker.starts <= 2  # a look costs no process each time
    driver.install("535.104.05")
    monkeypatch.setattr(module, "_RESTART_SECONDS", 0.0)
    bench.sampler._next_restart = 0.0
    bench.collect()
    collection = bench.collect()
    assert (collection.error, collection.driver_version) == ("", "535.104.05")


def test_a_driver_that_is_replaced_gets_a_new_worker(driver: Driver, bench: Bench) -> None:
    assert bench.collect().driver_version == "550.54.15"
    driver.gpu.set_faults(Fault.DRIVER_NOT_LOADED)
    assert bench.collect().devices[FIRST].status == FAILED
    driver.gpu.set_faults()
    driver.install("510.108.03")
    assert "LibRmVersionMismatch" in bench.collect().error
    collection = bench.collect()
    assert (collection.error, collection.driver_version) == ("", "510.108.03")
    assert bench.sampler.worker.failures == 0
