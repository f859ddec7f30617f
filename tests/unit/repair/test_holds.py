"""Holds: a real slot writer corrects each word that a watcher sets wrong."""

import asyncio
import os
import struct
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from resolver.base.counters import CounterName
from resolver.base.journal import Journal
from resolver.linux.procfs import ProcessHandle, ProcessIdentity
from resolver.repair.orders import Writing
from resolver.repair.plan import Order
from tests.fakes import cachefiles
from tests.fakes.planned import UUIDS, Bench
from tests.patience import PATIENCE_S


class Region(Bench):
    """A region with a file; its slot 0 holds 500 % for both devices."""

    def __init__(self, stack: ExitStack, path: Path, account: str) -> None:
        super().__init__(stack)
        self.path = path
        data = bytearray(cachefiles.recorded("v1.2"))
        struct.pack_into("<ii", data, self.layout.slot_offset(0), 7, 4711)
        struct.pack_into("<Q", data, self.layout.owner_pid, 0)
        cachefiles.write(path, bytes(data))
        self.set(0, 500)
        self.set(1, 500)
        self.repairs.region.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.repairs.ownership = self.repairs.ownership._replace(account=account, container=account)
        stack.callback(self.repairs.close)
        self.see((7, 4711, 1, (500, 500)))
        handle = ProcessHandle(ProcessIdentity(4711, 1, (4711, 7)), os.pidfd_open(os.getpid()), is_pidfd=True)
        self.repairs.slots.own(0, handle)
        self.load = {(4711, UUIDS[0]): 40}

    def at(self, device: int) -> int:
        offset = self.layout.sm_util_offset(0, device)
        assert offset is not None
        return offset

    def set(self, device: int, value: int) -> None:
        with self.path.open("r+b") as file:
            os.pwrite(file.fileno(), struct.pack("<Q", value), self.at(device))

    def value(self, device: int) -> int:
        return int.from_bytes(os.pread(self.repairs.region.fd, 8, self.at(device)), "little")

    def held(self) -> list[Order]:
        self.plan()
        return self.repairs.held


class Desk:
    """Two regions and a writer."""

    def __init__(self, stack: ExitStack, scratch: Path) -> None:
        self.counters = Counter[str]()
        self.writing = Writing(self.counters, Journal())
        stack.callback(self.writing.holds.close)
        stack.callback(self.writing.worker.stop)
        self.one, self.other = (Region(stack, scratch / f"{name}.cache", name) for name in ("one", "other"))

    async def until(self, condition: Callable[[], bool]) -> float:
        """Wait until the condition holds; return the seconds that it took."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < PATIENCE_S
            await asyncio.sleep(0.001)
        return time.monotonic() - began


@pytest.fixture
def desk(stack: ExitStack, tmp_path: Path) -> Desk:
    return Desk(stack, tmp_path)


async def test_held_words_are_set_right_each_time(desk: Desk) -> None:
    one = desk.one
    assert await desk.writing.hold(one.repairs, one.held()) == 0
    await desk.until(lambda: (one.value(0), one.value(1)) == (40, 0))
    for wrong in (0, 99, 500):
        one.set(0, wrong)
        await desk.until(lambda: one.value(0) == 40)
    one.set(0, 42)
    one.set(1, 30)
    await desk.until(lambda: one.value(1) == 0)
    assert one.value(0) == 42, "within the jitter of samples"
    corrected = await desk.writing.hold(one.repairs, [])
    assert corrected == desk.counters[CounterName.UTILIZATION_WRITES] == 6
    one.set(0, 0)
    await desk.writing.hold(desk.other.repairs, desk.other.held())
    await desk.until(lambda: desk.other.value(0) == 40)
    assert one.value(0) == 0, "let go"
    desk.writing.worker.stop()


async def test_hold_ends_when_the_slot_is_another_process(desk: Desk) -> None:
    one = desk.one
    await desk.writing.hold(one.repairs, one.held())
    await desk.until(lambda: one.value(0) == 40)
    with one.path.open("r+b") as file:
        os.pwrite(file.fileno(), struct.pack("<ii", 8, 4712), one.layout.slot_offset(0))
    one.set(0, 0)
    await desk.writing.hold(desk.other.repairs, desk.other.held())
    await desk.until(lambda: desk.other.value(0) == 40)
    assert one.value(0) == 0
    desk.writing.worker.stop()


async def test_word_that_flips_too_often_is_let_go(desk: Desk) -> None:
    one = desk.one
    await desk.writing.hold(one.repairs, one.held())
    asked, deadline = time.monotonic(), time.monotonic() + PATIENCE_S
    while one.repairs.not_held_until <= time.monotonic() < deadline:
        one.set(0, 0)
        await asyncio.sleep(0.0005)
        if time.monotonic() - asked > 3.0:
            asked = time.monotonic()
            await desk.writing.hold(one.repairs, one.repairs.held)
    assert one.repairs.not_held_until > time.monotonic()
    one.set(0, 0)
    assert (one.plan(), one.repairs.held) == ([], [])
    desk.writing.worker.stop()


async def test_truncated_file_costs_only_its_own_hold(desk: Desk) -> None:
    keeper = asyncio.create_task(desk.writing.keep_holds(lambda _account: False))
    for region in (desk.one, desk.other):
        await desk.writing.hold(region.repairs, region.held())
    await desk.until(lambda: desk.one.value(0) == desk.other.value(0) == 40)
    os.truncate(desk.one.path, 0)
    await desk.until(lambda: desk.one.repairs.record.quarantined(time.monotonic()))
    desk.other.set(0, 0)
    await desk.until(lambda: desk.other.value(0) == 40)
    assert not desk.other.repairs.record.quarantined(time.monotonic())
    assert desk.writing.worker.starts == 2
    assert [*desk.writing.holds.by_region] == [id(desk.other.repairs)]
    keeper.cancel()
    desk.writing.worker.stop()
