"""Decides, slot by slot, what is wrong in one region and what to write. Reads and writes nothing itself.

A slot *generation* is one process holding one slot: the region's file, the PID in the slot, and the process
(with its start time) that was found to own it. Its place in the array does not count, slots move. Within a
generation ``hostpid`` is written once; if somebody changes it back that is a conflict, and the next try waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from resolver.config import WriteUtilization
from resolver.hami import writer
from resolver.hami.policy import classify
from resolver.procfs import ProcessHandle
from resolver.types import RepairReason, UnresolvedReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from resolver.containers import SharedDirectory
    from resolver.hami.policy import Policy
    from resolver.hami.region import RegionView, SharedRegion, Slot

_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.5, 300.0
_FIRST_QUARANTINE, _LONGEST_QUARANTINE = 10.0, 3600.0
#: How often a slot without a process is looked at again, at first each pass, then ever more rarely.
_EAGER_LOOKS, _LONGEST_LOOK = 4, 30.0
#: A dead slot can be taken again without a byte of it changing; see `SlotState.due`.
_DEAD_LOOK = 1.0


class Order(NamedTuple):
    """One word to change, and what it is about. ``device`` is None for a ``hostpid``."""

    state: SlotState
    slot: int
    device: int | None
    reason: RepairReason | None
    guard_offset: int
    guard: int
    target_offset: int
    expected: int
    new: int


class SlotState:
    """What is known of one PID's slot in one region."""

    __slots__ = (
        "announced",
        "conflicts",
        "dead",
        "looks",
        "next_look",
        "not_before",
        "owner",
        "reason",
        "repaired",
        "slot",
        "written",
        "wrong_since",
    )

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.owner: ProcessHandle | None = None
        self.reason: UnresolvedReason | None = None
        self.repaired: RepairReason | None = None
        self.dead = False
        self.looks = 0  # in vain, in a row
        self.next_look = 0.0
        self.written = False
        self.announced: set[tuple[int | None, int]] = set()  # (device, value) that a dry run has told
        self.conflicts = 0
        self.not_before = 0.0
        self.wrong_since: float | None = None

    def due(self, now: float) -> bool:
        """Whether its owner has to be looked for now."""
        return self.owner is None and now >= self.next_look

    def found(self, result: ProcessHandle | UnresolvedReason, now: float) -> None:
        """Take in the answer of a search for the owner."""
        if isinstance(result, ProcessHandle):
            self.owner, self.reason, self.dead, self.looks = result, None, False, 0
            self.written, self.conflicts, self.not_before = False, 0, 0.0
            self.announced.clear()
            return
        self.reason = result
        self.looks += 1
        if self.looks > _EAGER_LOOKS:
            wait = min(_LONGEST_LOOK, 0.5 * 2 ** min(self.looks - _EAGER_LOOKS, 10))
            self.next_look = now + (min(wait, _DEAD_LOOK) if self.dead else wait)

    def release(self) -> None:
        """Give the handle of its process back."""
        if self.owner is not None:
            self.owner.close()
        self.owner = None

    def owner_ended(self) -> None:
        """Its process is gone; whether another one took the slot is for the next look to find out."""
        self.release()
        self.dead, self.looks, self.next_look = True, 0, 0.0
        self.reason, self.repaired, self.wrong_since = None, None, None

    def changed(self, slot: Slot) -> None:
        """Its bytes changed: look again soon, whatever the schedule was."""
        if slot.pid != self.slot.pid or slot.hostpid != self.slot.hostpid or slot.status != self.slot.status:
            self.next_look = 0.0
        self.slot = slot


