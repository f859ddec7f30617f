"""Passes over real files with the real writer; only who owns a slot is told by the test."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import signal
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from resolver.budget import Slices
from resolver.config import HostpidNamespace, Settings, WriteUtilization
from resolver.errors import RegionRejected, WorkerFailed
from resolver.gpu.attribution import NOTHING, Joined
from resolver.hami import layout as layouts
from resolver.hami.discovery import FoundRegion, Location, RegionChanges, SharedDirectory, Whose
from resolver.hami.hostpid_policy import HostpidPolicy
from resolver.hami.region import RegionView, SharedRegion, adopt_region
from resolver.linux.procfs import ProcessHandle, Procfs
from resolver.log import journal as log
from resolver.pids.listing import Listing
from resolver.pids.pidmap import PidMap
from resolver.pids.scan import ScanSource
from resolver.reasons import RegionReason, RepairReason, UnresolvedReason
from resolver.repair import repairer as repairer_module
from resolver.repair.repairer import Repairer
from resolver.repair.reported_values import TWO_TICKS
from resolver.state import SlotReport
from resolver.workers import slot_writer
from tests.fakes import cachefiles
from tests.fakes.cachefiles import poke
from tests.fakes.family import Family

V1_2 = layouts.LAYOUTS["v1.2"]
HOST = HostpidPolicy(HostpidNamespace.HOST, "")
UUID = "GPU-a"

Lines = Callable[[], list[dict[str, Any]]]


class ToldOwners:
    """Stands where `OwnerFinder` is: what it would find."""

    def __init__(self) -> None:
        self.host_pids: dict[int, int] = {}
        self.reasons: dict[int, UnresolvedReason] = {}
        self.runs = False
        self.asked: Counter[int] = Counter()

    def owner(
        self, directory: SharedDirectory, shown: tuple[str, int], ns_pid: int, mtime_ns: int = 0
    ) -> ProcessHandle | UnresolvedReason:
        assert directory.root
        assert all(shown)
        assert mtime_ns
        self.asked[ns_pid] += 1
        if ns_pid in self.host_pids:
            return Procfs().open_handle(self.host_pids[ns_pid])
        return self.reasons.get(ns_pid, UnresolvedReason.NO_SUCH_PROCESS)

    async def catch_up(self, slices: Slices, *, bounded: bool = True) -> None: ...

    def vacant(self, directory: SharedDirectory, ns_pid: int) -> bool:
        return self.runs and bool(directory.root) and ns_pid not in self.host_pids

    def forget(self, directory: SharedDirectory) -> None:
        assert directory.root


class Bench:
    def __init__(self, place: Path, stack: ExitStack, **settings: Any) -> None:
        self.place, self.stack = place, stack
        self.counters: Counter[str] = Counter()
        self.told = ToldOwners()
        procfs = Family()
        self.pidmap = PidMap(Listing(ScanSource(procfs)))
        self.settings = Settings(containers_dir=(str(place),), **settings)
        self.repairer = Repairer(self.settings, procfs, self.pidmap, self.counters, log.Journal())
        self.repairer._owner_finder = self.told  # type: ignore[assignment]
        self.joined = NOTHING
        self.runner = asyncio.Runner()
        stack.callback(self.runner.close)
        stack.callback(self.repairer.close)

    def file(self, *slots: tuple[int, int], name: str = "main", sm_util: int = 0) -> Path:
        """A region whose slots are these ``(pid, hostpid)``, all in use, with one device."""
        data = bytearray(cachefiles.recorded("v1.2"))
        struct.pack_into("<Q", data, V1_2.device_num, 1)
        struct.pack_into("<96s", data, V1_2.uuids, UUID.encode())
        struct.pack_into("<Q", data, V1_2.sm_limit, 0)
        data[V1_2.procs : V1_2.proc_num] = bytes(V1_2.proc_num - V1_2.procs)
        struct.pack_into("<i", data, V1_2.proc_num, len(slots))
        for index, (pid, hostpid) in enumerate(slots):
            struct.pack_into("<ii", data, V1_2.slot_offset(index), pid, hostpid)
            struct.pack_into("<i", data, V1_2.slot_offset(index) + V1_2.status, 1)
            struct.pack_into("<Q", data, V1_2.sm_util_offset(index, 0) or 0, sm_util)
        return cachefiles.write(self.place / f"uid_{name}" / "a.cache", bytes(data))

    def child(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["sleep", "60"])
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        return process

    def has_open(self, path: Path) -> None:
        """Somebody has the file open from now on, as HAMi does: what nobody has open is called dead in the end."""
        process = subprocess.Popen(["sleep", "600"], stdin=self.stack.enter_context(path.open("r+b")))
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)

    def sees(self, load: int | None = None) -> None:
        """What NVML says of every owner from now on; None: nothing."""
        values = {} if load is None else {(host_pid, UUID): load for host_pid in self.told.host_pids.values()}
        self.joined = Joined(1.0, "", values, frozenset(), frozenset({UUID}), ())

    def step(self, policy: HostpidPolicy = HOST) -> None:
        self.runner.run(self.repairer.pass_once(policy, self.joined, patient=False))

    def waits(self) -> None:
        """For as long as a watcher has time to put a value right."""
        time.sleep(TWO_TICKS)

    def reports(self) -> dict[int, SlotReport]:
        return {slot.slot: slot for region in self.repairer.reports() for slot in region.slots}


def slot(path: Path, index: int = 0) -> tuple[int, int, int]:
    """``(pid, hostpid, sm_util)`` as the file has it."""
    data = path.read_bytes()
    pid, hostpid = struct.unpack_from("<ii", data, V1_2.slot_offset(index))
    return pid, hostpid, struct.unpack_from("<Q", data, V1_2.sm_util_offset(index, 0) or 0)[0]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


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


# ---- repairs -----------------------------------------------------------------------------------


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


def test_a_file_is_watched_before_it_is_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process did in between would not be reported, and not be looked for soon."""
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


