"""Plan of repairs: the errors in one region, slot by slot, and the words to write. Does no I/O.

A slot *generation* is one process holding one slot, at any index, because slots move. Its ``hostpid`` is written once,
and again after the process's guess, seconds after HAMi took the slot. Further changes are conflicts and delay the next
attempt.
"""

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from resolver.base.reasons import RepairReason, UnresolvedReason
from resolver.config import WriteUtilization
from resolver.gpu.attribution import Joined
from resolver.hami.hostpid_policy import HostpidPolicy
from resolver.hami.layout import Layout
from resolver.hami.packed_slots import SlotRecord
from resolver.linux.procfs import ProcessHandle
from resolver.repair.reported_values import ReportedValue, Verdict
from resolver.repair.slots import OwnedSlot, RegionSlots
from resolver.workers import slot_writer

#: Seconds between two writes of zeroes to ended processes' slots: other watchers refill them at each tick.
_ZERO_AGAIN_SECONDS = 0.4


class Order(NamedTuple):
    """A word to change. ``device`` is None for a ``hostpid``, ``state`` for a slot without an owner."""

    state: OwnedSlot | None
    owner: ProcessHandle | None  # when it was given
    slot: int
    device: int | None
    reason: RepairReason | None
    guard_offset: int
    guard: int
    target_offset: int
    expected: int
    new: int

    def stands(self) -> bool:
        """Check that the owner was not let go of since then: its descriptor would be another file's."""
        return self.owner is None or self.owner.fd >= 0


class Inputs(NamedTuple):
    """All that a plan depends on but the slots.

    The region adds the last three: nothing is written if ``paused``, no value is held if not ``holds``, and dead slots'
    values were last zeroed at ``zeroed_at``.
    """

    now: float
    policy: HostpidPolicy
    joined: Joined
    writes: WriteUtilization
    paused: UnresolvedReason | None = None
    holds: bool = True
    zeroed_at: float = -inf


