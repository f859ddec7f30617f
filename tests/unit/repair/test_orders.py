"""Orders sent to the slot writer, and the handling of its answers."""

import asyncio
import errno
import gc
import os
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resolver.base.budget import Budgets
from resolver.base.counters import Shortage
from resolver.base.errors import WorkerFailed
from resolver.base.journal import Journal
from resolver.base.reasons import UnresolvedReason
from resolver.repair.orders import Writing, directory_of, of_slot
from resolver.repair.plan import Order, encode
from resolver.workers import means, slot_writer
from resolver.workers.supervisor import WorkerProcess
from tests.fakes.planned import Bench, SlotValues
from tests.patience import PATIENCE_S

DONE = (slot_writer.DONE, 0)
LATE = WorkerFailed("it did not answer", late=True)
KILLED = WorkerFailed("it was killed by SIGKILL")
WAITING = WorkerFailed("it failed twice", waiting=True)
BUS = WorkerFailed("it was killed by SIGBUS", own_fault=True)


class Noted(Journal):
    """A journal that keeps events instead of logging them."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, dict[str, Any]]] = []

    def _say(self, event: str, level: str, fields: dict[str, Any]) -> None:
        self.said.append((event, {"level": level, **fields}))


class Desk:
    """Regions of one account each, and a writer whose answers the test chooses."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.counters: Counter[str] = Counter()
        self.journal = Noted()
        self.budgets = Budgets()
        self.writing = Writing(self.counters, self.journal)

    def region(self, *slots: SlotValues, account: str = "uid_main") -> Bench:
        """A region with these slots; each owner's host PID is the slot's PID plus 4704."""
        bench = Bench(self.stack)
        bench.repairs.region.fd = os.dup(0)
        bench.repairs.record = self.budgets.of(account)
        bench.repairs.ownership = bench.repairs.ownership._replace(account=account)
        self.stack.callback(bench.repairs.close)
        bench.see(*slots)
        for ns_pid, *_ in slots:
            bench.own(ns_pid, 4704 + ns_pid)
        return bench

    def send(
        self, bench: Bench, *answers: tuple[int, int] | WorkerFailed, orders: list[Order] | None = None
    ) -> bool:
        """Carry out the plan or these orders; the writer gives one answer per order, or fails."""

        async def request(_message: bytes, _descriptors: list[int]) -> bytes:
            results = [each for each in answers if not isinstance(each, WorkerFailed)]
            if len(results) < len(answers):
                raise next(each for each in answers if isinstance(each, WorkerFailed))
            return b"".join(slot_writer.RESULT.pack(*each) for each in results)

        self.writing.worker.request = request  # type: ignore[method-assign,assignment]
        return asyncio.run(self.writing.carry_out(bench.repairs, bench.plan() if orders is None else orders))

    def events(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.journal.said if event == name]


@pytest.fixture
def desk(stack: ExitStack) -> Desk:
    return Desk(stack)


@pytest.mark.parametrize("gone", ["region", "owner", "nothing"])
def test_waiting_orders_of_gone_slots_are_dropped(desk: Desk, gone: str) -> None:
    """A descriptor closed meanwhile may already belong to another file."""
    sent: list[int] = []

    async def request(_message: bytes, descriptors: list[int]) -> bytes:
        sent.append(descriptors[0])
        await asyncio.sleep(0)
        return slot_writer.RESULT.pack(*DONE)

    async def carry_out(benches: list[Bench]) -> list[bool]:
        desk.writing.worker.request = request  # type: ignore[method-assign,assignment]
        tasks = [asyncio.create_task(desk.writing.carry_out(each.repairs, each.plan())) for each in benches]
        await asyncio.sleep(0)
        if gone == "region":
            benches[1].repairs.close()
        elif gone == "owner":
            benches[1].end(7)
        return await asyncio.gather(*tasks)

    benches = [desk.region((7, 0)), desk.region((7, 0))]
    descriptors = [bench.repairs.region.fd for bench in benches]
    assert asyncio.run(carry_out(benches)) == [True, gone == "nothing"]
    assert sent == descriptors[: 2 if gone == "nothing" else 1]