def test_regions_that_all_say_something_new_are_all_seen_to(bench: Bench) -> None:
    """Those that say nothing new are read several at a time, and one that is given up among them is nobody else's."""
    child = bench.child()
    bench.told.host_pids[7] = child.pid
    paths = [bench.file((7, child.pid), name=f"n{number}") for number in range(40)]
    bench.step()
    bench.step()
    for path in paths[::3]:
        poke(path, V1_2.slot_offset(0) + 4, "i", 0)
    os.truncate(paths[1], 100)
    bench.step()
    slots = {each.path: [slot.hostpid for slot in each.slots] for each in bench.repairer.reports()}
    assert slots.keys() == {str(path) for path in paths} - {str(paths[1])}
    bench.step()
    slots = {each.path: [slot.hostpid for slot in each.slots] for each in bench.repairer.reports()}
    assert set(map(tuple, slots.values())) == {(child.pid,)}


def test_a_dry_run_says_it_once_and_writes_nothing(tmp_path: Path, stack: ExitStack, lines: Lines) -> None:
    bench = Bench(tmp_path, stack, dry_run=True, write_utilization=WriteUtilization.ALWAYS)
    path, process = bench.file((7, 0)), bench.child()
    bench.told.host_pids = {7: process.pid}
    bench.sees(40)
    before = path.read_bytes()
    for _ in range(3):
        bench.step()
    said = lines()
    assert [(line["slot"], line["after"]) for line in said if line["event"] == "would_repair"] == [
        (0, process.pid)
    ]
    assert (path.read_bytes(), bench.repairer.writing.worker.starts) == (before, 0)
    assert bench.counters["would_repair_missing"] == 1
    assert bench.counters["repairs_missing"] == 0


