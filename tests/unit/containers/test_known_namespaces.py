"""The index of namespaces' first processes, while thousands start and end and several tasks update it."""

import asyncio
import errno
import os
import sys
import time
from collections.abc import Callable, Hashable, Iterator

import pytest

from resolver.base.budget import Slices
from resolver.base.errors import ProcessGone
from resolver.containers import known_namespaces
from resolver.containers.known_namespaces import READ_SECONDS, SLICE_SECONDS, KnownNamespaces
from resolver.linux.procfs import HOST_PIDNS, Procfs
from resolver.pids.pidmap import PidMap
from resolver.pids.scan import ScanSource
from tests.fakes.clock import Clock, burn
from tests.fakes.direct import catch_up
from tests.patience import PATIENCE_S


class Firsts(ScanSource):
    """A source of first processes only, as many as the test sets."""

    def __init__(self) -> None:
        self.name = "firsts"
        self.now: dict[int, int] = {}

    def refreshing(self) -> Iterator[None]:
        return iter(())

    def inits(self) -> Iterator[tuple[int, int]]:
        yield from self.now.items()

    def arrival(self, host_pid: int) -> int:
        return self.now.get(host_pid, 0)


class Shown(Procfs):
    def __init__(self) -> None:
        super().__init__()
        self.hidden: set[int] = set()
        self.cpu = 0.0  # CPU seconds for each cgroup read

    def ns_pids(self, host_pid: int | str) -> tuple[int, ...]:
        if host_pid in self.hidden:
            raise ProcessGone("hidden")
        return int(host_pid), 1

    def pidns(self, host_pid: int | str) -> int:
        return 10**6 + int(host_pid)

    def cgroup(self, _host_pid: int | str) -> str:
        burn(self.cpu)
        return "0::/\n"


class Room:
    def __init__(self) -> None:
        self.source = Firsts()
        self.pidmap = PidMap(self.source)
        self.procfs = Shown()
        self.clock: Callable[[], float] = time.monotonic
        self.index = KnownNamespaces(self.procfs, self.pidmap, lambda: self.clock())  # noqa: PLW0108 - tests exchange it
        self.index.on_mounts_needed(self.mounts)
        self.read: list[tuple[int, float]] = []  # mount tables: host PID, and when
        self.wait = 0.0  # seconds for each mount table
        self.broken = 0  # the process with an unreadable mount table

    async def mounts(self, host_pid: int) -> frozenset[Hashable]:
        if host_pid == self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.wait:
            await asyncio.sleep(self.wait)
        self.read.append((host_pid, self.clock()))
        return frozenset({host_pid % 10})

    def lives(self, host_pids: range) -> None:
        self.source.now = {host_pid: host_pid + 7 for host_pid in host_pids}
        catch_up(self.pidmap)

    def steps(self, *seconds: float) -> None:
        """Bring the index up to date within so many ``seconds`` for placing and reading, and read all due mounts."""
        asyncio.run(self.settle(self.index.steps(*seconds)))

    async def settle(self, steps: Iterator[None]) -> None:
        list(steps)
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    def known(self) -> list[int]:
        return sorted(self.index.firsts)


@pytest.fixture
def room() -> Room:
    return Room()


def test_the_list_is_the_same_until_one_comes_or_goes(room: Room) -> None:
    room.lives(range(1000, 1300))
    first = room.pidmap.inits()
    room.lives(range(1000, 1300))
    assert room.pidmap.inits() is first
    room.lives(range(1000, 1301))
    assert room.pidmap.inits() is not first
    assert len(first) == 300  # the list taken before stays unchanged


