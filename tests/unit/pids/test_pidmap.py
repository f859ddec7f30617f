"""The map of processes, fed by a fake source."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resolver.base.errors import AccessDenied
from resolver.linux.procfs import Procfs
from resolver.pids import pidmap as module
from resolver.pids.pidmap import PidMap
from resolver.pids.scan import ScanSource
from tests.fakes.clock import Clock
from tests.fakes.direct import catch_up


class Told(Procfs):
    """A ``/proc`` with the processes that the test chooses."""

    def __init__(self, *processes: tuple[int, ...]) -> None:
        super().__init__("/nowhere")
        self.now = {each[0]: each for each in processes}
        self.inodes = defaultdict[int, int](itertools.count(1).__next__)
        self.unreadable: set[int] = set()
        self.listings = 0

    def reuse(self, host_pid: int, *ns_pids: int) -> None:
        self.now[host_pid] = (host_pid, *ns_pids)
        self.inodes.pop(host_pid, None)

    def each_entry(self) -> Iterator[tuple[int, int]]:
        self.listings += 1
        return iter([(host_pid, self.inodes[host_pid]) for host_pid in self.now])

    def inode(self, host_pid: int | str) -> int | None:
        return self.inodes[host_pid] if host_pid in self.now else None

    def ns_pids(self, host_pid: int | str) -> tuple[int, ...]:
        if host_pid in self.unreadable:
            raise AccessDenied("no")
        return self.now[int(host_pid)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    fake_time = SimpleNamespace(monotonic=clock.monotonic, thread_time=clock.thread_time)
    monkeypatch.setattr(module, "time", fake_time)
    return clock


def made(*processes: tuple[int, ...]) -> tuple[Told, PidMap]:
    source = Told(*processes)
    pidmap = PidMap(ScanSource(source))
    catch_up(pidmap)
    return source, pidmap


def test_container_of_ended_process_is_kept_for_seconds(clock: Clock) -> None:
    _, pidmap = made()
    pidmap.name_container(100, "pod_main")
    pidmap.name_container(200, "")  # a process of the host
    clock.now += 9
    assert [pidmap.container_of(host_pid) for host_pid in (100, 200, 300)] == ["pod_main", "", None]
    pidmap.name_container(100, "another")
    clock.now += 2
    assert [pidmap.container_of(host_pid) for host_pid in (100, 200)] == ["another", None]


def test_names_of_containers_are_bounded() -> None:
    _, pidmap = made()
    for host_pid in range(1, 10_001):
        pidmap.name_container(host_pid, "pod_main")
    kept = [host_pid for host_pid in range(1, 10_001) if pidmap.container_of(host_pid)]
    assert kept == list(range(10_001 - module.MOST_CONTAINERS, 10_001))


def test_nothing_is_left_of_processes_that_ended() -> None:
    source, pidmap = made(*((host_pid, 1) for host_pid in range(1, 10_001)))
    source.now.clear()
    catch_up(pidmap)
    index = pidmap.source
    assert isinstance(index, ScanSource)
    assert len(pidmap.source) == 0
    assert not any((index.by_inner, index.known))


class Slow(ScanSource):
    """A scan whose refresh takes ``wall`` seconds, and ``cpu`` seconds of CPU time."""

    def __init__(self, clock: Clock, wall: float, cpu: float) -> None:
        super().__init__(Told())
        self.clock, self.wall, self.cpu = clock, wall, cpu

    def refreshing(self) -> Iterator[None]:
        self.clock.now += self.wall
        self.clock.cpu += self.cpu
        return iter(())


def test_a_refresh_rests_five_times_as_long_as_it_took_of_a_cpu(clock: Clock) -> None:
    pidmap = PidMap(Slow(clock, 0.5, 0.5))
    assert catch_up(pidmap, rate_limited=True)
    clock.now += 1.9  # 2.4 s after the last refresh began
    assert not catch_up(pidmap, rate_limited=True)
    assert pidmap.refreshes == 1
    assert catch_up(pidmap)  # a single pass does not wait
    clock.now += 2.1
    assert catch_up(pidmap, rate_limited=True)
    assert pidmap.refreshes == 3


def test_a_refresh_that_had_to_wait_for_a_cpu_is_not_rested_for(clock: Clock) -> None:
    """On a busy machine, every other pass once had no fresh map, and repaired no slot."""
    pidmap = PidMap(Slow(clock, 1.0, 0.01))
    assert catch_up(pidmap, rate_limited=True)
    clock.now += 0.05
    assert catch_up(pidmap, rate_limited=True)


_numbers = st.dictionaries(st.integers(1, 8), st.lists(st.integers(1, 4), max_size=2), max_size=8)


@settings(max_examples=150)
@given(st.lists(st.tuples(_numbers, st.sets(st.integers(1, 8))), max_size=6))
def test_map_reports_the_sources_last_state(rounds: list[tuple[dict[int, list[int]], set[int]]]) -> None:
    source, pidmap = made()
    seen: set[int] = set()
    for now, again in rounds:
        kept = {p: source.now[p] for p in now.keys() & source.now.keys() - again}
        source.now = {p: (p, *inner) for p, inner in now.items()} | kept
        for host_pid in again & now.keys():
            source.reuse(host_pid, *now[host_pid])
        catch_up(pidmap)
        for inner in range(1, 9):
            assert pidmap.source.candidates(inner) == sorted(
                p for p, n in source.now.items() if n[-1] == inner
            )
        seen |= source.now.keys()
        arrivals = [pidmap.arrival(p) for p in source.now]
        assert len({*arrivals, (0, 0)}) == len(arrivals) + 1
        assert {p for p in seen if p in pidmap.source} == source.now.keys()


def test_new_source_keeps_counters_of_the_first() -> None:
    class Counting(ScanSource):
        closed = False

        def counters(self) -> Mapping[str, int]:
            return {"lost": 3}

        def close(self) -> None:
            self.closed = True

    first = Counting(Told((100, 7)))
    pidmap = PidMap(first)
    catch_up(pidmap)
    before = pidmap.arrival(100)
    pidmap.use(ScanSource(Told((100, 7))))
    assert first.closed
    assert catch_up(pidmap, rate_limited=True)
    assert pidmap.source.candidates(7) == [100]
    assert pidmap.arrival(100) != before
    assert pidmap.counters() == {"lost": 3}