def test_more_orders_than_fit_in_one_message(bench: Bench) -> None:
    process, many = bench.child(), 300
    path = bench.file(*((n + 1, 0) for n in range(many)))
    bench.told.host_pids = dict.fromkeys(range(1, many + 1), process.pid)
    bench.step()
    assert {slot(path, index)[1] for index in range(many)} == {process.pid}
    assert bench.counters["repairs_missing"] == many


def test_utilization_comes_and_goes(bench: Bench) -> None:
    path, process = bench.file((7, 0), sm_util=99), bench.child()
    bench.told.host_pids = {7: process.pid}
    bench.step()
    assert slot(path) == (7, process.pid, 99)  # NVML was not asked: unknown is not 0
    assert bench.reports()[0].utilization == (None,)
    for load, value in ((40, 40), (55, 55), (None, 0)):
        bench.sees(load)
        bench.step()  # a watcher may put it right
        bench.waits()
        bench.step()
        bench.step()
        assert slot(path)[2] == value
        assert bench.reports()[0].utilization == (value,)
    assert bench.counters["utilization_writes"] == 3


# ---- the ends of processes ---------------------------------------------------------------------


def test_a_killed_process_leaves_a_dead_slot_without_load(bench: Bench) -> None:
    path, process = bench.file((7, 0)), bench.child()
    bench.told.host_pids = {7: process.pid}
    bench.sees(40)
    for _ in range(3):
        bench.step()
        bench.waits()
    assert slot(path) == (7, process.pid, 40)
    process.kill()
    process.wait()
    del bench.told.host_pids[7]
    bench.step()
    assert slot(path) == (7, process.pid, 0)
    bench.step()
    report = bench.reports()[0]
    assert (report.dead, report.unresolved, report.host_pid, report.utilization) == (True, None, None, (0,))
    assert process.pid not in bench.repairer.owners


@pytest.mark.parametrize(
    ("runs", "other", "dead"), [(False, False, False), (True, False, True), (False, True, False)]
)
def test_a_process_nobody_ever_saw_is_dead_only_where_the_kernel_says_so(
    bench: Bench, *, runs: bool, other: bool, dead: bool
) -> None:
    process = bench.child()
    path = bench.file((7, 815), (9, process.pid), sm_util=30)
    bench.has_open(path)
    bench.told.runs = runs
    bench.told.host_pids = {9: process.pid} if other else {}
    bench.step()
    assert slot(path)[2] == 30  # one look in vain proves nothing
    for _ in range(3):
        bench.step()
    assert bench.reports()[0].dead is dead
    assert slot(path) == (7, 815, 0 if dead else 30)


@pytest.mark.parametrize("reason", [UnresolvedReason.ACCESS_DENIED, UnresolvedReason.AMBIGUOUS])
def test_what_cannot_be_known_is_not_dead(bench: Bench, reason: UnresolvedReason) -> None:
    path, process = bench.file((7, 815), sm_util=30), bench.child()
    bench.told.host_pids, bench.told.runs = {7: process.pid}, True
    bench.step()
    process.kill()
    process.wait()
    bench.told.host_pids, bench.told.reasons = {}, {7: reason}
    for _ in range(4):
        bench.step()
    assert slot(path)[2] == 30
    assert (bench.reports()[0].dead, bench.reports()[0].unresolved) == (False, reason)


def test_nothing_is_kept_of_a_region_that_goes(bench: Bench) -> None:
    before = len(os.listdir("/proc/self/fd"))
    process = bench.child()
    path = bench.file(*((n, 0) for n in range(1, 20)))
    bench.told.host_pids = dict.fromkeys(range(1, 20), process.pid)
    bench.step()
    assert process.pid in bench.repairer.owners
    path.unlink()
    bench.step()
    assert bench.repairer.regions == {}
    assert process.pid not in bench.repairer.owners
    bench.repairer.close()
    bench.runner.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_another_containers_dir_lets_the_old_one_go(bench: Bench, tmp_path: Path) -> None:
    bench.file((7, 0))
    bench.step()
    (tmp_path / "new").mkdir()
    bench.repairer.use(Settings(containers_dir=(str(tmp_path / "new"),)))
    assert bench.repairer.regions == {}
    bench.step()
    assert bench.repairer.regions == {}


