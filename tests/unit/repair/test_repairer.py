"""Passes over real files with the real writer; the test supplies only the slots' owners."""

import errno
import io
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from resolver.base import journal as log
from resolver.base.budget import Slices
from resolver.base.errors import RegionRejected
from resolver.base.reasons import RegionReason, RepairReason, UnresolvedReason
from resolver.config import WriteUtilization
from resolver.gpu.attribution import NOTHING
from resolver.hami.discovery import (
    Discovery,
    FoundRegion,
    Location,
    Ownership,
    RegionChanges,
    SharedDirectory,
)
from resolver.hami.hostpid_policy import WatcherFinding
from resolver.hami.region import RegionView, SharedRegion, adopt_region
from resolver.linux.procfs import ProcessHandle
from resolver.repair import known_regions as regions_module
from resolver.repair import repairer as repairer_module
from resolver.repair import turns as turns_module
from resolver.repair.plan import Order
from tests.descriptors import is_open, pidfds_of
from tests.fakes.cachefiles import poke
from tests.fakes.clock import burn
from tests.fakes.planned import CONTAINER
from tests.fakes.repairs import HOST, V1_2, Bench, Lines, slot
from tests.patience import PATIENCE_S, until


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Lines:
    """The log lines of the test."""
    written = io.StringIO()
    monkeypatch.setattr(log, "sys", SimpleNamespace(stderr=written))
    log.setup_logging("json")
    return lambda: [json.loads(line) for line in written.getvalue().splitlines()]


@pytest.fixture
def bench(tmp_path: Path, stack: ExitStack, lines: Lines) -> Bench:
    return Bench(tmp_path, stack)


def events(lines: Lines, event: str) -> list[dict[str, Any]]:
    return [line for line in lines() if line["event"] == event]


def test_a_repair_is_one_write_one_line_and_one_report(bench: Bench, lines: Lines) -> None:
    path, process = bench.file((7, 0), (9, 4)), bench.child()
    bench.told.host_pids, bench.told.runs = {7: process.pid}, True
    for _ in range(4):
        bench.step()
    assert slot(path) == (7, process.pid, 0)
    assert slot(path, 1) == (9, 4, 0)
    assert bench.counters["repairs_missing"] == 1
    (line,) = events(lines, "repair")
    assert {
        key: line[key] for key in ("container", "slot", "ns_pid", "host_pid", "reason", "before", "after")
    } == {
        "container": "uid_main",
        "slot": 0,
        "ns_pid": 7,
        "host_pid": process.pid,
        "reason": "missing",
        "before": 0,
        "after": process.pid,
    }
    report = bench.reports()
    assert (report[0].host_pid, report[0].hostpid, report[0].repaired) == (
        process.pid,
        process.pid,
        RepairReason.MISSING,
    )
    assert (report[0].unresolved, report[0].dead) == (None, False)
    assert (report[1].host_pid, report[1].unresolved, report[1].dead) == (None, None, True)
    assert bench.told.asked[7] == 1


def test_a_region_in_which_all_is_right_is_not_even_asked_about(bench: Bench) -> None:
    process = bench.child()
    bench.file((7, process.pid))
    bench.told.host_pids = {7: process.pid}
    for _ in range(5):
        bench.step()
    assert bench.repairer.writing.worker.starts == 0
    assert bench.pidmap.refreshes == 1


def test_new_policy_and_settings_check_every_slot(bench: Bench) -> None:
    path, process = bench.file((7, 0)), bench.child()
    bench.told.host_pids = {7: process.pid}
    for policy, wanted in ((HOST, process.pid), (CONTAINER, 7)):
        bench.step(policy)
        assert slot(path)[1] == wanted
    bench.waits()
    bench.step(CONTAINER)
    (region,) = bench.repairer.regions.values()
    assert not region.has_work(0.0)
    bench.repairer.turns.take_in(structs.replace(bench.settings), CONTAINER, bench.joined, patient=False)
    assert region.has_work(0.0)