async def test_a_hostpid_waits_for_one_batch_of_utilization_at_most(desk: Desk) -> None:
    sent: list[int] = []

    async def request(message: bytes, descriptors: list[int]) -> bytes:
        sent.append(descriptors[0])
        await asyncio.sleep(0)
        return slot_writer.RESULT.pack(*DONE) * int(slot_writer.HEAD.unpack_from(message)[1])

    desk.writing.worker.request = request  # type: ignore[method-assign,assignment]
    values = [desk.region((7, 4711, 1, (500, 0))) for _ in range(3)]
    for bench in values:
        bench.load = {(4711, "GPU-a"): 30}
    urgent = desk.region((7, 0))
    tasks = [
        asyncio.create_task(desk.writing.carry_out(each.repairs, each.plan())) for each in (*values, urgent)
    ]
    assert await asyncio.gather(*tasks) == [True] * 4
    assert sent.index(urgent.repairs.region.fd) == 1


def test_an_order_names_its_owners_descriptor_or_none(desk: Desk) -> None:
    bench = desk.region((7, 0), (8, 4712, 1, (80, 0)))
    bench.end(8)
    message, handles = encode(bench.plan(), bench.layout)
    orders = [
        slot_writer.ORDER.unpack_from(message, slot_writer.HEAD.size + n * slot_writer.ORDER.size)
        for n in (0, 1)
    ]
    assert [order[:2] for order in orders] == [(0, True), (-1, False)]
    assert len(handles) == 1


def test_a_hostpid_that_was_written_is_a_repair(desk: Desk) -> None:
    bench = desk.region((7, 0))
    (order,) = bench.plan()
    assert desk.send(bench, (slot_writer.DONE, order.new))
    state = bench.state(7)
    assert (state.written, state.written_at, state.reason, state.wrong) == (4711, 0, None, False)
    assert desk.counters == {"repairs_missing": 1}
    (line,) = desk.events("repair")
    assert (line["host_pid"], line["before"], line["after"], line["slot"]) == (4711, 0, 4711, 0)
    assert (line["pod_uid"], line["container_name"]) == ("uid", "main")


def test_a_slot_of_a_claim_is_told_with_its_owners_names(desk: Desk) -> None:
    bench = desk.region((7, 0))
    bench.repairs.ownership = bench.repairs.ownership._replace(pod_uid="", container_name="claim")
    bench.state(7).names = ("another", "worker")
    about = of_slot(bench.repairs, bench.state(7))
    assert (about["pod_uid"], about["container_name"], about["host_pid"]) == ("another", "worker", 4711)
    bench.state(7).names = ("", "")
    assert of_slot(bench.repairs, bench.state(7))["container_name"] == "claim"


@pytest.mark.parametrize(("conflicts", "lines"), [(1, 1), (2, 0)])
def test_repair_beside_another_writer_logs_conflicts_only(desk: Desk, conflicts: int, lines: int) -> None:
    bench = desk.region((7, 0))
    bench.state(7).conflicts = conflicts
    assert desk.send(bench, (slot_writer.DONE, 4711 << 32 | 7))
    assert len(desk.events("repair")) == lines


def test_hostpid_changed_by_another_writer_is_unresolved(desk: Desk) -> None:
    bench = desk.region((7, 0))
    assert desk.send(bench, (slot_writer.DONE, 815))
    assert bench.reason(7) is UnresolvedReason.CHANGED
    assert bench.state(7).written == 4711