# ---- other writers -----------------------------------------------------------------------------


def rewrite(path: Path, hostpid: int) -> None:
    cachefiles.poke(path, V1_2.slot_offset(0) + 4, "i", hostpid)


def test_another_writer_is_a_conflict_and_is_waited_for(bench: Bench, lines: Lines) -> None:
    path, process = bench.file((7, 0)), bench.child()
    bench.told.host_pids = {7: process.pid}
    bench.step()
    rewrite(path, 815)
    bench.step()
    assert slot(path)[1] == process.pid  # once is the process's own guess
    rewrite(path, 815)
    for _ in range(4):
        bench.step()
    assert slot(path)[1] == 815
    assert bench.counters["conflicts"] == 1
    (line,) = events(lines, "conflict")
    assert (line["hostpid"], line["next_try_seconds"], line["ns_pid"]) == (815, 0.5, 7)
    assert bench.reports()[0].unresolved is UnresolvedReason.CONFLICT
    next(iter(bench.repairer.regions.values())).states[7].not_before = 0.0
    bench.step()
    assert slot(path)[1] == process.pid


def test_what_another_writer_costs_in_lines_is_one_for_each_time_it_is_met(
    bench: Bench, lines: Lines
) -> None:
    """The repair of a slot that was changed back says nothing that the conflict hasn't said."""
    path, process = bench.file((7, 0)), bench.child()
    bench.told.host_pids = {7: process.pid}
    bench.step()
    for _ in range(4):
        rewrite(path, 815)
        bench.step()
        next(iter(bench.repairer.regions.values())).states[7].not_before = 0.0
        bench.step()
        assert slot(path)[1] == process.pid
    assert bench.counters["repairs_stale"] == 4
    assert (
        len(events(lines, "repair")) == 3
    )  # the first, after what may have been its own guess, after a conflict
    assert [line["times"] for line in events(lines, "conflict")] == [1, 2, 3]


class Answering:
    """Stands where the writer is, and answers as it is told; nothing is written."""

    def __init__(self, *answers: tuple[int, int] | Exception | bytes) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def request(self, message: bytes, descriptors: Sequence[int] = ()) -> bytes:
        self.asked += 1
        assert descriptors
        _, count = slot_writer.HEAD.unpack_from(message)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, bytes) else slot_writer.RESULT.pack(*answer) * count

    def malformed(self, what: str) -> WorkerFailed:
        return WorkerFailed(what)

    def stop(self) -> None:
        """Nothing to end."""


def with_answers(bench: Bench, *answers: tuple[int, int] | Exception | bytes) -> Path:
    bench.repairer.writing.worker = Answering(*answers)  # type: ignore[assignment]
    path, process = bench.file((7, 0)), bench.child()
    bench.told.host_pids = {7: process.pid}
    return path


@pytest.mark.parametrize(
    ("outcome", "reason", "counter"),
    [
        (slot_writer.DIFFERENT, UnresolvedReason.CHANGED, "writes_missed"),
        (slot_writer.WRONG_SIZE, UnresolvedReason.CHANGED, "writes_missed"),
        (slot_writer.OWNER_GONE, UnresolvedReason.GONE, "writes_undone"),
    ],
)
def test_a_write_that_did_not_happen_is_unresolved_and_tried_again(
    bench: Bench, outcome: int, reason: UnresolvedReason, counter: str
) -> None:
    with_answers(bench, (outcome, 0), (outcome, 0))
    bench.step()
    assert bench.reports()[0].unresolved is reason
    assert bench.counters[counter] == 1
    assert bench.counters["repairs_missing"] == 0
    bench.step()
    assert bench.repairer.writing.worker.asked == 2  # type: ignore[attr-defined]
    assert bench.counters["conflicts"] == 0


