"""Slots of one region by owner, and changes from one view to the next. Does no I/O."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from resolver.base.reasons import UnresolvedReason
from resolver.hami.packed_slots import PackedSlots
from resolver.hami.region import RegionView
from resolver.repair.slot_states import NOT_SEARCHED, OwnedSlot, UnownedSlots

if TYPE_CHECKING:
    from resolver.linux.procfs import ProcessHandle

#: Searches and reads that are due so soon are made at once.
SOON_SECONDS = 0.005
_UNREAD = RegionView(0, (), (), 0, 1, PackedSlots((b"", b"", b"")))


class RegionSlots:
    """Slots of one region: ``owned`` by PID, and all others packed."""

    def __init__(self) -> None:
        self.view = _UNREAD
        self.owned: dict[int, OwnedSlot] = {}
        self.unowned = UnownedSlots(0)
        self.next_look = 0.0  # when the next search is due
        self._twice: set[int] = set()  # PIDs that several slots hold

    def take(self, view: RegionView) -> list[OwnedSlot]:
        """Match a new view's slots by PID, mark ambiguous or invalid ones; return owned slots that vanished."""
        before, self.view = self.view, view
        slots, unowned = view.slots, UnownedSlots(len(view.slots))
        by_pid: dict[int, int] = {}  # index by PID
        twice: set[int] = set()
        for index, ns_pid in slots.in_use():
            if ns_pid <= 0:
                unowned.set_odd(index, UnresolvedReason.INVALID_PID)
            elif ns_pid in twice:
                unowned.set_odd(index, UnresolvedReason.AMBIGUOUS)
            elif ns_pid in by_pid:
                # The same PID twice: a slot in the middle of a move, or a lie. Neither is to be written.
                twice.add(ns_pid)
                unowned.set_odd(index, UnresolvedReason.AMBIGUOUS)
                unowned.set_odd(by_pid.pop(ns_pid), UnresolvedReason.AMBIGUOUS)
            else:
                by_pid[ns_pid] = index
        known = {ns_pid: index for index, ns_pid in before.slots.in_use() if index in self.unowned}
        for ns_pid, index in by_pid.items():
            if ns_pid in self.owned:
                self.owned[ns_pid].observe(slots[index])
            elif ns_pid in known:
                unowned.move(index, self.unowned, known[ns_pid])
            else:
                unowned.begin(index)
                self.next_look = 0.0
            if ns_pid in self._twice:
                self.next_look = 0.0
        gone = [self.owned.pop(ns_pid) for ns_pid in self.owned.keys() - by_pid.keys() - twice]
        self.unowned, self._twice = unowned, twice
        return gone

    def distinguished(self) -> list[OwnedSlot]:
        """Return owned slots with a unique PID."""
        return [state for ns_pid, state in self.owned.items() if ns_pid not in self._twice]

    def search_due(self, now: float) -> bool:
        """Check if any slot is due for a search."""
        return now + SOON_SECONDS >= self.next_look

    def due(self, now: float) -> array[int]:
        """Return indexes of slots due for a search, last first."""
        if not self.search_due(now):
            return array("h")
        due = self.unowned.due(now + SOON_SECONDS)
        due.extend(state.slot.index for state in self.distinguished() if state.doubted)
        due.reverse()
        return due

    def rest(self) -> None:
        """Schedule the next search."""
        doubted = any(state.doubted for state in self.distinguished())
        self.next_look = 0.0 if doubted else self.unowned.next_look()

    def at(self, index: int) -> tuple[int, int, OwnedSlot | None]:
        """Return the PID and hostpid of the slot at this index, and its state if it has an owner."""
        slot = self.view.slots[index]
        return slot.pid, slot.hostpid, None if index in self.unowned else self.owned[slot.pid]

    def keeps_owner(self, state: OwnedSlot, found: ProcessHandle | UnresolvedReason) -> bool:
        """Check if the owner stays after a search, which settles a doubt; else forget it."""
        if not isinstance(found, UnresolvedReason):
            if state.settles(found):
                return True
        elif found in NOT_SEARCHED:
            return True
        if state.doubted:
            del self.owned[state.slot.pid]
            self.unowned.begin(state.slot.index)
        return not state.doubted

    def own(self, index: int, owner: ProcessHandle) -> OwnedSlot:
        """Note the owner of an unowned slot."""
        slot = self.view.slots[index]
        self.unowned.remove(index)
        state = self.owned[slot.pid] = OwnedSlot(slot, owner)
        return state

    def ended(self, state: OwnedSlot) -> bool:
        """Note an owner's end; False if its slot has gone."""
        ns_pid, index = state.slot.pid, state.slot.index
        if self.owned.get(ns_pid) is not state:
            return False
        del self.owned[ns_pid]
        if ns_pid not in self._twice:
            self.unowned.ended(index, followed=state.followed)
        self.next_look = 0.0
        return True

    def touched(self, *, attached: bool) -> None:
        """Note a write to the file; ``attached``: by a process that attaches, as each does."""
        for state in self.owned.values():
            state.followed = state.followed or attached
        self.unowned.touched()
        self.next_look = 0.0

    def put_off(self, now: float, why: UnresolvedReason = UnresolvedReason.OVER_BUDGET) -> bool:
        """Delay due work at the container's expense; True if any reason changed."""
        changed = {state.put_off(why) for state in self.distinguished()}
        return self.unowned.put_off(now, why) or True in changed