def test_written_value_counts_as_ours(desk: Desk) -> None:
    bench = desk.region((7, 4711, 1, (500, 0)))
    bench.load = {(4711, "GPU-a"): 30}
    assert desk.send(bench, DONE)
    evidence = bench.state(7).evidence
    assert evidence.words[0].ours
    assert desk.counters == {"utilization_writes": 1}
    bench.see((7, 4711, 1, (501, 0)))
    desk.send(bench, (slot_writer.DIFFERENT, 0))
    assert desk.counters == {"utilization_writes": 1}, "its watcher was quicker"
    assert bench.reason(7) is None


def test_zeroed_values_of_the_dead_are_told_by_slots_and_words(desk: Desk) -> None:
    bench = desk.region(
        (7, 4711, 1, (80, 3)), (8, 4712, 1, (40, 0)), (9, 4713, 1, (20, 0)), (10, 4714, 1, (500, 0))
    )
    for ns_pid in (7, 8, 9):
        bench.end(ns_pid)
    orders = bench.plan()
    answers = [(slot_writer.DIFFERENT, 0) if order.slot == 2 else DONE for order in orders]
    assert desk.send(bench, *answers, orders=orders)
    (line,) = desk.events("dead_slots_zeroed")
    assert (line["slots"], line["words"]) == (2, 3)
    bench = desk.region((7, 0), account="other")
    desk.send(bench, DONE)
    assert len(desk.events("dead_slots_zeroed")) == 1


@pytest.mark.parametrize(
    ("outcome", "counted", "reason"),
    [
        (slot_writer.MOVED, {"writes_undone": 1}, None),
        (slot_writer.OWNER_GONE, {"writes_undone": 1}, UnresolvedReason.GONE),
        (slot_writer.DIFFERENT, {"writes_missed": 1}, UnresolvedReason.CHANGED),
        (slot_writer.WRONG_SIZE, {"writes_missed": 1}, UnresolvedReason.CHANGED),
    ],
)
def test_a_write_that_was_not_made(
    desk: Desk, outcome: int, counted: dict[str, int], reason: UnresolvedReason | None
) -> None:
    bench = desk.region((7, 0))
    assert desk.send(bench, (outcome, 0))
    assert (desk.counters, bench.reason(7)) == (counted, reason)
    assert len(bench.plan()) == 1, "it is tried again at once, and is no conflict"


def test_unwritable_file_is_retried_after_five_seconds(desk: Desk) -> None:
    bench = desk.region((7, 0))
    assert desk.send(bench, (slot_writer.NOT_WRITABLE, 0))
    assert bench.reason(7) is UnresolvedReason.WRITE_FAILED
    bench.now = time.monotonic()
    assert bench.plan() == []
    bench.now += 5.1
    assert len(bench.plan()) == 1
    (line,) = desk.events("write_failed")
    assert line["path"] == bench.repairs.region.path
    desk.send(bench, (slot_writer.DIFFERENT, 0))
    assert desk.events("write_works_again") == []
    desk.send(bench, DONE)
    assert len(desk.events("write_works_again")) == 1


@pytest.mark.parametrize(("path", "key"), [("/a/b/c.cache", "/a/b"), ("0123:/tmp/x.cache", "0123")])
def test_lines_are_limited_by_directory_or_container(path: str, key: str) -> None:
    assert directory_of(path) == key


@pytest.mark.parametrize(
    ("code", "lacks"), [(errno.EMFILE, Shortage.DESCRIPTORS), (errno.EPERM, Shortage.MEMORY)]
)
def test_writer_shortage_blames_no_file_and_is_reported(desk: Desk, code: int, lacks: Shortage) -> None:
    bench = desk.region((7, 0))
    assert desk.send(bench, (slot_writer.NO_MEANS, code))
    assert desk.writing.worker.means.counts == {lacks: 1}
    assert bench.reason(7) is UnresolvedReason.WRITE_FAILED
    desk.writing.worker.means.tell(desk.journal)
    (line,) = desk.events("out_of_means")
    assert os.strerror(code) in line["why"]
    assert not desk.send(bench, KILLED)
    assert desk.counters["writer_failures"] == 1
    assert desk.events("writer_failed") == [], "that is told already"
    assert desk.send(bench, (slot_writer.DIFFERENT, 0), orders=bench.plan()[:1])
    desk.writing.worker.means.tell(desk.journal)
    assert len(desk.events("means_restored")) == 1
    bench.see((7, 0))
    assert not desk.send(bench, KILLED)
    assert desk.events("writer_failed") == [{"level": "warning", "why": str(KILLED)}]