def test_a_file_that_cannot_be_written_is_left_alone_for_a_while(bench: Bench) -> None:
    with_answers(bench, (slot_writer.NOT_WRITABLE, 0))
    for _ in range(3):
        bench.step()
        assert bench.reports()[0].unresolved is UnresolvedReason.WRITE_FAILED
    assert bench.repairer.writing.worker.asked == 1  # type: ignore[attr-defined]


def test_a_file_that_cannot_be_written_is_said_once_and_its_end_too(bench: Bench, lines: Lines) -> None:
    refused = (slot_writer.NOT_WRITABLE, 0)
    with_answers(bench, refused, refused, (slot_writer.DIFFERENT, 0), refused, (slot_writer.DONE, 0))
    for _ in range(5):
        bench.step()
        for repairs in bench.repairer.regions.values():
            repairs.unwritable(0.0, 0.0)  # the time is over
    names = Counter(line["event"] for line in lines())
    assert (names["write_failed"], names["write_works_again"]) == (1, 1)


def test_what_is_said_of_a_file_that_cannot_be_written_has_a_limit_too(bench: Bench, lines: Lines) -> None:
    """A lease that its container takes and gives back makes it so at will."""
    answers = [(slot_writer.NOT_WRITABLE, 0), (slot_writer.DONE, 0)] * 50
    with_answers(bench, *answers)
    for number in range(99):
        bench.step()
        (repairs,) = bench.repairer.regions.values()
        repairs.unwritable(0.0, 0.0)  # the time is over
        repairs.states[7].not_before = 0.0
        assert number or events(lines, "write_failed")
    said = Counter(line["event"] for line in lines())
    assert said["write_failed"] + said["write_works_again"] < 10


def test_nothing_is_kept_of_a_file_that_could_not_be_written_and_is_gone(bench: Bench) -> None:
    """Its container makes another one, of another name, for ever."""
    path = with_answers(bench, (slot_writer.NOT_WRITABLE, 0))
    bench.step()
    path.unlink()
    bench.step()
    assert not bench.repairer.journal._troubles


