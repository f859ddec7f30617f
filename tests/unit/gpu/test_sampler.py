"""Each device's state: values, idle or unknown, never confused with another device's."""

import asyncio
import os
import time
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from resolver.base.reasons import STARTING
from resolver.gpu import sampler as module
from resolver.gpu.inventory import Gpu, MigInstance
from resolver.gpu.sampler import OK, UNSUPPORTED, Collection, Sampler
from tests.fakes.chain import Chain
from tests.fakes.gpu import DEFAULT_DEVICES, Device, Mig
from tests.fakes.state import Answer, Fault, Hang
from tests.unit.conftest import Driver

FIRST, SECOND = (device.uuid for device in DEFAULT_DEVICES)
T = TypeVar("T")


class Bench:
    def __init__(self) -> None:
        self.sampler = Sampler()
        self._runner = asyncio.Runner()

    def close(self) -> None:
        self.sampler.stop()
        self._runner.close()

    def collect(self, patience: float = 5.0) -> Collection:
        return self._runner.run(self.sampler.collect(patience))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def gpu(self, uuid: str = FIRST) -> Gpu:
        """Collect again, and return one device of the inventory."""
        (gpu,) = (gpu for gpu in self.collect().inventory.gpus if gpu.uuid == uuid)
        return gpu

    def reasons(self, uuid: str = FIRST) -> list[str]:
        return [illness.reason for illness in self.gpu(uuid).illnesses]

    def load(self, uuid: str = FIRST) -> dict[int, int]:
        """Collect, and return one device's load: ``{pid: per cent}``."""
        collection = self.collect()
        assert collection.error == ""
        assert collection.devices[uuid].status == OK
        return collection.devices[uuid].newest


@pytest.fixture
def bench(driver: Driver) -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_impossible_value_is_unknown_while_it_is_in_the_answer(driver: Driver, bench: Bench) -> None:
    bench.collect()
    driver.sample(4711, 230)
    driver.sample(4712, 40)  # two periods: each process has half of the time
    unknown = bench.collect().devices[FIRST]
    assert (unknown.dropped, unknown.newest) == (frozenset({4711}), {4712: 20})
    assert bench.sampler.implausible == 1
    time.sleep(1.1)
    driver.gpu.set_faults(Fault.PID_ZERO)
    idle = bench.collect().devices[FIRST]
    assert (idle.dropped, idle.newest) == (frozenset({0}), {})


def test_mps_client_is_unknown_while_server_has_samples(driver: Driver, bench: Bench) -> None:
    driver.gpu.mps_server = Chain(((os.stat("/proc/self/ns/pid").st_ino, 4711),))
    with driver.client() as client:
        client.context(FIRST, 5 << 20, how="mps")
        client.load(FIRST, 70)
        device = bench.collect().devices[FIRST]
        assert device.newest == {4711: 70}
        assert device.memory == {client.host_pid: 5 << 20}
        assert device.dropped == {client.host_pid}
        driver.gpu.set_errors({Answer.MPS_LIST: 999})
        assert bench.collect().devices[FIRST].dropped == {client.host_pid}  # the client may still run
        driver.gpu.set_errors()
        driver.sample(client.host_pid, 12)  # a driver with a sample per client is trusted
        device = bench.collect().devices[FIRST]
        assert client.host_pid in device.newest
        assert device.dropped == frozenset()
        assert bench.sampler.implausible == 0