def test_writer_shortage_of_ten_seconds_is_not_ready(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer answers each time, but carries out no order."""
    bench, now, lacking = desk.region((7, 0), (8, 0)), 1000.0, (slot_writer.NO_MEANS, errno.EMFILE)
    monkeypatch.setattr(means, "time", SimpleNamespace(monotonic=lambda: now))
    for _ in range(4):
        assert desk.send(bench, lacking, lacking)
        now += 4.0
    assert desk.writing.worker.means.counts == {Shortage.DESCRIPTORS: 8}
    assert (
        desk.writing.worker.means.lacking() == "for 16 s the slot writer could not work: Too many open files"
    )


def test_third_late_write_in_a_row_blames_the_file(desk: Desk) -> None:
    bench = desk.region((7, 0))
    for answer in (LATE, LATE, DONE, LATE, LATE):
        bench.see((7, 0))
        bench.state(7).written = None
        assert desk.send(bench, answer) is (answer is DONE)
    assert (desk.counters["quarantines"], desk.counters["writer_failures"]) == (0, 4)
    assert [line["container"] for line in desk.events("writer_failed")] == ["uid_main"] * 4
    assert not desk.send(bench, LATE)
    assert (desk.counters["quarantines"], desk.counters["writer_failures"]) == (1, 5)
    (line,) = desk.events("region_quarantined")
    assert (line["seconds"], line["why"]) == (10.0, str(LATE))


def test_killed_or_unstartable_writer_blames_no_file(desk: Desk) -> None:
    bench = desk.region((7, 0))
    for error in (KILLED, WAITING) * 3:
        bench.see((7, 0))
        assert not desk.send(bench, error)
    assert (desk.counters["quarantines"], desk.counters["writer_failures"]) == (0, 3)


def test_log_lines_of_unwritable_file_are_limited(desk: Desk) -> None:
    """A container can make its file unwritable at will: it takes a lease and gives it back."""
    bench = desk.region((7, 4711, 1, (500, 0)))
    bench.load = {(4711, "GPU-a"): 30}
    (order,) = bench.plan()
    for _ in range(50):
        desk.send(bench, (slot_writer.NOT_WRITABLE, 0), orders=[order])
        desk.send(bench, DONE, orders=[order])
    assert 0 < len(desk.events("write_failed")) + len(desk.events("write_works_again")) < 10


def test_a_quarantine_outlives_the_file(desk: Desk) -> None:
    for account in ("one", "two", "three"):
        bench = desk.region((7, 0), account=account)
        assert not desk.send(bench, BUS)
        bench.repairs.record = desk.budgets.of("another")
    del bench
    gc.collect()
    assert all(desk.budgets.of(each).quarantined(time.monotonic()) for each in ("one", "two", "three"))
    assert not desk.budgets.of("another").quarantined(time.monotonic())


async def test_files_that_kill_the_writer_delay_no_others(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("""
import os, signal, socket
def main():
    channel = socket.socket(fileno=os.dup(0))
    channel.recv(1 << 16)
    os.kill(os.getpid(), signal.SIGBUS)
""")
    dying = WorkerProcess("slot writer", "dies", str(tmp_path), timeout=PATIENCE_S)
    desk.writing.worker = dying
    for number in range(8):
        bench = desk.region((7, 0), account=f"hostile-{number}")
        assert not await desk.writing.carry_out(bench.repairs, bench.plan())
        assert bench.repairs.record.quarantined(time.monotonic())
    assert (dying.starts, desk.counters["quarantines"]) == (8, 8)