def test_returned_slot_keeps_container_for_last_samples(bench: Bench) -> None:
    path, process = bench.file((7, 0)), bench.child()
    bench.told.host_pids = {7: process.pid}
    bench.step()
    assert bench.pidmap.container_of(process.pid) is None  # it owns a slot: no memory needed
    poke(path, V1_2.proc_num, "i", 0)
    bench.step()
    assert bench.pidmap.container_of(process.pid) == "uid_main"


def test_named_process_is_checked_with_each_search(bench: Bench) -> None:
    """The process in ``hostpid`` may be the owner, in a container too new to be known, even if others fit."""
    bench.file((7, 4711))
    bench.told.reasons = {7: UnresolvedReason.AMBIGUOUS}
    for _ in range(2):
        bench.step()
    assert bench.told.rivals == {4711}


def test_a_file_is_watched_before_it_is_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write between the read and the watch would raise no event, and would be noticed late."""
    paths = [str(bench.file((7, 0), name=f"n{number}")) for number in range(20)]
    bench.step()
    for path in paths:
        bench.repairer.watches.forget(path)
    read, watched = SharedRegion.read, dict[str, bool]()

    def reading(region: SharedRegion) -> RegionView:
        watched[region.path] = region.path in bench.repairer.watches
        return read(region)

    monkeypatch.setattr(SharedRegion, "read", reading)
    bench.step()
    assert watched == dict.fromkeys(paths, True)


def test_a_dry_run_says_it_once_and_writes_nothing(tmp_path: Path, stack: ExitStack, lines: Lines) -> None:
    bench = Bench(tmp_path, stack, dry_run=True, write_utilization=WriteUtilization.ALWAYS)
    path, process = bench.file((7, 0)), bench.child()
    bench.told.host_pids = {7: process.pid}
    bench.sees(40)
    before, told = path.read_bytes(), list[Order]()
    bench.repairer.writing.on_would_repair = lambda *each: told.append(each[-1])
    for _ in range(3):
        bench.step()
    said = lines()
    assert [order.new >> 32 for order in told] == [process.pid]
    assert [(line["slot"], line["after"]) for line in said if line["event"] == "would_repair"] == [
        (0, process.pid)
    ]
    assert (path.read_bytes(), bench.repairer.writing.worker.starts) == (before, 0)
    assert bench.counters["would_repair_missing"] == 1
    assert bench.counters["repairs_missing"] == 0


def test_utilization_comes_and_goes(bench: Bench) -> None:
    path, process = bench.file((7, 0), sm_util=99), bench.child()
    bench.told.host_pids = {7: process.pid}
    bench.step()
    assert slot(path) == (7, process.pid, 99)  # NVML was not asked, so the load is unknown, not 0
    assert bench.reports()[0].utilization == (None,)
    for load, value in ((40, 40), (55, 55), (None, 0)):
        bench.sees(load)
        bench.step()  # a watcher may still correct the value
        bench.waits()
        bench.step()
        bench.step()
        assert slot(path)[2] == value
        assert bench.reports()[0].utilization == (value,)
    assert bench.counters["utilization_writes"] == 3


def test_watchers_count_once_per_container(bench: Bench) -> None:
    for name in "abcde":
        bench.file((7, 0), name=name)
    bench.step()
    assert bench.repairer.watchers() == {"confirms": 0, "contradicts": 0, "doubts": 0, "unable": 0}
    a, b, c, d, _ = bench.repairer.regions.values()
    a.finding = WatcherFinding.CONFIRMS
    b.finding = c.finding = d.finding = WatcherFinding.DOUBTS
    assert bench.repairer.watchers() == {"confirms": 1, "contradicts": 0, "doubts": 3, "unable": 0}
    b.ownership = b.ownership._replace(account=a.ownership.account)
    d.ownership = d.ownership._replace(account=c.ownership.account)
    assert bench.repairer.watchers() == {"confirms": 1, "contradicts": 0, "doubts": 1, "unable": 0}


@pytest.mark.parametrize(
    ("runs", "other", "dead"), [(False, False, False), (True, False, True), (False, True, False)]
)
def test_unseen_process_is_dead_only_by_the_kernel(
    bench: Bench, *, runs: bool, other: bool, dead: bool
) -> None:
    process = bench.child()
    path = bench.file((7, 815), (9, process.pid), sm_util=30)
    bench.has_open(path)
    bench.told.runs = runs
    bench.told.host_pids = {9: process.pid} if other else {}
    bench.step()
    assert slot(path)[2] == 30  # one failed search proves nothing
    for _ in range(3):
        bench.step()
    assert bench.reports()[0].dead is dead
    assert slot(path) == (7, 815, 0 if dead else 30)


def test_nothing_is_kept_of_a_region_that_goes(bench: Bench) -> None:
    process = bench.child()
    path = bench.file(*((n, 0) for n in range(1, 20)))
    bench.told.host_pids = dict.fromkeys(range(1, 20), process.pid)
    bench.step()
    assert process.pid in bench.repairer.owners
    assert is_open(path)
    bench.repairer.journal.trouble(str(path), "it cannot be written", "write_failed", "")
    path.unlink()
    bench.step()
    assert bench.repairer.regions == {}
    assert not bench.repairer.journal._troubles
    assert process.pid not in bench.repairer.owners
    assert pidfds_of(process.pid) == 0
    until(lambda: not is_open(path), "the close of the file")


def test_giving_memory_back_puts_no_pass_off(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trim takes some 20 ms; if the pass's pause counted it, a new container would wait 40 ms more."""
    monkeypatch.setattr(bench.repairer._resident, "trim", lambda _now: burn(0.1))
    bench.step()
    assert bench.repairer.not_before < time.monotonic() + 0.1