def test_memory_of_many_slots_goes_back_and_once_again_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine some of it was still in use at the first time."""
    given: list[float] = []
    monkeypatch.setattr(repairer_module, "give_back_memory", lambda: given.append(time.monotonic()))
    monkeypatch.setattr(repairer_module, "_UNUSED_SECONDS", (0.1, 0.3))
    path = bench.file(*((ns_pid, 0) for ns_pid in range(1, 1025)))
    bench.step()
    path.unlink()
    began = time.monotonic()
    while len(given) < 2:
        bench.step()
    assert given[0] - began >= 0.1
    assert given[1] - began >= 0.3
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        bench.step()
    assert len(given) == 2


@pytest.mark.parametrize(
    "defect", [ZeroDivisionError("the very defect"), OSError(errno.ELOOP, "the very defect")]
)
def test_what_goes_wrong_with_one_container_ends_nobody_elses_turn(
    bench: Bench, lines: Lines, monkeypatch: pytest.MonkeyPatch, defect: Exception
) -> None:
    path, _, process = bench.file((8, 0), name="good"), bench.file((7, 0), name="bad"), bench.child()
    bench.told.host_pids = {8: process.pid}
    ask = bench.told.owner

    def owner(place: SharedDirectory, *more: Any) -> ProcessHandle | UnresolvedReason:
        if place.root.endswith("_bad"):
            raise defect
        return ask(place, *more)

    monkeypatch.setattr(bench.told, "owner", owner)
    bench.step()
    assert slot(path)[1] == process.pid
    (line,) = events(lines, "internal_error")
    assert (line["container"], line["step"]) == ("uid_bad", "pass")
    assert "the very defect" in line["exception"]
    assert bench.counters["internal_errors"] == 1


def test_files_that_come_and_go_cost_few_lines_for_each_container(bench: Bench, lines: Lines) -> None:
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


def test_a_write_that_was_changed_back_before_it_was_read_back_was_one(bench: Bench) -> None:
    with_answers(bench, (slot_writer.DONE, 0xBAD))
    for _ in range(4):
        bench.step()
    assert bench.repairer.writing.worker.asked == 1  # type: ignore[attr-defined]
    assert bench.counters["conflicts"] == 1
    assert bench.reports()[0].unresolved is UnresolvedReason.CONFLICT


# ---- a writer that fails -----------------------------------------------------------------------

BUS = WorkerFailed("the slot writer was killed by SIGBUS", own_fault=True)
KILLED = WorkerFailed("the slot writer was killed by SIGKILL")
WAITING = WorkerFailed("the slot writer failed twice", waiting=True)


def test_a_file_that_kills_the_writer_is_quarantined(bench: Bench, lines: Lines) -> None:
    with_answers(bench, BUS)
    for _ in range(3):
        bench.step()
    assert bench.repairer.writing.worker.asked == 1  # type: ignore[attr-defined]
    assert (bench.counters["quarantines"], bench.counters["writer_failures"]) == (1, 1)
    assert bench.reports()[0].unresolved is UnresolvedReason.QUARANTINED
    (line,) = events(lines, "region_quarantined")
    assert (line["container"], line["seconds"]) == ("uid_main", 10.0)


def test_a_writer_that_is_late_three_times_is_not_the_files_fault_if_the_next_one_answers(
    bench: Bench,
) -> None:
    late = WorkerFailed("the slot writer did not answer within 1 s")
    with_answers(
        bench,
        late,
        (slot_writer.DIFFERENT, 0),
        late,
        (slot_writer.DIFFERENT, 0),
        late,
        (slot_writer.DIFFERENT, 0),
    )
    for _ in range(6):
        bench.step()
    assert (bench.counters["quarantines"], bench.counters["writer_failures"]) == (0, 3)


def test_a_new_file_in_its_place_is_not_forgiven(bench: Bench) -> None:
    path = with_answers(bench, BUS, BUS, BUS)
    for _ in range(5):
        bench.step()
        fresh = path.with_name("b.new")
        fresh.write_bytes(path.read_bytes())
        fresh.rename(path)
        bench.repairer._next_discovery = 0.0
    assert bench.repairer.writing.worker.asked == 1  # type: ignore[attr-defined]
    assert bench.counters["quarantines"] == 1
    assert bench.reports()[0].unresolved is UnresolvedReason.QUARANTINED


def test_a_writer_that_somebody_kills_is_not_the_files_fault_until_it_looks_like_it(bench: Bench) -> None:
    with_answers(bench, KILLED, KILLED, WAITING, WAITING, WAITING, KILLED)
    for _ in range(5):
        bench.step()
    assert (bench.counters["quarantines"], bench.counters["writer_failures"]) == (0, 2)
    bench.step()
    assert (bench.counters["quarantines"], bench.counters["writer_failures"]) == (1, 3)


def test_an_answer_forgives(bench: Bench) -> None:
    with_answers(bench, KILLED, KILLED, (slot_writer.DIFFERENT, 0), KILLED, KILLED)
    for _ in range(5):
        bench.step()
    assert bench.counters["quarantines"] == 0


@pytest.mark.parametrize("answer", [b"x", b"\0" * slot_writer.RESULT.size * 2])
def test_a_malformed_answer_is_a_failure(bench: Bench, answer: bytes) -> None:
    with_answers(bench, answer)
    bench.step()
    assert bench.counters["writer_failures"] == 1


def test_one_files_quarantine_is_no_other_files(bench: Bench) -> None:
    process = bench.child()
    first, second = bench.file((7, 0), name="bad"), bench.file((8, 0), name="good")
    bench.told.host_pids = {7: process.pid, 8: process.pid}
    real = bench.repairer.writing.worker

    class DiesOn(Answering):
        async def request(self, message: bytes, descriptors: Sequence[int] = ()) -> bytes:
            if os.path.samestat(os.fstat(descriptors[0]), first.stat()):
                raise BUS
            return await real.request(message, descriptors)

    bench.repairer.writing.worker = DiesOn()  # type: ignore[assignment]
    bench.stack.callback(real.stop)
    bench.step()
    assert slot(first)[1] == 0
    assert slot(second)[1] == process.pid


def test_a_writer_that_is_killed_while_idle_costs_no_pass(bench: Bench) -> None:
    path, process = bench.file((7, 0), (8, 0)), bench.child()
    bench.told.host_pids = {7: process.pid}
    bench.step()
    assert bench.repairer.writing.worker.host_pid
    with Procfs().open_handle(bench.repairer.writing.worker.host_pid) as handle:
        os.kill(bench.repairer.writing.worker.host_pid, signal.SIGKILL)
        while handle.alive():
            time.sleep(0.001)
    bench.told.host_pids[8] = process.pid
    bench.step()
    assert slot(path, 1)[1] == process.pid
    assert bench.counters["writer_failures"] == 0


# ---- what cannot be read -----------------------------------------------------------------------


def test_a_file_that_is_cut_is_given_up_and_others_go_on(bench: Bench, lines: Lines) -> None:
    process = bench.child()
    first, second = bench.file((7, 0), name="bad"), bench.file((8, 0), name="good")
    bench.step()
    os.truncate(first, 100)
    bench.told.host_pids = {7: process.pid, 8: process.pid}
    bench.step()
    assert (first.stat().st_size, slot(second)[1]) == (100, process.pid)
    assert bench.counters[f"rejected_{RegionReason.TRUNCATED}"] == 1
    assert [line["path"] for line in events(lines, "region_rejected")] == [str(first)]
    assert [report.path for report in bench.repairer.reports()] == [str(second)]


def test_slots_that_are_no_slots_are_reported(bench: Bench) -> None:
    bench.file((0, 0), (-5, 1), (7, 0), (7, 0), (9, 0))
    bench.step()
    assert {index: report.unresolved for index, report in bench.reports().items()} == {
        0: UnresolvedReason.INVALID_PID,
        1: UnresolvedReason.INVALID_PID,
        2: UnresolvedReason.AMBIGUOUS,
        3: UnresolvedReason.AMBIGUOUS,
        4: UnresolvedReason.NO_SUCH_PROCESS,
    }


def test_a_directory_that_is_missing_is_said_once_and_found_later(
    tmp_path: Path, stack: ExitStack, lines: Lines
) -> None:
    place = tmp_path / "later"
    bench = Bench(place, stack)
    for _ in range(3):
        bench.step()
    bench.file((7, 0))
    bench.repairer._next_discovery = 0.0
    bench.step()
    names = [line["event"] for line in lines()]
    assert names.count("containers_dir_missing") == names.count("containers_dir_found") == 1
    assert len(bench.repairer.regions) == 1


class InMemory:
    """A third way of finding regions, unknown to everybody: told by the test, by descriptors."""

    workers = ()

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
            added.append(FoundRegion(region, Whose(account="claim-1", container="")))
            refused = [("/odd", RegionRejected(RegionReason.UNPROVEN, "it is odd"))]
        return RegionChanges(added, [], refused)

    async def settle(self) -> bool:
        self.waited += 1
        return False

    watched = False

    def wants(self) -> float:
        return 0.0

    def locate(self, region: SharedRegion) -> Location:
        return Location(SharedDirectory("8:1", "/claims/1"), ("8:1", region.inode))

    def reject(self, region: SharedRegion, why: RegionRejected) -> None:
        if self.regions.get(region.path) is region:
            self.rejected[region.path] = why.reason
            self.regions.pop(region.path).close()

    def close(self) -> None:
        self.closed += 1


class Clock:
    """Stands where the repairer's `time` is: it stands still but for what a test says."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.thread_time, self.time = time.thread_time, time.time

    def monotonic(self) -> float:
        return self.now


