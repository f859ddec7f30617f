"""Containers take turns in a pass, and only a container that costs too much has to wait."""

import asyncio
import gc
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from resolver.base import journal as log
from resolver.base.budget import BURST_SECONDS, SHARE
from resolver.base.errors import RegionRejected, TooSlow
from resolver.base.reasons import RegionReason, UnresolvedReason
from resolver.containers.log_names import ContainerNames
from resolver.hami.discovery import SharedDirectory
from resolver.hami.hostpid_policy import HostpidPolicy
from resolver.hami.region import RegionView, SharedRegion
from resolver.linux.cgroup import NO_CONTAINER
from resolver.linux.procfs import ProcessHandle
from resolver.repair.region import RegionRepairs
from resolver.repair.reported_values import Evidence
from resolver.state import SlotReport, SlotReports
from resolver.workers import slot_writer
from tests.descriptors import pidfds_of
from tests.fakes.clock import burn
from tests.fakes.repairs import HOST, Bench, ToldOwners, slot
from tests.patience import PATIENCE_S


class Expensive(ToldOwners):
    """Owner searches that take time: ``seconds`` by PID."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[int, float] = {}

    async def owner(
        self,
        directory: SharedDirectory,
        shown: tuple[str, int],
        ns_pid: int,
        _payer: str = "",
        rival: int = 0,
        _pause: object = None,
    ) -> ProcessHandle | UnresolvedReason:
        burn(self.seconds.get(ns_pid, 0.0))
        return await super().owner(directory, shown, ns_pid, rival=rival)


class Patient(Bench):
    """A bench of many passes with budgets."""

    def __init__(self, place: Path, stack: ExitStack) -> None:
        super().__init__(place, stack)
        self.told = self.costs = Expensive()
        self.repairer.owners.finder = self.told  # type: ignore[assignment]
        self.longest = 0.0

    def step(self, policy: HostpidPolicy = HOST) -> None:
        self.pidmap.next_refresh = 0.0
        self.runner.run(self._watched(policy))

    async def _watched(self, policy: HostpidPolicy) -> None:
        """Run one pass, and measure how long it blocked another task."""
        passing = asyncio.create_task(self.repairer.pass_once(policy, self.joined))
        last = time.thread_time()
        while not passing.done():
            await asyncio.sleep(0)
            self.longest, last = max(self.longest, time.thread_time() - last), time.thread_time()
        await passing

    def hostile(self, slots: int, seconds: float, *names: str) -> None:
        """Create regions in which each slot takes so many seconds to search, and none has an owner."""
        for number, name in enumerate(names, 1):
            pids = range(10_000 * number, 10_000 * number + slots)
            self.costs.seconds.update(dict.fromkeys(pids, seconds))
            self.costs.reasons.update(dict.fromkeys(pids, UnresolvedReason.NOT_MAPPED))
            self.file(*((ns_pid, 0) for ns_pid in pids), name=name)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Patient]:
    log.setup_logging("json", "error")
    with ExitStack() as stack:
        # Collecting the garbage of earlier tests takes longer than any step.
        gc.disable()
        stack.callback(gc.enable)
        yield Patient(tmp_path, stack)


def until(bench: Bench, condition: Callable[[], bool]) -> int:
    """Run passes until the condition holds; return their number."""
    deadline = time.monotonic() + PATIENCE_S
    for passes in itertools.count(1):
        bench.step()
        if condition():
            return passes
        assert time.monotonic() < deadline, "it never came"
        bench.runner.run(asyncio.sleep(0.002))  # for turns that outlive their pass
    raise AssertionError


def test_good_repair_does_not_wait_for_expensive_one(bench: Patient) -> None:
    bench.hostile(300, 0.005, "a", "b", "c", "d")
    bench.step()  # the hostile regions are known, and have had their first turns
    process = bench.child()
    path = bench.file((7, 0), name="good")
    bench.told.host_pids = {7: process.pid}
    bench.repairer.found.start_over()
    began = time.thread_time()
    until(bench, lambda: slot(path)[1] == process.pid)
    assert time.thread_time() - began < 2.0  # of 4 x 300 x 0.005 = 6 s
    assert bench.longest < 0.3  # an unlimited turn takes 1.5 s


def test_expensive_container_waits_alone_and_is_reported(bench: Patient) -> None:
    process = bench.child()
    bench.hostile(300, 0.005, "bad")
    bench.file((7, 0), name="good")
    bench.told.host_pids = {7: process.pid}
    bench.repairer.budgets._clock = lambda: 1000.0  # the clock stands still, so no budget accrues
    until(bench, lambda: bench.counters["over_budget"] > 0)
    for _ in range(3):
        bench.step()
    spent = sum(bench.told.asked[ns_pid] for ns_pid in bench.costs.seconds) * 0.005
    assert 0.0 < spent < BURST_SECONDS + 0.02

    def reports() -> dict[str | None, SlotReports | tuple[SlotReport, ...]]:
        return {report.container_name: report.slots for report in bench.repairer.reports()}

    until(bench, lambda: {each.unresolved for each in reports().get("good", ())} == {None})
    assert UnresolvedReason.OVER_BUDGET in {each.unresolved for each in reports()["bad"]}
    assert not any(each.dead for each in reports()["bad"])


def test_stopped_daemon_charges_no_container_for_a_read(
    bench: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bench.file((7, 0), name="good")
    bench.told.host_pids = {7: bench.child().pid}
    until(bench, lambda: slot(path)[1] == bench.told.host_pids[7])
    read = SharedRegion.read_at_once

    def stopped(region: SharedRegion) -> RegionView | None:
        time.sleep(2 * BURST_SECONDS)
        return read(region)

    monkeypatch.setattr(SharedRegion, "read_at_once", stopped)
    bench.repairer.found.everything()
    bench.step()
    assert not bench.repairer.budgets.overdrawn


def test_later_is_not_never(bench: Patient) -> None:
    process = bench.child()
    bench.hostile(200, 0.005, "bad")
    bench.told.host_pids = dict.fromkeys(bench.costs.seconds, process.pid)
    bench.repairer.budgets._clock = lambda: (
        time.thread_time() * 5
    )  # five times as fast, to keep the test short

    def all_right() -> bool:
        slots = [each for report in bench.repairer.reports() for each in report.slots]
        return bool(slots) and all(each.unresolved is None and each.host_pid for each in slots)

    until(bench, all_right)
    assert bench.counters["over_budget"] > 0  # in parts


def test_a_single_pass_has_no_later(tmp_path: Path, stack: ExitStack) -> None:
    bench = Bench(tmp_path, stack)
    costs = Expensive()
    bench.repairer.owners.finder = bench.told = costs  # type: ignore[assignment]
    process = bench.child()
    path = bench.file(*((ns_pid, 0) for ns_pid in range(1, 101)))
    costs.seconds = dict.fromkeys(range(1, 101), 2 * (BURST_SECONDS + SHARE) / 100)
    costs.host_pids = dict.fromkeys(range(1, 101), process.pid)
    bench.step()
    assert (costs.asked.total(), bench.counters["over_budget"]) == (100, 0)
    until(bench, lambda: slot(path, 99)[1] == process.pid)  # the writer may have lacked a CPU


def test_regions_take_turns_with_the_writer(bench: Patient) -> None:
    process = bench.child()
    many = 4 * slot_writer.MAX_ORDERS
    first = bench.file(*((ns_pid, 0) for ns_pid in range(1, many + 1)), name="a")
    second = bench.file((7, 0), name="b")
    bench.told.host_pids = dict.fromkeys(range(1, many + 1), process.pid)
    real, asked = bench.repairer.writing.worker.request, list[int]()

    async def request(message: bytes, descriptors: list[int]) -> bytes:
        asked.append(len(descriptors))
        return await real(message, descriptors)

    bench.repairer.writing.worker.request = request  # type: ignore[assignment,method-assign]
    until(bench, lambda: slot(first, many - 1)[1] == process.pid)
    assert slot(second)[1] == process.pid
    assert (
        asked.index(2) <= 1
    )  # the second region's only order goes out after the other's first batch at the latest


def test_waiting_turn_delays_no_other(bench: Patient) -> None:
    """Each pass once waited for all turns, and so did a new slot of another container."""
    answers = asyncio.Event()
    ask, process = bench.told.owner, bench.child()

    async def owner(place: SharedDirectory, *more: Any) -> ProcessHandle | UnresolvedReason:
        if place.path.endswith("_slow"):
            await answers.wait()
        return await ask(place, *more)

    bench.told.owner = owner  # type: ignore[assignment,method-assign]
    bench.told.host_pids = {7: process.pid, 8: process.pid}
    slow = bench.file((7, 0), name="slow")
    until(bench, lambda: bool(bench.repairer.turns.going))
    good = bench.file((8, 0), name="good")
    bench.repairer.found.start_over()
    until(bench, lambda: slot(good)[1] == process.pid and len(bench.repairer.turns.going) == 1)
    assert slot(slow)[1] == 0
    answers.set()
    until(bench, lambda: slot(slow)[1] == process.pid)


def test_news_during_a_late_turn_is_read_after_it(bench: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass postpones the container's regions by an interval; a new slot once waited that long."""
    answers, turns = asyncio.Event(), bench.repairer.turns
    turn = turns._turn

    async def late(account: str, regions: list[tuple[RegionRepairs, bool]]) -> None:
        await turn(account, regions)
        await answers.wait()

    monkeypatch.setattr(turns, "_turn", late)
    bench.repairer.settings = structs.replace(bench.settings, interval=60.0)
    path = bench.file((7, 0), name="slow")
    until(bench, lambda: bool(turns.going))
    schedule = bench.repairer.regions[str(path)].schedule
    schedule.attach(time.monotonic())
    bench.step()
    assert schedule.due <= time.monotonic()
    bench.repairer.found.refresh_at = math.inf
    assert bench.repairer.next_pass() > time.monotonic() + 30.0
    woken = bench.woken
    answers.set()
    bench.runner.run(asyncio.wait(turns.going.values()))
    assert bench.repairer.next_pass() <= time.monotonic() + 1.0
    assert bench.woken == woken + 1