class RegionPlan:
    """One plan. ``settled``: each known owner's hostpid is right; ``calm``: so are all values, as far as known.

    ``held``: words that a watcher sets wrong whenever it ticks, with their right values. ``conflicts`` are with the
    seconds until the next attempt.
    """

    def __init__(self, layout: Layout, slots: RegionSlots, inputs: Inputs) -> None:
        self._layout, self._slots, self._view, self._in = layout, slots, slots.view, inputs
        self.settled = self.calm = True
        self.zeroed_at = inputs.zeroed_at
        self.right, self.held = list[OwnedSlot](), list[Order]()
        self._values = list[
            tuple[ReportedValue, OwnedSlot, int, int, int]
        ]()  # with devices, present and right ones
        self.conflicts: list[tuple[OwnedSlot, float]] = []

    def orders(self) -> Iterator[Order | None]:
        """Yield the words to change now, every ``hostpid`` first, and set each state's reason for not writing.

        None is a chance to yield to other work.
        """
        writes = self._in.writes if self._in.paused is None else WriteUtilization.NEVER
        for state in self._slots.distinguished():
            yield None
            order = self._hostpid(state)
            if order is None and state.reason in (None, UnresolvedReason.DRIVER_UNKNOWN):
                self.right.append(state)  # then only its watcher's values are taken as evidence
                continue
            self.settled = False
            state.evidence.ends()  # no watcher can be right
            if order is not None:
                yield order
        for state in self.right:
            yield None
            decided = state.reason is None  # by the policy: else the driver is unknown
            orders, calm = self._judge(state, writes if decided else WriteUtilization.NEVER)
            orders = orders if decided else []
            self.calm = self.calm and calm and not orders
            yield from orders if writes is not WriteUtilization.NEVER else ()
        self._hold()
        yield from self._zeroes() if writes is not WriteUtilization.NEVER else ()

    def _zeroes(self) -> Iterator[Order | None]:
        """Yield orders to zero slots of ended processes and copies left by moves; later if others were just zeroed.

        HAMi's monitors up to 2.9 add them up.
        """
        slots, now = self._view.slots, self._in.now
        wait = self.zeroed_at < now < self.zeroed_at + _ZERO_AGAIN_SECONDS
        for index in slots.loaded():
            if not slots.vacant(index) and not self._slots.unowned.dead(index):
                continue
            self.calm = False  # they are checked again until they are 0
            yield None
            if not wait:
                self.zeroed_at, slot = now, slots[index]
                used = [(device, present) for device, present in enumerate(slot.sm_util) if present]
                yield from [self._value(slot, None, device, present, 0) for device, present in used]

    def _hostpid(self, state: OwnedSlot) -> Order | None:
        slot, now = state.slot, self._in.now
        wrong = state.wrong(self._in.policy, now, self._view.slots.crowded, self.conflicts)
        if wrong is not None and self._in.paused is not None:
            state.waits(self._in.paused)
            return None
        if wrong is None:
            return None
        reason, wanted = wrong
        at, word = self._layout.slot_offset(slot.index), slot_word(slot.pid, slot.hostpid)
        new = slot_word(slot.pid, wanted)
        return Order(state, state.owner, slot.index, None, reason, at, word, at, word, new)

    def _judge(self, state: OwnedSlot, writes: WriteUtilization) -> tuple[list[Order], bool]:
        """Return orders that copy NVML's values to an owned slot, and True if all are right and uncontested.

        Values that watchers update are not ordered.
        """
        orders: list[Order] = []
        now, uuids, joined = self._in.now, self._view.uuids, self._in.joined
        calm, host_pid, evidence = True, state.owner.process.host_pid, state.evidence
        since = evidence.begins(now)
        held = writes is not WriteUtilization.NEVER and self._in.holds
        for device, present in enumerate(state.slot.sm_util):
            actual = joined.utilization(host_pid, uuids[device])
            if actual is None:
                continue
            word, idle = evidence.word(device, present), uuids[device] in joined.idle
            verdict = word.judge(present, actual, joined.answered, since, now, idle=idle)
            calm = calm and verdict is Verdict.RIGHT
            if word.disputed and state.reordered(uuids):
                word.is_undisputed()  # the watcher's value is another GPU's
            if not actual and not word.enough_for_zero():
                continue
            if word.contested and not self._in.holds:
                continue  # its tenant changes it faster than watchers do
            if held:
                self._values.append((word, state, device, present, actual))
            if verdict is Verdict.WRONG or (writes is WriteUtilization.ALWAYS and present != actual):
                orders.append(self._value(state.slot, state, device, present, actual))
        return orders, calm and evidence.calm(held=held)

    def _hold(self) -> None:
        """Hold contested values; where two watchers may add at once, any."""
        add = len(self.right) > 1 and any(word.contested and word.added() for word, *_ in self._values)
        for word, state, device, present, value in self._values:
            word.may_double = add
            if word.contested or add:
                self.held.append(self._value(state.slot, state, device, present, value))

    def _value(
        self, slot: SlotRecord, state: OwnedSlot | None, device: int, present: int, value: int
    ) -> Order:
        layout, view = self._layout, self._view
        offset = layout.sm_util_offset(slot.index, device)
        if offset is None:
            raise AssertionError(f"{layout.name} has no sm_util, and a slot of it cannot have values")
        guard_offset, guard = layout.slot_offset(slot.index), slot_word(slot.pid, slot.hostpid)
        if slot.index >= view.proc_num:
            # A process that takes this slot counts it in before it says any load there: both are one aligned word.
            guard_offset, guard = layout.proc_num, slot_word(view.proc_num, view.utilization_switch)
        owner = state.owner if state is not None else None
        return Order(state, owner, slot.index, device, None, guard_offset, guard, offset, present, value)


def slot_word(pid: int, hostpid: int) -> int:
    """Return a slot's 8-byte word: low half ``pid``, high half ``hostpid``."""
    return (pid & 0xFFFFFFFF) | (hostpid & 0xFFFFFFFF) << 32


def encode(
    orders: list[Order], layout: Layout, hold: tuple[int, int] | None = None
) -> tuple[bytes, list[int]]:
    """Return orders in the writer's format, and their handles' descriptors.

    ``hold``: the file's key and the corrections allowed in a second; then the words are held.
    """
    message = bytearray(
        slot_writer.HEAD.pack(layout.file_bytes, len(orders) | (slot_writer.HOLDS if hold else 0))
    )
    message += slot_writer.HOLD.pack(*hold) if hold else b""
    handles: list[int] = []
    for order in orders:
        owner, handle = order.owner, -1
        if owner is not None:
            if owner.fd not in handles:
                handles.append(owner.fd)
            handle = handles.index(owner.fd)
        message += slot_writer.ORDER.pack(
            handle,
            bool(owner and owner.is_pidfd),
            order.guard_offset,
            order.guard,
            order.target_offset,
            order.expected,
            order.new,
        )
    message += slot_writer.SLOTS.pack(layout.procs, layout.slot_size, layout.owner_pid, layout.proc_num)
    return bytes(message), handles
