"""Plan of repairs: the errors in one region, slot by slot, and the words to write. Does no I/O.

A slot *generation* is one process holding one slot, at any index, because slots move. Its ``hostpid`` is written once,
and again after the process's guess, seconds after HAMi took the slot. Further changes are conflicts and delay the next
attempt.
"""

from collections.abc import Iterator
from typing import NamedTuple

from resolver.base.reasons import RepairReason, UnresolvedReason
from resolver.config import WriteUtilization
from resolver.gpu.attribution import Joined
from resolver.hami.hostpid_policy import HostpidPolicy
from resolver.hami.layout import Layout
from resolver.hami.packed_slots import SlotRecord
from resolver.hami.region import RegionView
from resolver.linux.procfs import ProcessHandle
from resolver.repair.reported_values import ReportedValue, Verdict
from resolver.repair.slots import OwnedSlot, RegionSlots
from resolver.workers import slot_writer


class Order(NamedTuple):
    """A word to change. ``device`` is None for a ``hostpid``, ``state`` for a slot without an owner."""

    state: OwnedSlot | None
    owner: ProcessHandle | None  # at the time of the order
    slot: int
    device: int | None
    reason: RepairReason | None
    guard_offset: int
    guard: int
    target_offset: int
    expected: int
    new: int

    def stands(self) -> bool:
        """Check that the owner's handle is still open: else its descriptor may be another file's."""
        return self.owner is None or self.owner.fd >= 0

    def value(self) -> ReportedValue | None:
        """Return the evidence on an owned slot's utilization."""
        if self.state is None or self.device is None:
            return None
        return self.state.evidence.word(self.device, self.expected)


class Inputs(NamedTuple):
    """Inputs of a plan, apart from the slots.

    The region adds the last two: nothing is written if ``paused``, and no value is held if not ``holds``.
    """

    now: float
    policy: HostpidPolicy
    joined: Joined
    writes: WriteUtilization
    paused: UnresolvedReason | None = None
    holds: bool = True


class SlotPlan(NamedTuple):
    """The slot's state ``after`` the plan, to be kept, and the words to change now.

    ``right``: the hostpid is right, as far as known; ``calm``: all values are, too. ``values``: right values that may
    be held, by device.
    """

    after: OwnedSlot
    orders: list[Order]
    values: list[tuple[int, int]]
    right: bool
    calm: bool


def plan_slot(layout: Layout, view: RegionView, state: OwnedSlot, inputs: Inputs) -> SlotPlan:
    """Plan one owned slot, without changing it."""
    slot, after, orders, values = state.slot, state.twin(), list[Order](), list[tuple[int, int]]()
    wrong = after.weigh(inputs.policy, inputs.now, view.slots.crowded)
    if wrong is not None and inputs.paused is not None:
        after.waits(inputs.paused)
    elif wrong is not None:
        reason, wanted = wrong
        at, before = layout.slot_offset(slot.index), slot_word(slot.pid, slot.hostpid)
        new = slot_word(slot.pid, wanted)
        orders.append(Order(state, state.owner, slot.index, None, reason, at, before, at, before, new))
    if orders or after.reason not in (None, UnresolvedReason.DRIVER_UNKNOWN):
        after.evidence.ends()  # no watcher can be right
        return SlotPlan(after, orders, values, right=False, calm=True)
    now, uuids, joined = inputs.now, view.uuids, inputs.joined
    since, calm, host_pid = after.evidence.begins(now), True, state.owner.process.host_pid
    # Without a decision on the hostpid, its watcher's values are only taken as evidence.
    writes = inputs.writes if inputs.paused is None and after.reason is None else WriteUtilization.NEVER
    holds = inputs.holds and writes is not WriteUtilization.NEVER
    for device, present in enumerate(slot.sm_util):
        actual = joined.utilization(host_pid, uuids[device])
        if actual is None:
            continue
        word, idle = after.evidence.word(device, present), uuids[device] in joined.idle
        verdict = word.judge(present, actual, joined.answered, since, now, idle=idle)
        calm = calm and verdict is Verdict.RIGHT
        if word.disputed and after.reordered(uuids):
            word.is_undisputed()  # the watcher's value is another GPU's
        if not actual and not word.enough_for_zero():
            continue
        if word.contested and not inputs.holds:
            continue  # its tenant changes it faster than watchers do
        if holds:
            values.append((device, actual))
        if verdict is Verdict.WRONG or (writes is WriteUtilization.ALWAYS and present != actual):
            orders.append(value_order(layout, view, slot, device, actual, state))
    calm = calm and not orders and after.evidence.calm(held=holds)
    if writes is WriteUtilization.NEVER:
        orders = []
    return SlotPlan(after, orders, values, right=True, calm=calm)


def leftovers(slots: RegionSlots) -> Iterator[SlotRecord]:
    """Yield ended processes' slots with a load, and copies that moves left: HAMi's monitors up to 2.9 add them up."""
    packed = slots.view.slots
    return (packed[index] for index in packed.loaded() if packed.vacant(index) or slots.dead(index))


def zeroes(layout: Layout, view: RegionView, slot: SlotRecord) -> list[Order]:
    """Return the orders to zero a slot's values."""
    loaded = [device for device, present in enumerate(slot.sm_util) if present]
    return [value_order(layout, view, slot, device, 0) for device in loaded]


def value_order(
    layout: Layout,
    view: RegionView,
    slot: SlotRecord,
    device: int,
    value: int,
    state: OwnedSlot | None = None,
) -> Order:
    """Return the order to write a utilization."""
    offset = layout.sm_util_offset(slot.index, device)
    if offset is None:
        raise AssertionError(f"{layout.name} has no sm_util, and a slot of it cannot have values")
    guard_offset, guard = layout.slot_offset(slot.index), slot_word(slot.pid, slot.hostpid)
    if slot.index >= view.proc_num:
        # A process that takes this slot raises proc_num before it stores a load, so the word of proc_num is the guard.
        guard_offset, guard = layout.proc_num, slot_word(view.proc_num, view.utilization_switch)
    owner, present = state.owner if state is not None else None, slot.sm_util[device]
    return Order(state, owner, slot.index, device, None, guard_offset, guard, offset, present, value)


def slot_word(pid: int, hostpid: int) -> int:
    """Return a slot's 8-byte word: low half ``pid``, high half ``hostpid``."""
    return (pid & 0xFFFFFFFF) | (hostpid & 0xFFFFFFFF) << 32


def encode(
    orders: list[Order], layout: Layout, hold: tuple[int, int] | None = None
) -> tuple[bytes, list[int]]:
    """Return orders in the writer's format, and their handles' descriptors.

    ``hold``: the file's key and the corrections allowed per second, if the words are to be held.
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