def test_turn_plans_with_the_newest_answer_of_nvml(bench: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that arrived while a child was asked was never used, because it no longer counted as new."""
    turns, process = bench.repairer.turns, bench.child()
    bench.file((7, process.pid), sm_util=40)
    bench.told.host_pids = {7: process.pid}
    bench.sees(40)

    async def meanwhile(_repairs: RegionRepairs) -> None:
        bench.sees(55)
        turns.take_in(bench.settings, HOST, bench.joined, patient=True)

    monkeypatch.setattr(turns, "_read_variables", meanwhile)
    until(bench, lambda: bool(bench.reports()))
    assert bench.reports()[0].utilization == (55,)


def test_region_gone_during_its_turn_leaves_no_handle(bench: Patient) -> None:
    answers = asyncio.Event()
    ask, process = bench.told.owner, bench.child()

    async def owner(place: SharedDirectory, *more: Any) -> ProcessHandle | UnresolvedReason:
        found = await ask(place, *more)
        await answers.wait()
        return found

    bench.told.owner = owner  # type: ignore[assignment,method-assign]
    bench.told.host_pids = {7: process.pid}
    path = bench.file((7, 0), name="goes")
    until(bench, lambda: pidfds_of(process.pid) > 0)
    bench.repairer.found.drop(str(path))
    answers.set()
    bench.runner.run(asyncio.wait(bench.repairer.turns.going.values()))
    assert not bench.repairer.turns.going
    assert process.pid not in bench.repairer.owners
    assert pidfds_of(process.pid) == 0


def test_a_thousand_slots_at_once_cost_a_few_lines(bench: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        log.Journal, "_say", lambda _self, event, _level, fields: said.append(f"{event} {fields}")
    )
    process = bench.child()
    bench.repairer.budgets._clock = lambda: time.monotonic() * 20
    path = bench.file(*((ns_pid, 0) for ns_pid in range(1, 1001)), name="a", sm_util=80)
    bench.told.host_pids = dict.fromkeys(range(1, 1001), process.pid)
    until(bench, lambda: bench.counters["repairs_missing"] == 1000)
    assert sum(line.startswith("repair ") for line in said) < 100
    process.kill()
    process.wait()
    bench.told.host_pids = {}
    bench.told.runs = True
    before, began = len(said), time.monotonic()
    until(bench, lambda: slot(path, 999)[2] == 0)
    assert len(said) - before <= 3 + (time.monotonic() - began)
    bench.repairer.journal._quotas["uid_a", False][0]._at -= 2
    bench.repairer.journal.catch_up()
    left_out = re.findall(r"events_left_out .*'repair': (\d+)", "\n".join(said))
    written = sum(line.startswith("repair ") for line in said)
    assert sum(map(int, left_out)) + written == 1000


@pytest.mark.parametrize("old", [False, True])
def test_tenant_sets_no_pace_of_nvml(bench: Patient, monkeypatch: pytest.MonkeyPatch, *, old: bool) -> None:
    """A value that its tenant keeps changing requires an answer no older than two ticks."""
    monkeypatch.setattr(Evidence, "unsure", lambda _: True)
    bench.joined = bench.joined._replace(answered=0.0 if old else time.monotonic() + 3600)
    bench.file((7, 0))
    bench.told.host_pids = {7: bench.child().pid}
    until(bench, lambda: any(each.host_pid for each in bench.reports().values()))
    assert bench.repairer.turns.ask_nvml.is_set() is old


def test_a_region_has_the_name_of_the_container_that_uses_it(
    bench: Patient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HAMi names a directory after an init container, and an app container of the pod mounts it too."""
    container_id, links, owners = "a" * 64, tmp_path / "log", bench.repairer.owners
    links.mkdir()
    (links / f"pod_ns_main-{container_id}.log").symlink_to("/nowhere")
    monkeypatch.setattr(owners, "_names", ContainerNames(str(links), ""))
    container = NO_CONTAINER._replace(container_id=container_id)
    monkeypatch.setattr(owners._procfs, "container", lambda _: container)
    path = bench.file((7, 0), name="init")
    bench.step()
    assert [each.container_name for each in bench.repairer.reports()] in ([], ["init"])
    bench.told.host_pids = {7: bench.child().pid}
    until(bench, lambda: [each.container_name for each in bench.repairer.reports()] == ["main"])
    assert slot(path)[1] != 0


@pytest.mark.parametrize(
    ("error", "unresolved"),
    [
        (None, None),
        (TooSlow("it waits"), UnresolvedReason.TOO_SLOW),
        (RegionRejected(RegionReason.GONE, ""), "gone"),
    ],
)
def test_region_that_a_lane_reads_delays_no_other(
    bench: Patient, monkeypatch: pytest.MonkeyPatch, error: Exception | None, unresolved: str | None
) -> None:
    at_once, answers, process = SharedRegion.read_at_once, asyncio.Event(), bench.child()
    bench.told.host_pids = {7: process.pid, 8: process.pid}

    async def read_by(region: SharedRegion, _reader: object, payer: str) -> RegionView:
        assert payer.endswith("/uid_cold")
        await answers.wait()
        if error is not None:
            raise error
        return region.read()

    def cold(region: SharedRegion) -> RegionView | None:
        return None if "_cold" in region.path else at_once(region)

    monkeypatch.setattr(SharedRegion, "read_at_once", cold)
    monkeypatch.setattr(SharedRegion, "read_by", read_by)
    path, good = bench.file((7, 0), name="cold"), bench.file((8, 0), name="good")
    until(bench, lambda: slot(good)[1] == process.pid)
    assert str(path.parent) in bench.repairer.turns.going
    answers.set()
    until(bench, lambda: not bench.repairer.turns.going)
    if error is None:
        until(bench, lambda: slot(path)[1] == process.pid)
    elif unresolved == "gone":
        until(bench, lambda: str(path) not in bench.repairer.regions)
    else:
        assert slot(path)[1] == 0


async def test_turns_share_a_refresh_begun_after_they_read(bench: Patient) -> None:
    refresh, pidmap, turns = bench.repairer._refresh, bench.pidmap, bench.repairer.turns
    turns.take_in(bench.settings, HOST, bench.joined, patient=True)
    seen = time.monotonic()
    assert await asyncio.gather(*(refresh(seen) for _ in range(3))) == [True] * 3
    assert pidmap.refreshes == 1
    pidmap.next_refresh = math.inf
    assert await refresh(seen)
    assert not await refresh(time.monotonic()), "what was read since then needs a newer one"
    turns.take_in(bench.settings, HOST, bench.joined, patient=False)
    assert await refresh(time.monotonic())
    assert pidmap.refreshes == 2