@pytest.fixture
def always_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read devices in every collection, not once a minute."""
    monkeypatch.setattr(module, "DEVICES_EVERY", 0.0)
    monkeypatch.setattr(module, "INCOMPLETE_SECONDS", 0.0)


def test_the_inventory_has_every_device(driver: Driver, bench: Bench) -> None:
    migs = (Mig("MIG-a", 3, 1, memory_used=7),)
    driver.gpu.set_devices([DEFAULT_DEVICES[0], replace(DEFAULT_DEVICES[1], mig_enabled=True, migs=migs)])
    with driver.client() as client:
        client.context(FIRST, 5 << 20)
        client.context(SECOND, -1)
        collection = bench.collect()
        assert collection.devices[SECOND].memory == {client.host_pid: None}
    inventory = collection.inventory
    first, second = inventory.gpus
    assert (inventory.version, inventory.driver_version) == (2, "550.54.15")
    assert (first.uuid, first.memory_used, first.samples, first.healthy) == (FIRST, 5 << 20, OK, True)
    assert (second.uuid, second.mig, second.utilization, second.samples) == (SECOND, True, None, UNSUPPORTED)
    assert second.mig_instances == (MigInstance("MIG-a", 3, 1, 5 << 30, 7, "1g.5gb"),)


def xids(gpu: Gpu) -> dict[int, int]:
    return {each.xid: each.count for each in gpu.xids}


def test_xid_error_makes_gpu_unhealthy_until_reset(driver: Driver, bench: Bench, always_again: None) -> None:
    bench.collect()
    driver.gpu.raise_xid(0, 31)  # a program's error is only counted
    driver.gpu.raise_xid(0, 48)
    time.sleep(1.0)  # XIDs are fetched once a second
    bench.collect()
    gpu = bench.gpu()
    assert xids(gpu) == {31: 1, 48: 1}
    (illness,) = gpu.illnesses
    assert (illness.reason, illness.detail) == (
        "xid",
        "XID 48: a memory error of two bits, which cannot be corrected",
    )
    assert (bench.gpu(SECOND).illnesses, bench.gpu(SECOND).xids) == ((), ())
    assert bench.reasons() == ["xid"]  # no sign of a reset
    driver.gpu.set_devices([replace(DEFAULT_DEVICES[0], errors={Answer.ANY: 16}), DEFAULT_DEVICES[1]])
    assert bench.reasons() == ["reset_required", "xid"]
    driver.gpu.set_devices(DEFAULT_DEVICES)
    bench.collect()
    assert bench.reasons() == []
    driver.gpu.raise_xid(0, 48)
    time.sleep(1.0)
    bench.collect()
    assert bench.reasons() == ["xid"]
    driver.gpu.set_faults(Fault.DRIVER_NOT_LOADED)  # unloading the driver resets every GPU
    assert "DriverNotLoaded" in bench.collect().error
    driver.gpu.set_faults()
    bench.collect()
    assert bench.reasons() == []
    assert xids(bench.gpu()) == {31: 1, 48: 2}


def test_a_version_is_a_change(driver: Driver, bench: Bench, always_again: None) -> None:
    first = bench.collect().inventory
    later = bench.collect().inventory
    assert later == first._replace(at=later.at)
    assert later.at > first.at
    driver.gpu.set_devices([replace(DEFAULT_DEVICES[0], temperature_c=62), DEFAULT_DEVICES[1]])
    assert bench.collect().inventory.version == first.version + 1
    driver.gpu.set_faults(Fault.PROCESS_UTILIZATION_UNSUPPORTED | Fault.PROCESSES_INFO_UNSUPPORTED)
    assert bench.collect().inventory.version == first.version + 2
    assert bench.gpu().samples == UNSUPPORTED
    assert bench.collect().inventory.version == first.version + 2


def test_quiet_devices_are_read_once_a_minute(driver: Driver, bench: Bench) -> None:
    read = bench.collect().inventory.at
    driver.gpu.set_devices([replace(DEFAULT_DEVICES[0], temperature_c=62), DEFAULT_DEVICES[1]])
    assert bench.collect().inventory.at == read
    bench.sampler.devices_until -= 61
    assert bench.gpu().temperature == 62


def test_a_device_that_broke_before_it_was_ever_seen_has_no_name(
    driver: Driver, bench: Bench, always_again: None
) -> None:
    driver.gpu.set_devices([replace(DEFAULT_DEVICES[0], lost=True), DEFAULT_DEVICES[1]])
    collection = bench.collect()
    nameless, well = collection.inventory.gpus
    assert (nameless.uuid, nameless.device_index, nameless.name, nameless.memory_total) == ("", 0, "", None)
    assert nameless.illnesses[0].reason == "lost"
    assert (well.uuid, well.illnesses) == (SECOND, ())
    assert list(collection.devices) == [SECOND]
    driver.gpu.set_devices(DEFAULT_DEVICES)
    assert bench.reasons() == []


def test_lost_device_keeps_its_index(driver: Driver, bench: Bench, always_again: None) -> None:
    first, second, third = (*DEFAULT_DEVICES, replace(DEFAULT_DEVICES[0], uuid="GPU-third", minor=2))
    lost = [replace(device, lost=True) for device in (first, second, third)]

    def uuids(*devices: Device) -> list[str]:
        driver.gpu.set_devices(devices)
        return [gpu.uuid for gpu in bench.collect().inventory.gpus]

    uuids(first, second)
    assert uuids(lost[0], second, third) == [FIRST, SECOND, "GPU-third"]  # a GPU was added meanwhile
    assert uuids(lost[0], lost[1], third) == [FIRST, SECOND, "GPU-third"]
    assert uuids(*lost) == [FIRST, SECOND, "GPU-third"]
    assert uuids(lost[1], third) == ["", "GPU-third"]  # the lost GPU's UUID can't be determined
    assert uuids(lost[2]) == [""]
    assert uuids(first, second, third) == [FIRST, SECOND, "GPU-third"]


def test_busy_thread_makes_no_driver_silent(bench: Bench) -> None:
    assert bench.collect().error == ""

    async def busily() -> Collection:
        collecting = asyncio.create_task(bench.sampler.collect(patience=0.3))
        for _ in range(4):  # one turn for each step of asking two devices
            await asyncio.sleep(0)
            time.sleep(0.4)  # noqa: ASYNC251 - blocks the loop on purpose
        return await collecting

    assert bench.run(busily()).error == ""


def test_hanging_driver_leaves_everything_unknown_early(driver: Driver, bench: Bench) -> None:
    bench.collect()  # starts the worker: a sample counts for only a second
    driver.sample(4711, 30)
    assert bench.load() == {4711: 30}
    worker = bench.sampler.worker.host_pid
    driver.gpu.set_faults(hang=Hang.UTILIZATION)
    for _ in range(3):
        collection = bench.collect(patience=0.1)
        assert (collection.error, dict(collection.devices)) == ("the driver did not answer within 0.1 s", {})
        assert len(collection.inventory.gpus) == 2
    driver.gpu.set_faults()
    driver.sample(4711, 40)
    assert bench.load() in ({4711: 35}, {4711: 40})
    assert bench.sampler.worker.host_pid == worker  # the worker was late, but still runs
    driver.gpu.set_faults(hang=Hang.UTILIZATION)
    bench.sampler.worker.timeout = 0.3
    while "within 0.3 s" not in bench.collect(patience=0.1).error:
        assert bench.sampler.worker.failures == 0
    assert bench.sampler.worker.failures == 1


def test_driver_version_needs_no_samples(driver: Driver, bench: Bench) -> None:
    """The right ``hostpid`` depends on the version: a previous driver's would cause wrong writes."""
    bench.sampler.worker.timeout = 0.3
    driver.gpu.set_faults(hang=Hang.UTILIZATION)
    collection = bench.collect()
    assert "within 0.3 s" in collection.error
    assert collection.inventory.driver_version == driver.gpu.driver_version
    driver.install("570.86.15")
    collection = bench.collect()
    assert "within 0.3 s" in collection.error
    assert collection.inventory.driver_version == "570.86.15"


