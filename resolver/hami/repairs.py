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
from resolver.hami.stuck import Evidence
from resolver.procfs import ProcessHandle
from resolver.types import RepairReason, UnresolvedReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from resolver.containers import MappedFile, SharedDirectory
    from resolver.hami.policy import Policy
    from resolver.hami.region import RegionView, SharedRegion, Slot

_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.5, 300.0
_FIRST_QUARANTINE, _LONGEST_QUARANTINE = 10.0, 3600.0
#: How often a slot without a process is looked at again, at first each pass, then ever more rarely.
_EAGER_LOOKS, _LONGEST_LOOK = 4, 30.0
#: A dead slot can be taken again without a byte of it changing, and on tmpfs without the file's time changing.
_DEAD_LOOK = 1.0
#: Answers that leave it open whether a process owns the slot: what was dead may have been taken again.
_MAY_LIVE = {UnresolvedReason.AMBIGUOUS, UnresolvedReason.ACCESS_DENIED, UnresolvedReason.TOO_LARGE}


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
        "evidence",
        "looks",
        "next_look",
        "not_before",
        "owner",
        "reason",
        "repaired",
        "slot",
        "stuck",
        "written",
        "written_at",
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
        self.written: int | None = None  # the hostpid of our one write to this generation
        self.written_at: int | None = None  # the slot's index at that time
        self.announced: set[tuple[int | None, int]] = set()  # (device, value) that a dry run has told
        self.conflicts = 0
        self.not_before = 0.0
        self.wrong_since: float | None = None
        self.stuck = ""  # why its sm_util stays 0 though all is right; see `resolver.hami.stuck`
        self.evidence = Evidence()

    def due(self, now: float) -> bool:
        """Whether its owner has to be looked for now."""
        return self.owner is None and now >= self.next_look

    def found(self, result: ProcessHandle | UnresolvedReason, now: float) -> None:
        """Take in the answer of a search for the owner."""
        if isinstance(result, ProcessHandle):
            self.owner, self.reason, self.dead, self.looks = result, None, False, 0
            self.written, self.conflicts, self.not_before = None, 0, 0.0
            self.announced.clear()
            self.evidence = Evidence()
            return
        self.reason = result
        if result in _MAY_LIVE:
            self.dead = False
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

    def __init__(self, region: SharedRegion, place: SharedDirectory | MappedFile) -> None:
        self.region = region
        self.place = place  # by which its processes are told
        self.view: RegionView | None = None
        self.states: dict[int, SlotState] = {}
        self.odd: dict[int, UnresolvedReason] = {}  # slots without a state of their own, by index
        self.writer_deaths = 0  # in a row, with this file
        self.quarantines = 0
        self._paused_until = 0.0
        self._pause_reason = UnresolvedReason.QUARANTINED
        self._crowded: frozenset[int] = frozenset()  # hostpids that several slots hold
        self._twice: set[int] = set()  # pids that several slots hold
        self._mtime_ns = region.mtime_ns
        self._settled: tuple[object, ...] | None = None  # what the last look was made with, if all was right

    def observe(self, view: RegionView) -> list[SlotState]:
        """Take in what the region says now; returns the states of slots that are no longer there."""
        if self.region.mtime_ns != self._mtime_ns:
            # A new process touched the file: it may have taken a dead slot again without changing a byte of it.
            self._mtime_ns = self.region.mtime_ns
            for state in self.states.values():
                if state.dead:
                    state.next_look = 0.0
        if view is self.view:
            return []
        self.view = view
        slots = self._sort(view)
        gone = [self.states.pop(ns_pid) for ns_pid in self.states.keys() - slots.keys() - self._twice]
        for ns_pid, slot in slots.items():
            known = self.states.get(ns_pid)
            if known is None:
                self.states[ns_pid] = SlotState(slot)
            elif known.slot != slot:
                known.changed(slot)
        return gone

    def _sort(self, view: RegionView) -> dict[int, Slot]:
        """The slots in use by their PID; those that have none of their own go to ``odd``."""
        slots: dict[int, Slot] = {}
        odd: dict[int, UnresolvedReason] = {}
        twice: set[int] = set()
        holders: dict[int, int] = {}
        for slot in view.slots:
            if slot.status == 0:
                continue
            holders[slot.hostpid] = holders.get(slot.hostpid, 0) + 1
            if slot.pid <= 0:
                odd[slot.index] = UnresolvedReason.INVALID_PID
            elif slot.pid in twice:
                odd[slot.index] = UnresolvedReason.AMBIGUOUS
            elif slot.pid in slots:
                # The same PID twice: a slot in the middle of a move, or a lie. Neither is to be written.
                twice.add(slot.pid)
                odd[slot.index] = odd[slots.pop(slot.pid).index] = UnresolvedReason.AMBIGUOUS
            else:
                slots[slot.pid] = slot
        self.odd, self._twice = odd, twice
        self._crowded = frozenset(hostpid for hostpid, count in holders.items() if count > 1)
        return slots

    def told_apart(self) -> list[SlotState]:
        """The states of slots that are the only one with their PID; the others are in ``odd``."""
        return [state for ns_pid, state in self.states.items() if ns_pid not in self._twice]

    def settle(self, *inputs: object) -> None:
        """All was looked at with these inputs and nothing is to be done; remember that, if nothing is open."""
        right = all(state.owner is not None and state.reason is None for state in self.states.values())
        self._settled = (self.view, *inputs) if right and not self.odd else None

    def settled(self, *inputs: object) -> bool:
        """Whether neither the region nor these inputs (told apart by identity) changed since `settle`."""
        known = self._settled
        return known is not None and all(a is b for a, b in zip(known, (self.view, *inputs), strict=True))

    def unsettle(self) -> None:
        """Something happened that the region does not show, such as the end of a process."""
        self._settled = None

    def maintained(self) -> bool:
        """Whether the tenants' own watcher keeps ``sm_util``: there is one if device 0 has a core limit."""
        return bool(self.view and self.view.sm_limit and 1 <= self.view.sm_limit[0] <= 100)

    def quarantine(self, now: float) -> float:
        """The writer died on this file: leave it alone, longer each time. Returns for how many seconds."""
        seconds = min(_LONGEST_QUARANTINE, _FIRST_QUARANTINE * 2 ** min(self.quarantines, 20))
        self.quarantines += 1
        self.pause(now, seconds, UnresolvedReason.QUARANTINED)
        return float(seconds)

    def pause(self, now: float, seconds: float, reason: UnresolvedReason) -> None:
        """Write nothing into this file for a while; what would be written is unresolved for that reason."""
        self._paused_until, self._pause_reason = now + seconds, reason

    def quarantined(self, now: float) -> bool:
        """Whether the file is left alone because the writer died or hung on it."""
        return now < self._paused_until and self._pause_reason is UnresolvedReason.QUARANTINED

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
        paused = now < self._paused_until
        if paused:
            writes = WriteUtilization.NEVER
        ours = writes is WriteUtilization.ALWAYS or not self.maintained()
        for state in self.told_apart():
            order = None
            if state.owner is not None:
                order = self._hostpid(state, state.owner.process.host_pid, now, policy, on_conflict)
                if order is not None and paused:
                    state.reason, order = self._pause_reason, None
            if order is not None:
                yield order
            elif writes is not WriteUtilization.NEVER and (
                state.dead if state.owner is None else ours and state.reason is None
            ):
                yield from self._utilization(self.view, state, truth)

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
        if state.written_at not in (None, slot.index):
            # A move copied the slot before we wrote, and left what we wrote behind: not another writer's doing.
            state.written = state.written_at = None
        if state.written is not None and slot.hostpid != state.written:
            # It is not what we wrote: somebody else writes it too.
            wait = min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2 ** min(state.conflicts, 20))
            state.conflicts += 1
            state.written, state.not_before = None, now + wait
            on_conflict(state, wait)
        if now < state.not_before:
            state.reason = UnresolvedReason.CONFLICT
            return None
        offset = self.region.layout.hostpid_word(slot.index)
        expected, new = slot_word(slot.pid, slot.hostpid), slot_word(slot.pid, wanted)
        state.reason = None  # of before: in a dry run nobody else takes it away
        return Order(state, slot.index, None, wrong, offset, expected, offset, expected, new)

    def _utilization(
        self, view: RegionView, state: SlotState, truth: Callable[[int, str], int | None]
    ) -> Iterator[Order]:
        """Zeroes for the dead; for the living what NVML saw."""
        slot, layout = state.slot, self.region.layout
        for device, present in enumerate(slot.sm_util):
            value = truth(state.owner.process.host_pid, view.uuids[device]) if state.owner else 0
            if value is None or value == present:
                continue
            offset = layout.sm_util_offset(slot.index, device)
            if offset is not None:
                guard_offset, guard = layout.hostpid_word(slot.index), slot_word(slot.pid, slot.hostpid)
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
