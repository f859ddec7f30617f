"""Orders carried out by the slot slot_writer, one batch at a time, and what became of them."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from resolver.errors import WorkerFailed
from resolver.reasons import UnresolvedReason
from resolver.repair.plan import encode
from resolver.repair.quarantine import Blame
from resolver.workers import slot_writer
from resolver.workers.supervisor import Worker

if TYPE_CHECKING:
    from resolver.log import Journal
    from resolver.repair.plan import Order, RegionRepairs, SlotState

_WRITER_SECONDS = 1.0
_UNWRITABLE_SECONDS = 5.0
_TELL_SECONDS = 1.0
#: What an order costs in the slot_writer, in seconds of CPU: it maps a page and looks at the process.
ORDER_SECONDS = 30e-6


class Writing:
    """The slot writer as the pass sees it. ``blames`` are what files did to it, by container."""

    def __init__(self, counters: Counter[str], journal: Journal) -> None:
        self.worker = Worker(
            # A tenant's umask may have taken the right to write from others, and root is one of them without this.
            "slot writer",
            "resolver.workers.slot_writer",
            timeout=_WRITER_SECONDS,
            rights=frozenset({"DAC_OVERRIDE"}),
        )
        #: By path, since it was last told: the container, and how many words of which slots.
        self._zeroed: dict[str, tuple[str, Counter[int]]] = {}
        self._next_telling = 0.0
        self._blames = WeakValueDictionary[str, Blame]()
        self._remembered: dict[str, Blame] = {}  # those that matter without a file, too
        self._counters = counters
        self._journal = journal

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
                self._zeroed.setdefault(region.path, (repairs.whose.container, Counter()))[1][order.slot] += 1
        return True

    def tell_zeroed(self) -> None:
        """Say, once a second, of how many dead slots of each file the load was taken away."""
        now = time.monotonic()
        if self._zeroed and now >= self._next_telling:
            self._next_telling = now + _TELL_SECONDS
            for path, (container, words) in self._zeroed.items():
                self._journal.tell(
                    "dead_slots_zeroed",
                    container=container,
                    path=path,
                    slots=len(words),
                    words=words.total(),
                )
            self._zeroed.clear()

    def _failed(self, repairs: RegionRepairs, error: WorkerFailed) -> None:
        """Leave the files alone for a while if they are to blame; else the next writer tries again."""
        if error.waiting:
            return
        self._counters["writer_failures"] += 1
        container, why = repairs.whose.container, str(error)
        now = time.monotonic()
        seconds = repairs.blame.died(now, guilty=error.own_fault)
        kept = {name: each for name, each in self._remembered.items() if not each.forgotten(now)}
        self._remembered = {**kept, repairs.whose.account: repairs.blame}
        if seconds:
            self._counters["quarantines"] += 1
            self._journal.tell(
                "region_quarantined", level="warning", container=container, why=why, seconds=seconds
            )
        else:
            self._journal.tell("writer_failed", level="warning", container=container, why=why)

    def _written(self, repairs: RegionRepairs, order: Order, outcome: int, word: int) -> None:
        state = order.state
        self._writable(repairs, outcome)
        if outcome == slot_writer.DONE and order.device is None:
            # Written, and that once, even if another writer changed it back before it was read back.
            self._repaired(repairs, order)
            if word != order.new:
                state.reason = UnresolvedReason.CHANGED
        elif outcome == slot_writer.DONE and order.device is not None:
            self._counters["utilization_writes"] += 1
            if state.evidence is not None:  # of the dead nothing has to be known but the slot itself
                state.evidence.word(order.device, order.new).wrote(order.new)
        elif outcome == slot_writer.OWNER_GONE:
            self._counters["writes_undone"] += 1
            state.reason = UnresolvedReason.GONE
        elif outcome == slot_writer.MOVED:
            self._counters["writes_undone"] += 1
        elif outcome == slot_writer.NOT_WRITABLE:
            state.reason = UnresolvedReason.WRITE_FAILED
            repairs.unwritable(time.monotonic(), _UNWRITABLE_SECONDS)
        elif order.device is None:
            self._counters["writes_missed"] += 1
            state.reason = UnresolvedReason.CHANGED

    def _writable(self, repairs: RegionRepairs, outcome: int) -> None:
        """Say once that a file cannot be written, and once that it can again; other outcomes tell neither."""
        if outcome not in (slot_writer.DONE, slot_writer.NOT_WRITABLE):
            return
        path, why = repairs.region.path, ""
        if outcome == slot_writer.NOT_WRITABLE:
            why = "it cannot be opened for writing; mount the containers directory read-write"
        self._journal.trouble(f"write {path}", why, "write_failed", "write_works_again", path=path)

    def _repaired(self, repairs: RegionRepairs, order: Order) -> None:
        state = order.state
        self._counters[f"repairs_{order.reason}"] += 1
        state.written, state.repaired, state.reason = order.new >> 32, order.reason, None
        state.written_at = order.slot
        state.wrong_since = None
        self._journal.tell("repair", **_about(repairs, order))

    def would_write(self, repairs: RegionRepairs, order: Order) -> None:
        """Say once per generation and value what a dry run would write."""
        state = order.state
        if (order.device, order.new) in state.announced:
            return
        state.announced |= {(order.device, order.new)}
        if order.device is None:
            self._counters[f"would_repair_{order.reason}"] += 1
            self._journal.tell("would_repair", **_about(repairs, order))
        else:
            self._journal.tell(
                "would_write_utilization",
                container=repairs.whose.container,
                slot=order.slot,
                ns_pid=state.slot.pid,
                device=order.device,
                before=order.expected,
                after=order.new,
            )


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
