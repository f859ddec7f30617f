"""Orders carried out by the slot slot_writer, one batch at a time, and what became of them."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from resolver.counters import CounterByReason, CounterName
from resolver.errors import WorkerFailed
from resolver.reasons import UnresolvedReason
from resolver.repair.plan import encode
from resolver.repair.quarantine import Blame
from resolver.retry import longer
from resolver.workers import slot_writer
from resolver.workers.supervisor import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from resolver.log.journal import Journal
    from resolver.reasons import RepairReason
    from resolver.repair.plan import Order, RegionRepairs
    from resolver.repair.slot_states import SlotState

_WRITER_SECONDS = 1.0
_UNWRITABLE_SECONDS = 5.0
_LOG_PAUSE, _LONGEST_LOG_PAUSE = 1.0, 60.0
#: What an order costs in the slot_writer, in seconds of CPU: it maps a page and reads the process.
ORDER_SECONDS = 30e-6


class Zeroed:
    """Of how many dead slots the load was taken away. ``slots`` is a bit for each, by path, ``words`` a count."""

    def __init__(self) -> None:
        self.slots: dict[str, int] = {}
        self.words = 0

    def add(self, path: str, slot: int) -> None:
        """One word more."""
        self.slots[path] = self.slots.get(path, 0) | 1 << slot
        self.words += 1


class Writing:
    """The slot writer as the pass sees it. ``blames`` are what files did to it, by container."""

    def __init__(self, counters: Counter[str], journal: Journal) -> None:
        self.worker = WorkerProcess(
            # A tenant's umask may have taken the right to write from others, and root is one of them without this.
            "slot writer",
            "resolver.workers.slot_writer",
            timeout=_WRITER_SECONDS,
            rights=frozenset({"DAC_OVERRIDE"}),
        )
        self._zeroed: dict[str, Zeroed] = {}  # by container, since it was last logged
        self._next_logs: dict[
            str, tuple[float, float]
        ] = {}  # when that may be logged next, and the pause before
        self._blames = WeakValueDictionary[str, Blame]()
        self._remembered: dict[str, Blame] = {}  # those that matter without a file, too
        self._counters = counters
        self._journal = journal
        #: Called with each `hostpid` that a dry run would write, if somebody wants to know them all.
        self.on_would_repair: Callable[[RegionRepairs, Order], None] | None = None

    def blame(self, container: str) -> Blame:
        """That of all files of a container; it stays while they come and go."""
        return self._blames.setdefault(container, Blame())

    async def carry_out(self, repairs: RegionRepairs, orders: list[Order]) -> bool:
        """At most `slot_writer.MAX_ORDERS` orders of one region; whether the writer answered."""
        region = repairs.region
        message, handles = encode(orders, region.layout.file_bytes)
        try:
            answer = await self.worker.request(message, [region.fd, *handles])
            if len(answer) != slot_writer.RESULT.size * len(orders):
                raise self.worker.malformed("answered something malformed")
        except WorkerFailed as error:
            self._failed(repairs, error)
            return False
        repairs.blame.answered()
        for order, (outcome, word) in zip(orders, slot_writer.RESULT.iter_unpack(answer), strict=True):
            self._written(repairs, order, outcome, word)
            if outcome == slot_writer.DONE and order.device is not None and order.state.dead:
                self._zeroed.setdefault(repairs.whose.container, Zeroed()).add(region.path, order.slot)
        return True

    def log_zeroed(self) -> None:
        """Say of how many dead slots of each container the load was taken away: ever more rarely while it goes on."""
        now = time.monotonic()
        for container in [each for each in self._zeroed if now >= self._next_logs.get(each, (0.0, 0.0))[0]]:
            pause = longer(self._next_logs.get(container, (0.0, 0.0))[1], _LOG_PAUSE, _LONGEST_LOG_PAUSE)
            self._next_logs[container] = now + pause, pause
            zeroed = self._zeroed.pop(container)
            self._journal.record(
                "dead_slots_zeroed",
                container=container,
                files=len(zeroed.slots),
                slots=sum(each.bit_count() for each in zeroed.slots.values()),
                words=zeroed.words,
            )
        for container in [each for each, (at, pause) in self._next_logs.items() if now >= at + pause]:
            del self._next_logs[container]

    def _failed(self, repairs: RegionRepairs, error: WorkerFailed) -> None:
        """Leave the files alone for a while if they are to blame; else the next writer tries again."""
        if error.waiting:
            return
        self._counters[CounterName.WRITER_FAILURES] += 1
        container, why = repairs.whose.container, str(error)
        now = time.monotonic()
        seconds = repairs.blame.died(now, guilty=error.own_fault)
        kept = {name: each for name, each in self._remembered.items() if not each.forgotten(now)}
        self._remembered = {**kept, repairs.whose.account: repairs.blame}
        if seconds:
            self._counters[CounterName.QUARANTINES] += 1
            self._journal.record(
                "region_quarantined", level="warning", container=container, why=why, seconds=seconds
            )
        else:
            self._journal.record("writer_failed", level="warning", container=container, why=why)

    def _written(self, repairs: RegionRepairs, order: Order, outcome: int, word: int) -> None:
        state = order.state
        self._writable(repairs, outcome)
        if outcome == slot_writer.DONE and order.reason is not None:
            # Written, and that once, even if another writer changed it back before it was read back.
            self._repaired(repairs, order, order.reason)
            if word != order.new:
                state.reason = UnresolvedReason.CHANGED
        elif outcome == slot_writer.DONE and order.device is not None:
            self._counters[CounterName.UTILIZATION_WRITES] += 1
            if state.evidence is not None:  # of the dead nothing has to be known but the slot itself
                state.evidence.word(order.device, order.new).wrote(order.new)
        elif outcome == slot_writer.OWNER_GONE:
            self._counters[CounterName.WRITES_UNDONE] += 1
            state.reason = UnresolvedReason.GONE
        elif outcome == slot_writer.MOVED:
            self._counters[CounterName.WRITES_UNDONE] += 1
        elif outcome == slot_writer.NOT_WRITABLE:
            state.reason = UnresolvedReason.WRITE_FAILED
            repairs.unwritable(time.monotonic(), _UNWRITABLE_SECONDS)
        elif order.device is None:
            self._counters[CounterName.WRITES_MISSED] += 1
            state.reason = UnresolvedReason.CHANGED

    def _writable(self, repairs: RegionRepairs, outcome: int) -> None:
        """Say once that a file cannot be written, and once that it can again; other outcomes say neither."""
        if outcome not in (slot_writer.DONE, slot_writer.NOT_WRITABLE):
            return
        path, why = repairs.region.path, ""
        if outcome == slot_writer.NOT_WRITABLE:
            why = "it cannot be opened for writing; mount the containers directory read-write"
        self._journal.trouble(
            _trouble(path), why, "write_failed", "write_works_again", about=directory_of(path), path=path
        )

    def forget(self, path: str) -> None:
        """The file is gone."""
        self._journal.forget(_trouble(path))

    def _repaired(self, repairs: RegionRepairs, order: Order, reason: RepairReason) -> None:
        state = order.state
        self._counters[CounterByReason.REPAIRS.of(reason)] += 1
        state.written, state.repaired, state.reason = order.new >> 32, reason, None
        state.written_at = order.slot
        state.wrong_since = None
        if state.conflicts < 2:  # else another writer is met again and again, and each time has its line
            self._journal.record("repair", **_about(repairs, order))

    def would_write(self, repairs: RegionRepairs, order: Order) -> None:
        """Say once per generation and value what a dry run would write."""
        state = order.state
        if (order.device, order.new) in state.announced:
            return
        state.announced |= {(order.device, order.new)}
        if order.reason is not None:
            self._counters[CounterByReason.WOULD_REPAIR.of(order.reason)] += 1
            self._journal.record("would_repair", **_about(repairs, order))
            if self.on_would_repair is not None:
                self.on_would_repair(repairs, order)
        else:
            self._journal.record(
                "would_write_utilization",
                container=repairs.whose.container,
                slot=order.slot,
                ns_pid=state.slot.pid,
                device=order.device,
                before=order.expected,
                after=order.new,
            )


def directory_of(path: str) -> str:
    """What lines about a region's file are counted against; of a mapped one that is its container, by id."""
    return os.path.dirname(path) if path.startswith("/") else path.partition(":")[0]


def _trouble(path: str) -> str:
    return f"write {path}"


def _about(repairs: RegionRepairs, order: Order) -> dict[str, Any]:
    """The fields of a log line about a ``hostpid``."""
    return {
        **of_slot(repairs, order.state),
        "slot": order.slot,
        "reason": order.reason,
        "before": order.state.slot.hostpid,
        "after": order.new >> 32,
    }


def of_slot(repairs: RegionRepairs, state: SlotState) -> dict[str, Any]:
    """Which slot it is, and whose: the fields of an event about it."""
    whose, owner = repairs.whose, state.owner
    return {
        "container": whose.container,
        "pod_uid": whose.pod_uid,
        "container_name": whose.container_name,
        "slot": state.slot.index,
        "ns_pid": state.slot.pid,
        "host_pid": owner.process.host_pid if owner else None,
    }