def test_another_writer_is_a_conflict_and_is_waited_for(bench: Bench, lines: Lines) -> None:
    path, process = bench.file((7, 0)), bench.child()
    bench.told.host_pids = {7: process.pid}
    bench.step()
    poke(path, V1_2.slot_offset(0) + 4, "i", 815)
    bench.step()
    assert slot(path)[1] == process.pid  # seen once, the number is the process's own guess
    poke(path, V1_2.slot_offset(0) + 4, "i", 815)
    for _ in range(4):
        bench.step()
    assert slot(path)[1] == 815
    assert bench.counters["conflicts"] == 1
    (line,) = events(lines, "conflict")
    assert (line["hostpid"], line["next_try_seconds"], line["ns_pid"]) == (815, 0.5, 7)
    assert bench.reports()[0].unresolved is UnresolvedReason.CONFLICT
    next(iter(bench.repairer.regions.values())).slots.owned[7].not_before = 0.0
    bench.step()
    assert slot(path)[1] == process.pid


@pytest.mark.parametrize(
    "defect", [ZeroDivisionError("the very defect"), OSError(errno.ELOOP, "the very defect")]
)
def test_failure_of_one_container_ends_no_other_turn(
    bench: Bench, lines: Lines, monkeypatch: pytest.MonkeyPatch, defect: Exception
) -> None:
    path, _, process = bench.file((8, 0), name="good"), bench.file((7, 0), name="bad"), bench.child()
    bench.told.host_pids = {8: process.pid}
    ask = bench.told.owner

    async def owner(place: SharedDirectory, *more: Any) -> ProcessHandle | UnresolvedReason:
        if place.path.endswith("_bad"):
            raise defect
        return await ask(place, *more)

    monkeypatch.setattr(bench.told, "owner", owner)
    bench.step()
    assert slot(path)[1] == process.pid
    (line,) = events(lines, "internal_error")
    assert (line["container"], line["step"]) == ("uid_bad", "pass")
    assert "the very defect" in line["exception"]
    assert bench.counters["internal_errors"] == 1