class RegionRepairs:
    """The slots of one region. ``close`` gives the handles back."""

    def __init__(self, region: SharedRegion, directory: SharedDirectory) -> None:
        self.region = region
        self.directory = directory
        self.view: RegionView | None = None
        self.states: dict[int, SlotState] = {}
        self.odd: dict[int, UnresolvedReason] = {}  # slots without a state of their own, by index
        self.writer_deaths = 0  # in a row, with this file
        self.quarantines = 0
        self.quarantined_until = 0.0
        self._crowded: frozenset[int] = frozenset()  # hostpids that several slots hold
        self._twice: set[int] = set()  # pids that several slots hold

    def observe(self, view: RegionView) -> list[SlotState]:
        """Take in what the region says now; returns the states of slots that are no longer there."""
        if view is self.view:
            return []
        self.view = view
        slots: dict[int, Slot] = {}
        odd: dict[int, UnresolvedReason] = {}
        holders: dict[int, int] = {}
        for slot in view.slots:
            if slot.status == 0:
                continue
            holders[slot.hostpid] = holders.get(slot.hostpid, 0) + 1
            if slot.pid <= 0:
                odd[slot.index] = UnresolvedReason.INVALID_PID
            elif slot.pid in slots or slot.pid in odd:
                # The same PID twice: a slot in the middle of a move, or a lie. Neither is to be written.
                odd[slot.index] = UnresolvedReason.AMBIGUOUS
            else:
                slots[slot.pid] = slot
        self._crowded = frozenset(hostpid for hostpid, count in holders.items() if count > 1)
        twice = {view.slots[index].pid for index, why in odd.items() if why is UnresolvedReason.AMBIGUOUS}
        for ns_pid in twice & slots.keys():
            odd[slots.pop(ns_pid).index] = UnresolvedReason.AMBIGUOUS
        self.odd = odd
        gone = [self.states.pop(ns_pid) for ns_pid in self.states.keys() - slots.keys() - twice]
        for ns_pid, slot in slots.items():
            state = self.states.get(ns_pid)
            if state is None:
                self.states[ns_pid] = SlotState(slot)
            elif state.slot != slot:
                state.changed(slot)
        self._twice = twice
        return gone

    def maintained(self) -> bool:
        """Whether the tenants' own watcher keeps ``sm_util``: there is one if device 0 has a core limit."""
        return bool(self.view and self.view.sm_limit and 1 <= self.view.sm_limit[0] <= 100)

    def quarantine(self, now: float) -> float:
        """The writer died on this file: leave it alone, longer each time. Returns for how many seconds."""
        seconds = min(_LONGEST_QUARANTINE, _FIRST_QUARANTINE * 2 ** min(self.quarantines, 20))
        self.quarantines += 1
        self.quarantined_until = now + seconds
        return float(seconds)

    def plan(
        self,
        now: float,
        policy: Policy,
        truth: Callable[[int, str], int | None],
        writes: WriteUtilization,
        on_conflict: Callable[[SlotState, float], None],
    ) -> Iterator[Order]:
        """The words to change now. Marks every state with why nothing is done for it.

        ``truth(host_pid, uuid)`` is the utilization in per cent: 0 is idle, None is not known. ``on_conflict`` is
        told the state and the seconds until the next try.
        """
        if self.view is None:
            return
        quarantined = now < self.quarantined_until
        for state in self.states.values():
            if state.slot.pid in self._twice:
                continue
            order = None
            if state.owner is not None:
                order = self._hostpid(state, state.owner.process.host_pid, now, policy, on_conflict)
                if order is not None and quarantined:
                    state.reason, order = UnresolvedReason.QUARANTINED, None
            if order is not None:
                yield order
            elif not quarantined and writes is not WriteUtilization.NEVER:
                yield from self._utilization(self.view, state, truth, writes)

    def _hostpid(
        self,
        state: SlotState,
        host_pid: int,
        now: float,
        policy: Policy,
        on_conflict: Callable[[SlotState, float], None],
    ) -> Order | None:
        slot = state.slot
        wanted = policy.wanted(host_pid, slot.pid)
        if wanted is None:
            state.reason = UnresolvedReason.DRIVER_UNKNOWN
            return None
        other = slot.pid if wanted == host_pid else host_pid
        wrong = classify(slot.hostpid, wanted, other, shared=slot.hostpid in self._crowded)
        if wrong is None:
            state.reason, state.wrong_since = None, None
            return None
        if state.wrong_since is None:
            state.wrong_since = now
        if state.written:
            # It was right after our write, and now it is not: somebody else writes it too.
            wait = min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2 ** min(state.conflicts, 20))
            state.conflicts += 1
            state.written, state.not_before = False, now + wait
            on_conflict(state, wait)
        if now < state.not_before:
            state.reason = UnresolvedReason.CONFLICT
            return None
        offset = self.region.layout.hostpid_word(slot.index)
        expected, new = slot_word(slot.pid, slot.hostpid), slot_word(slot.pid, wanted)
        return Order(state, slot.index, None, wrong, offset, expected, offset, expected, new)

    def _utilization(
        self,
        view: RegionView,
        state: SlotState,
        truth: Callable[[int, str], int | None],
        writes: WriteUtilization,
    ) -> Iterator[Order]:
        """Zeroes for the dead; for the living what NVML saw, where no watcher does it."""
        slot, layout = state.slot, self.region.layout
        if state.owner is None and not state.dead:
            return
        if state.owner is not None and (
            state.reason is not None or (writes is WriteUtilization.AUTO and self.maintained())
        ):
            return
        guard_offset, guard = layout.hostpid_word(slot.index), slot_word(slot.pid, slot.hostpid)
        for device, present in enumerate(slot.sm_util):
            value = truth(state.owner.process.host_pid, view.uuids[device]) if state.owner else 0
            offset = layout.sm_util_offset(slot.index, device)
            if value is not None and value != present and offset is not None:
                yield Order(state, slot.index, device, None, guard_offset, guard, offset, present, value)

    def close(self) -> None:
        """Give back the region's descriptor and every handle."""
        for state in self.states.values():
            state.release()
        self.states.clear()
        self.region.close()


def slot_word(pid: int, hostpid: int) -> int:
    """The 8-byte word of a slot that holds both, as the writer compares it: ``pid`` is the low half."""
    return (pid & 0xFFFFFFFF) | (hostpid & 0xFFFFFFFF) << 32


def encode(orders: list[Order], file_bytes: int) -> tuple[bytes, list[int]]:
    """Orders as the writer reads them, and the handles' descriptors that go with them."""
    message = bytearray(writer.HEAD.pack(file_bytes, len(orders)))
    handles: list[int] = []
    for order in orders:
        owner = order.state.owner
        handle = -1
        if owner is not None:
            handle = len(handles)
            handles.append(owner.fd)
        message += writer.ORDER.pack(
            handle,
            bool(owner and owner.is_pidfd),
            order.guard_offset,
            order.guard,
            order.target_offset,
            order.expected,
            order.new,
        )
    return bytes(message), handles