def quiet_life(bench: Bench, clock: Clock, files: int) -> Iterator[float]:
    """When passes are made once some containers, found at any times, have started."""
    repairer = bench.repairer

    async def caught_up(slices: Slices, *, unhurried: bool = True) -> bool:
        assert slices
        return unhurried

    bench.pidmap.catch_up = caught_up  # type: ignore[method-assign]
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
def test_files_that_are_only_looked_at_by_the_clock_are_looked_at_together(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    *,
    alive: bool,
) -> None:
    """Whether their processes live or have ended: a wake-up costs more than a look."""
    files, clock = 6, Clock()
    monkeypatch.setattr(repairer_module, "time", clock)
    bench.told.host_pids = {number + 7: bench.child().pid for number in range(files) if alive}
    bench.told.runs = True
    passes = quiet_life(bench, clock, files)
    began = next(now for now in passes if now > 1100.0)
    asked = bench.told.asked.total()
    times = [next(passes) for _ in range(31)]
    assert times[-1] - began > 30 * 4.0  # one more lists all directories anew
    # Who took a dead slot without a sign of it is found within a minute.
    assert bench.told.asked.total() - asked == (0 if alive else 2 * files)


def test_any_number_of_discoveries_is_treated_alike(tmp_path: Path, stack: ExitStack, lines: Lines) -> None:
    bench = Bench(tmp_path, stack)
    in_directory, elsewhere = bench.file((7, 0)), bench.file((8, 0), name="side")
    claim = elsewhere.rename(tmp_path / "claim")
    other = InMemory(claim)
    bench.repairer._discoveries["other"] = other
    bench.told.host_pids = {7: os.getpid(), 8: os.getppid()}
    bench.step()
    assert (slot(in_directory)[1], slot(claim)[1]) == (os.getpid(), os.getppid())
    assert set(bench.repairer.regions) == {str(in_directory), f"claim:{claim}"}
    assert bench.repairer.rejected()["/odd"] is RegionReason.UNPROVEN
    told = lines()
    assert [line["path"] for line in told if line["event"] == "region_rejected"] == ["/odd"]
    assert [line["path"] for line in told if line["event"] == "containers_dir_missing"] == ["/away"]
    assert other.waited == 1

    assert bench.repairer.regions[f"claim:{claim}"].whose.account == "claim-1"
    poke(claim, V1_2.device_num, "Q", 99)
    bench.step()
    assert other.rejected[f"claim:{claim}"] is RegionReason.BAD_HEADER
    assert set(bench.repairer.regions) == {str(in_directory)}

    bench.repairer.close()
    assert other.closed == 1


def test_new_settings_take_away_only_what_they_are_about(
    tmp_path: Path, stack: ExitStack, lines: Lines
) -> None:
    bench = Bench(tmp_path / "a", stack, mapped_regions=True)
    path = bench.file((7, 0))
    bench.step()
    mappings, directories = bench.repairer.discoveries
    bench.repairer.use(replace(bench.settings, mapped_regions=False))
    assert list(bench.repairer.discoveries) == [directories]
    assert set(bench.repairer.regions) == {str(path)}

    bench.repairer.use(replace(bench.settings, containers_dir=(str(tmp_path / "b"),)))
    again, elsewhere = bench.repairer.discoveries
    assert mappings not in (again, elsewhere)
    assert directories not in (again, elsewhere)
    assert bench.repairer.regions == {}
    assert [line["path"] for line in lines() if line["event"] == "region_gone"] == [str(path)]