def test_where_the_map_tells_the_namespaces_they_are_not_read(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    def namespaces_of(host_pid: int, arrival: int) -> tuple[int, ...]:
        assert arrival == host_pid + 7
        nested = (HOST_PIDNS, 10**6 + 1000, 10**6 + host_pid)
        return {1000: nested[:2], 1001: nested}.get(host_pid, ())

    monkeypatch.setattr(room.source, "namespaces_of", namespaces_of)
    room.procfs.hidden.update({1000, 1001, 1002})
    room.lives(range(1000, 1004))
    room.steps()
    assert room.index.of(0) == {10**6 + 1000, 10**6 + 1001}  # with the nested namespace
    assert room.index.firsts[1001].level == 2
    assert room.index.of(2) == frozenset()
    assert room.index.of(3) == {10**6 + 1003}


async def test_two_tasks_that_bring_it_up_to_date_at_once_agree(room: Room) -> None:
    room.lives(range(1000, 1300))
    steps = room.index.steps()
    for _ in range(3):
        next(steps)
    room.lives(range(1200, 1500))
    other = room.index.steps()
    for _ in range(4):
        next(other)
    await room.settle(steps)  # the older task does not restore ended processes
    assert room.known() == list(range(1200, 1500))
    assert not room.index.behind
    await room.settle(other)
    assert room.known() == list(range(1200, 1500))
    assert room.index.of(3) == {10**6 + host_pid for host_pid in range(1203, 1500, 10)}


def test_without_time_it_says_that_some_may_be_missing(room: Room) -> None:
    room.lives(range(1000, 1300))
    room.steps(0.0)
    assert room.index.behind
    room.steps()
    assert not room.index.behind


def test_one_that_could_not_be_placed_is_tried_again(room: Room) -> None:
    room.procfs.hidden.add(1005)
    room.lives(range(1000, 1010))
    room.steps()
    assert not room.index.behind  # the process may just have ended
    assert 10**6 + 1005 not in room.index.of(5)
    for _ in range(5):
        room.steps()
    assert len(room.index.not_placed) == 1
    room.procfs.hidden.clear()
    catch_up(room.pidmap)
    room.steps()
    assert 10**6 + 1005 in room.index.of(5)


def test_ended_process_leaves_nothing_behind(room: Room) -> None:
    """Tables shrink as well, although fewer processes end between two refreshes than remain."""
    index = room.index
    for left in (3000, 1600, 900, 500, 260, 140, 80, 45, 25, 14, 10):
        room.lives(range(1000, 1000 + left))
        room.steps()
    tables = [kept for kept in vars(index).values() if isinstance(kept, dict | set | list)]
    tables += [kept for table in tables if isinstance(table, dict) for kept in table.values()]
    sizes = [(len(kept), sys.getsizeof(kept)) for kept in tables if isinstance(kept, dict | set | list)]
    assert len(sizes) > 10
    assert max(sizes) < (21, 0)
    assert max(size for _, size in sizes) < 4096


def test_a_number_that_is_used_again_is_another(room: Room) -> None:
    room.lives(range(1000, 1001))
    room.steps()
    before = room.index.firsts[1000]
    room.source.now = {1000: 5}
    catch_up(room.pidmap)
    room.steps()
    assert room.index.firsts[1000] is not before


def test_a_mount_table_is_read_ever_more_rarely(room: Room) -> None:
    """Mounts appear shortly after the process, and a read costs as much as all other work on a quiet node."""
    clock = room.clock = Clock()
    room.lives(range(1000, 1001))
    while clock.now < 1000.0 + 7200.0:
        room.steps()
        clock.now += 0.25
    assert sum(at < 1010.0 for _, at in room.read) >= 7
    assert sum(at > 1000.0 + 3600.0 for _, at in room.read) <= 6


def test_new_process_is_read_before_hundreds_of_old_ones(room: Room) -> None:
    clock = room.clock = Clock()
    room.lives(range(1000, 1100))
    for _ in range(20):
        room.steps()
        clock.now += 600.0

    room.read.clear()
    room.procfs.cpu = 0.001
    room.lives(range(1000, 1101))
    room.steps(SLICE_SECONDS, READ_SECONDS)
    assert room.read[0][0] == 1100
    assert len(room.read) <= 6
    for _ in range(100):  # the other processes still get their turn
        room.steps(SLICE_SECONDS, READ_SECONDS)
    assert {host_pid for host_pid, _ in room.read} == set(range(1000, 1101))


async def test_unreadable_mount_table_hides_no_other(room: Room) -> None:
    room.broken = 1000
    room.lives(range(1000, 1010))
    await room.index.catch_up(Slices(), bounded=False)
    assert [len(room.index.of(digit)) for digit in range(10)] == [0, *[1] * 9]


async def test_only_mounts_of_new_processes_are_awaited(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_namespaces, "_MOUNTS_SECONDS", PATIENCE_S)
    clock = room.clock = Clock()
    room.wait = 0.001
    room.lives(range(1000, 1100))
    await room.index.catch_up(Slices(), bounded=False)
    clock.now += 600.0  # all are due again
    room.lives(range(1000, 1101))
    await room.index.catch_up(Slices())
    assert 10**6 + 1100 in room.index.of(0)
    assert len(room.read) < 150