def test_short_lived_files_cost_few_lines_per_container(bench: Bench, lines: Lines) -> None:
    for number in range(20):
        path = bench.file((7, 0))
        path = path.rename(path.with_name(f"{number}.cache"))
        bench.step()
        path.unlink()
        bench.step()
    bench.file((7, 0), name="other")
    bench.step()
    told = [line for line in lines() if line["event"] in ("region_found", "region_gone")]
    assert [line["event"] for line in told if "other" in line["path"]] == ["region_found"]
    assert 2 <= len(told) < 8


class InMemory:
    """A third kind of discovery, which the resolver does not know: the test passes it descriptors."""

    workers = ()
    shed, allow_more = Discovery.shed, Discovery.allow_more

    def __init__(self, *paths: Path) -> None:
        self.rejected: dict[str, RegionReason] = {"/odd": RegionReason.UNPROVEN}
        self.missing_dirs = {"/away"}
        self.dirs = ("/away", "/here")
        self.max_regions = 10
        self.regions: dict[str, SharedRegion] = {}
        self.paths = list(paths)
        self.waited = self.closed = 0

    def refresh(self, *, full: bool) -> RegionChanges:
        added, refused = list[FoundRegion](), list[tuple[str, RegionRejected]]()
        while self.paths and full:
            path = self.paths.pop()
            region = adopt_region(os.open(path, os.O_RDONLY), f"claim:{path}")
            self.regions[region.path] = region
            location = Location(SharedDirectory("8:1", "/claims/1"), ("8:1", region.identity[1]))
            added.append(FoundRegion(region, Ownership(account="claim-1", container=""), location))
            refused = [("/odd", RegionRejected(RegionReason.UNPROVEN, "it is odd"))]
        return RegionChanges(added, [], refused)

    async def settle(self) -> bool:
        self.waited += 1
        return False

    watched = False

    def wants(self) -> float:
        return 0.0

    def reject(self, region: SharedRegion, why: RegionRejected) -> None:
        if self.regions.get(region.path) is region:
            self.rejected[region.path] = why.reason
            self.regions.pop(region.path).close()

    def close(self) -> None:
        self.closed += 1


