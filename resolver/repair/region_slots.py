"""Slots of one region: owners, searches, and changes since the last plan. Does no I/O."""

from __future__ import annotations

from array import array
from math import inf
from typing import TYPE_CHECKING

from resolver.base.reasons import UnresolvedReason
from resolver.repair.slot_states import SlotState, UnownedSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from resolver.hami.discovery import Location, Ownership
    from resolver.hami.region import RegionView, SharedRegion


class RegionSlots:
    """Slots of one region, as `SlotState` or packed."""

    def __init__(self, region: SharedRegion, ownership: Ownership, location: Location) -> None:
        self.region = region
        self.ownership = ownership
        self.proof, self.shown = location
        self.view: RegionView | None = None
        self.states: dict[int, SlotState] = {}  # by PID
        self.unowned = UnownedSlots(0)
        self._twice: set[int] = set()  # PIDs that several slots hold
        self._changes = 0  # of everything that a plan depends on
        self._settled = -1  # `_changes` at the last plan after which nothing was left to do
        self._next_look = 0.0
        self._mtime_ns = region.mtime_ns
        self.attached = False  # since the last look: it may have taken a dead slot without changing a byte
        self.unread = False  # a lane has to read it
        self.seen_at = 0.0  # by our clock, at the last look

    @property
    def closed(self) -> bool:
        """True once it is given up, which may be while something is awaited."""
        return self.region.fd < 0

    def observe(self, view: RegionView, *, watched: bool = False) -> list[SlotState]:
        """Update the slots from a view; return states of vanished slots.

        ``watched``: the kernel reports attaching processes. Only they can hide a move; stores change the file's time,
        too.
        """
        gone: list[SlotState] = []
        if self.attached or self.region.mtime_ns != self._mtime_ns:
            attached, self.attached = self.attached, False
            self._mtime_ns = self.region.mtime_ns
            self._change(self.states.values(), lambda state: state.touched(attached=attached))
            self._next_look = 0.0
            if attached or not watched:
                self.region.read_all()  # the next time: a move may have been missed
        if view is not self.view:
            before, self.view = self.view, view
            gone = self._sort(view, before)
            self.unsettle()
        return gone

    def _sort(self, view: RegionView, before: RegionView | None) -> list[SlotState]:
        """Match slots to states by PID, mark ambiguous or invalid ones; return vanished states."""
        slots, unowned = view.slots, UnownedSlots(len(view.slots))
        found: dict[int, int] = {}  # index by PID
        twice: set[int] = set()
        for index, ns_pid in slots.in_use():
            if ns_pid <= 0:
                unowned.set_odd(index, UnresolvedReason.INVALID_PID)
            elif ns_pid in twice:
                unowned.set_odd(index, UnresolvedReason.AMBIGUOUS)
            elif ns_pid in found:
                # The same PID twice: a slot in the middle of a move, or a lie. Neither is to be written.
                twice.add(ns_pid)
                unowned.set_odd(index, UnresolvedReason.AMBIGUOUS)
                unowned.set_odd(found.pop(ns_pid), UnresolvedReason.AMBIGUOUS)
            else:
                found[ns_pid] = index
        were = before.slots.in_use() if before is not None else ()
        known = {ns_pid: index for index, ns_pid in were if index in self.unowned}
        for ns_pid, index in found.items():
            if ns_pid in self.states:
                self.states[ns_pid].observe(slots[index])
            elif ns_pid in known:
                unowned.move(index, self.unowned, known[ns_pid])
            else:
                unowned.begin(index)
                self._next_look = 0.0
            if ns_pid in self._twice:
                self._next_look = 0.0
        gone = [self.states.pop(ns_pid) for ns_pid in self.states.keys() - found.keys() - twice]
        self.unowned, self._twice = unowned, twice
        return gone

    def values_changed(self, host_pids: Container[int] | None) -> bool:
        """Note new NVML values (None: of all processes); True if a slot here is affected."""
        owners = (state.owner for state in self.states.values() if state.owner is not None)
        known = any(host_pids is None or owner.process.host_pid in host_pids for owner in owners)
        if known:
            self.unsettle()
        return known

    def ended(self, state: SlotState) -> bool:
        """Note an owner's end; False if its slot is in another region."""
        if self.states.get(state.slot.pid) is not state:
            return False
        self._next_look = 0.0
        return True

    def abandon(self) -> None:
        """Mark the unowned slots as dead: no process has the file open."""
        self._change(self.distinguished(), SlotState.abandon)
        self.unsettle()

    def unsettle(self) -> None:
        """Check every slot again."""
        self._changes += 1
        if any(state.doubted for state in self.states.values()):
            self._next_look = 0.0

    def distinguished(self) -> list[SlotState]:
        """Return states of slots with a unique PID."""
        return [state for ns_pid, state in self.states.items() if ns_pid not in self._twice]

    def unclear(self) -> bool:
        """Check if any slot is neither owned nor certainly dead."""
        return self.unowned.unclear() or any(
            state.owner is None and not state.dead for state in self.distinguished()
        )

    def due(self, now: float) -> array[int]:
        """Return indexes of slots due for a search, last first."""
        if now < self._next_look:
            return array("h")
        due = self.unowned.due(now)
        due.extend(state.slot.index for state in self.distinguished() if state.due(now))
        due.reverse()
        return due

    def at(self, index: int) -> SlotState:
        """Return a due slot's state; see `put_back`."""
        slots = self.view.slots if self.view is not None else ()
        slot = slots[index]
        if index in self.unowned:
            self.states[slot.pid] = self.unowned.take(slot)
        return self.states[slot.pid]

    def put_back(self, state: SlotState) -> None:
        """Pack an unowned slot's state."""
        ns_pid = state.slot.pid
        if state.owner is None and ns_pid not in self._twice:
            del self.states[ns_pid]
            self.unowned.put(state)

    def rest(self) -> None:
        """End this pass's work; schedule the next search."""
        for state in list(self.states.values()):
            self.put_back(state)
        looks = (state.next_look for state in self.distinguished() if state.owner is None or state.doubted)
        self._next_look = min(min(looks, default=inf), self.unowned.next_look())

    def put_off(self, now: float, why: UnresolvedReason = UnresolvedReason.OVER_BUDGET) -> bool:
        """Delay due work at the container's expense; True if any reason changed."""
        changed = {state.put_off(now, why) for state in self.distinguished()}
        return self.unowned.put_off(now, why) or True in changed

    def _change(self, states: Iterable[SlotState], change: Callable[[SlotState], None]) -> None:
        """Change these states and those of all unowned slots."""
        for state in states:
            change(state)
        if self.view is not None:
            self.unowned.apply(self.view.slots, change)

    def close(self) -> None:
        """Release descriptor and handles."""
        for state in self.states.values():
            state.release()
        self.states.clear()
        self.region.close()