def test_the_start_of_the_library_gets_more_time(
    driver: Driver, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a persistence daemon each GPU takes seconds to open; a worker killed too early never starts."""
    monkeypatch.setattr(module, "CALL_SECONDS", 0.2)
    bench.sampler.worker.timeout = 0.2
    driver.gpu.set_faults(hang=Hang.INIT)
    for _ in range(3):
        assert bench.collect(0.2).error == STARTING
    driver.gpu.set_faults(Fault.DRIVER_NOT_LOADED)
    while (error := bench.collect(0.2).error) == STARTING:
        pass
    driver.gpu.set_faults(hang=Hang.INIT)
    assert [bench.collect(0.2).error for _ in range(2)] == [error] * 2
    driver.gpu.set_faults()
    assert bench.collect(5.0).error == ""
    assert (bench.sampler.worker.starts, bench.sampler.worker.failures) == (1, 0)


def test_a_collection_that_is_cancelled_leaves_nothing_behind(driver: Driver, bench: Bench) -> None:
    bench.collect()
    driver.gpu.set_faults(hang=Hang.UTILIZATION)

    async def cancelled() -> int:
        task = asyncio.create_task(bench.sampler.collect())
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return len(asyncio.all_tasks())

    assert bench.run(cancelled()) == 1
    assert bench.sampler.worker.host_pid is None
    driver.gpu.set_faults()
    assert bench.collect().error == ""