class Clock:
    """Replaces the repairer's `time`; it advances only when a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.thread_time, self.time = time.thread_time, time.time

    def monotonic(self) -> float:
        return self.now


def quiet_life(bench: Bench, clock: Clock, files: int) -> Iterator[float]:
    """Times of passes after some containers, found at different times, have started."""
    repairer = bench.repairer

    async def caught_up(slices: Slices, *, rate_limited: bool = True) -> bool:
        assert slices
        return rate_limited

    bench.pidmap.catch_up = caught_up  # type: ignore[method-assign]
    for discovery in repairer.found.discoveries:
        discovery._clock = clock.monotonic  # on a machine just booted, the real clock is behind the test's
    for number in range(files):
        path = bench.file((number + 7, 4), name=f"c{number}")
        os.utime(path, (1.0, 1.0))  # its process has started long ago
        clock.now += 1.7
        bench.runner.run(repairer.pass_once(HOST, NOTHING, everything=False))
    while True:
        clock.now = max(clock.now, repairer.next_pass())
        bench.runner.run(repairer.pass_once(HOST, NOTHING, everything=False))
        yield clock.now


@pytest.mark.parametrize("alive", [True, False])
def test_files_read_by_the_clock_are_read_together(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    *,
    alive: bool,
) -> None:
    """Holds for live and ended processes, because a wake-up costs more than a read."""
    files, clock = 6, Clock()
    for module in (repairer_module, regions_module, turns_module):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(turns_module, "PASS_SECONDS", PATIENCE_S)  # no turn counts as late on a busy machine
    bench.told.host_pids = {number + 7: bench.child().pid for number in range(files) if alive}
    bench.told.runs = True
    passes = quiet_life(bench, clock, files)
    began = next(now for now in passes if now > 1100.0)
    looks: dict[float, int] = {}  # files with processes that were read, by time
    for _ in range(32):
        before = bench.told.asked.total()
        now = next(passes)
        if bench.told.asked.total() > before:
            looks[now] = bench.told.asked.total() - before
    assert now - began >= 30 * 4.0  # two more list all directories and take the reader's answer
    # A process that took a dead slot silently is found within a minute, in a pass that is due anyway.
    assert sum(looks.values()) == (0 if alive else 2 * files)
    assert alive or max(later - sooner for sooner, later in pairwise((began, *looks, now))) <= 64.0
    assert all(at % 4.0 < 0.01 for at in looks)


def test_repeated_losses_are_checked_once_a_second(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    found, clock, due = bench.repairer.found, Clock(), list[float]()
    bench.file((7, 0))
    bench.step()
    monkeypatch.setattr(regions_module, "time", clock)
    monkeypatch.setattr(found.watches, "take", lambda: True)
    monkeypatch.setattr(found, "discoveries", ())
    (region,) = found.by_path.values()
    for hundredth in range(1000):
        clock.now = 1000.0 + hundredth / 100
        region.schedule.put_off(1e9)
        found.list_at = found.refresh_at = 1e9
        found.take_events()
        if found.wants(()) <= clock.now:
            assert found.due(clock.now, ()) == [region]
            assert found.due(clock.now, {region.ownership.account}) == []
            due.append(clock.now)
        assert region.attached
    assert due == pytest.approx([1000.0 + second for second in range(10)])


def test_due_regions_are_read_longest_waiting_first(bench: Bench) -> None:
    paths = [str(bench.file((7, 0), name=name)) for name in "abc"]
    bench.step()
    for path, last in zip(paths, (200.0, 100.0, 150.0), strict=True):
        bench.repairer.regions[path].schedule.taken(last)
        bench.repairer.regions[path].schedule.by(last)
    bench.repairer.budgets._kept.clear()
    due = bench.repairer.found.due(300.0, ())
    assert [region.region.path for region in due] == [paths[1], paths[2], paths[0]]


def test_any_number_of_discoveries_is_treated_alike(tmp_path: Path, stack: ExitStack, lines: Lines) -> None:
    bench = Bench(tmp_path, stack)
    in_directory, elsewhere = bench.file((7, 0)), bench.file((8, 0), name="side")
    claim = elsewhere.rename(tmp_path / "claim")
    other = InMemory(claim)
    bench.repairer.found.discoveries.append(other)  # type: ignore[arg-type]
    bench.told.host_pids = {7: os.getpid(), 8: os.getppid()}
    bench.step()
    assert (slot(in_directory)[1], slot(claim)[1]) == (os.getpid(), os.getppid())
    assert set(bench.repairer.regions) == {str(in_directory), f"claim:{claim}"}
    assert bench.repairer.found.rejected()["/odd"] is RegionReason.UNPROVEN
    told = lines()
    assert [line["path"] for line in told if line["event"] == "region_rejected"] == ["/odd"]
    missing = [line["why"] for line in told if line["event"] == "containers_dir_missing"]
    assert missing == ["no directory /away; waiting for it"]  # the message fits a file at that path, too
    assert other.waited == 1

    assert bench.repairer.regions[f"claim:{claim}"].ownership.account == "claim-1"
    poke(claim, V1_2.device_num, "Q", 99)
    bench.step()
    assert other.rejected[f"claim:{claim}"] is RegionReason.BAD_HEADER
    assert set(bench.repairer.regions) == {str(in_directory)}

    bench.repairer.found.shed()
    assert "raise the limit (ulimit -n)" in bench.repairer.journal.standing()["out_of_descriptors"]
    limits = [other.max_regions]
    for _ in range(3):
        bench.repairer.found.start_over()
        bench.step()
        limits.append(other.max_regions)
    assert limits == [1, 2, 4, 8], "what descriptors ran out for comes back with full searches"
    assert len(events(lines, "out_of_descriptors")) == len(events(lines, "means_restored")) == 1

    bench.repairer.close()
    assert other.closed == 1
