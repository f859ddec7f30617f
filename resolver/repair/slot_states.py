"""State of slots: an object for each owned slot, a few bytes for any other.

A tenant fills 1,024 slots of a file at no cost.
"""

from __future__ import annotations

from array import array
from math import inf
from typing import TYPE_CHECKING

from resolver.base.reasons import UnresolvedReason
from resolver.base.retry import doubled
from resolver.linux.procfs import ProcessHandle
from resolver.repair.reported_values import Evidence
from resolver.state import UnownedCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from resolver.base.reasons import RepairReason
    from resolver.hami.packed_slots import PackedSlots, SlotRecord

#: How often a slot without a process is checked again, at first each pass, then ever more rarely. A dead one can be
#: taken again without a byte or the file's time changing; only lost events are found so late.
EAGER_LOOKS, _LONGEST_LOOK = 4, 60.0
_SETTLED_LOOKS = EAGER_LOOKS + 6  # from then on the pauses are as long as they get
#: Answers without a search, and seconds before a slow container is asked again.
_NOT_SEARCHED, _SLOW_SEARCH = {UnresolvedReason.OVER_BUDGET, UnresolvedReason.TOO_SLOW}, 1.0
#: Answers after which a dead slot may have an owner again.
_MAY_LIVE = {
    UnresolvedReason.AMBIGUOUS,
    UnresolvedReason.ACCESS_DENIED,
    UnresolvedReason.TOO_LARGE,
    UnresolvedReason.UNPROVEN,
    UnresolvedReason.OTHER_POD,
}
#: Answers that make a slot dead once no process has its file open.
NOT_FOUND = (UnresolvedReason.NO_SUCH_PROCESS, UnresolvedReason.OVER_BUDGET)


class SlotState:
    """State of a PID's slot in one region."""

    def __init__(self, slot: SlotRecord) -> None:
        self.slot = slot
        self.owner: ProcessHandle | None = None
        self.names = ("", "")  # pod UID and kubelet's name of the owner's container
        self.variables: tuple[str, str] | None = None  # of `hami_variables`, None until they were read
        self.read_again = 0.0  # monotonic; infinity once they were read
        self.reason: UnresolvedReason | None = None
        self.repaired: RepairReason | None = None
        self.dead = False
        self.abandoned = False  # dead because no process has the file open
        self.unsure = False  # the file was touched since the search that called it dead
        self.doubted = False  # its hostpid may be another owner's: nothing is written before a search
        self.followed = False  # a process attached to the file since its owner was found
        self.looks = 0  # in vain, in a row
        self.next_look = 0.0
        self.written: int | None = None  # the hostpid of our one write to this generation
        self.written_at: int | None = None  # the slot's index at that time
        self.announced: int | None = None  # the hostpid that a dry run has announced for this generation
        self.guessed = False  # changed since our write, once, as the process's own guess does
        self.conflicts = 0
        self.not_before = 0.0
        self.wrong_since: float | None = None
        self.stuck = ""  # why its sm_util does not stay right
        self.evidence: Evidence | None = None  # while it has an owner

    def due(self, now: float) -> bool:
        """Check if an owner search is due."""
        return self.doubted or (self.owner is None and now >= self.next_look)

    def observe(self, slot: SlotRecord) -> None:
        """Update the slot's content.

        In a shared file, another container's process with the same PID can take over the slot: an unknown ``hostpid``
        may be its.
        """
        if self.owner is not None and slot.hostpid not in (self.slot.hostpid, 0, slot.pid):
            self.doubted = self.doubted or slot.hostpid != self.owner.process.host_pid
        self.slot = slot

    def keeps_owner(self, found: ProcessHandle | UnresolvedReason) -> bool:
        """Check if the owner stays after a search; the same process settles a doubt."""
        if isinstance(found, ProcessHandle) and self.owner and found.process == self.owner.process:
            found.close()
            self.doubted = False
        return not self.doubted or found in _NOT_SEARCHED

    def found(self, result: ProcessHandle | UnresolvedReason, now: float) -> None:
        """Apply a search's result."""
        if isinstance(result, ProcessHandle):
            self.owner, self.reason, self.dead, self.looks = result, None, False, 0
            self.abandoned = self.unsure = self.followed = self.doubted = False
            self.written, self.guessed, self.conflicts, self.not_before = None, False, 0, 0.0
            self.stuck, self.evidence, self.announced = "", Evidence(), None
            self.variables, self.read_again = None, 0.0
            return
        self.reason = result
        if result in _NOT_SEARCHED:  # or not among all processes
            if result is UnresolvedReason.TOO_SLOW:
                self.next_look = now + _SLOW_SEARCH
            return
        self.unsure = False
        if result in _MAY_LIVE:
            self.looks = min(self.looks, EAGER_LOOKS) if self.dead else self.looks
            self.dead = False
        self.looks += 1
        if self.looks > EAGER_LOOKS:
            self.next_look = now + doubled(0.5, _LONGEST_LOOK, self.looks - EAGER_LOOKS)

    def release(self) -> None:
        """Release its process's handle."""
        if self.owner is not None:
            self.owner.close()
        self.owner, self.doubted = None, False

    def owner_ended(self) -> None:
        """Mark the slot dead. One search shows if another process took it.

        Later searches, which may walk all processes, are rare unless a process has attached.
        """
        self.disowned()
        looks = EAGER_LOOKS if self.followed else _SETTLED_LOOKS
        self.dead, self.unsure, self.looks, self.next_look = True, False, looks, 0.0

    def disowned(self) -> None:
        """Forget the owner and everything learned about it."""
        self.release()
        self.names, self.variables, self.read_again = ("", ""), None, 0.0
        self.reason, self.repaired, self.wrong_since = None, None, None
        self.stuck, self.evidence = "", None

    def abandon(self) -> None:
        """Mark an unowned slot as dead: no process has the file open."""
        if self.owner is None and self.reason in NOT_FOUND:
            self.dead = self.abandoned = True

    def put_off(self, now: float, why: UnresolvedReason) -> bool:
        """Delay due work; True if the reason changed."""
        waits = self.due(now) or self.wrong_since is not None
        if not waits or self.dead or self.reason is why:
            return False
        self.reason = why
        return True

    def touched(self, *, attached: bool = False) -> None:
        """Note a write, after which a process may have reused this slot.

        ``attached``: every attaching process's write. Changed bytes alone trigger no search: tenants can flip them at
        any rate.
        """
        self.next_look = 0.0
        self.looks = min(self.looks, EAGER_LOOKS)
        self.unsure = True
        self.followed = self.followed or attached
        if self.abandoned:  # that was true until now
            self.dead = self.abandoned = False


class UnownedSlots:
    """Unowned slots by index, eleven bytes each; also those that can't have a state (``odd``)."""

    __slots__ = ("_codes", "_looks", "_next")

    def __init__(self, count: int) -> None:
        self._codes = bytearray(count)  # 0: none here; else an `UnownedCode`
        self._looks = bytearray(count)
        self._next = array("d", [inf]) * count  # inf: odd, or none here

    def __contains__(self, index: int) -> bool:
        return self._codes[index] != 0 and self._next[index] != inf

    def begin(self, index: int) -> None:
        """Add a slot with nothing known."""
        self._codes[index], self._looks[index], self._next[index] = UnownedCode.UNOWNED, 0, 0.0

    def put(self, state: SlotState) -> None:
        """Store a slot in place of its state, which has no owner and so nothing more to say."""
        index = state.slot.index
        flags = UnownedCode.DEAD * state.dead | UnownedCode.ABANDONED * state.abandoned
        self._codes[index] = UnownedCode.of(state.reason) | flags | UnownedCode.UNSURE * state.unsure
        self._looks[index], self._next[index] = min(state.looks, 255), state.next_look

    def take(self, slot: SlotRecord) -> SlotState:
        """Remove a slot and return its state."""
        state, code = SlotState(slot), self._codes[slot.index]
        state.reason = UnownedCode.reason(code)
        state.dead, state.abandoned, state.unsure = (
            bool(code & bit) for bit in (UnownedCode.DEAD, UnownedCode.ABANDONED, UnownedCode.UNSURE)
        )
        state.looks, state.next_look = self._looks[slot.index], self._next[slot.index]
        self._codes[slot.index], self._next[slot.index] = 0, inf
        return state

    def move(self, index: int, before: UnownedSlots, was: int) -> None:
        """Copy a slot from its previous index."""
        self._codes[index] = before._codes[was]
        self._looks[index], self._next[index] = before._looks[was], before._next[was]

    def set_odd(self, index: int, why: UnresolvedReason) -> None:
        """Add a slot that can't have a state."""
        self._codes[index], self._next[index] = UnownedCode.of(why), inf

    def reasons(self) -> set[UnresolvedReason | None]:
        """Return the reasons for missing owners."""
        return {UnownedCode.reason(code) for code in set(self._codes) if code}

    def unclear(self) -> bool:
        """Check if any slot is not certainly dead."""
        return any(code and not code & UnownedCode.DEAD for code in self._codes)

    def due(self, now: float) -> array[int]:
        """Return indexes of slots due for a search."""
        return array("h", [index for index, at in enumerate(self._next) if at <= now])

    def next_look(self) -> float:
        """Return the first due search's monotonic time."""
        return min(self._next, default=inf)

    def dead(self, index: int) -> bool:
        """Check if the slot is certainly dead."""
        return self._codes[index] & (UnownedCode.DEAD | UnownedCode.UNSURE) == UnownedCode.DEAD

    def apply(self, slots: PackedSlots, change: Callable[[SlotState], None]) -> None:
        """Change each slot's state."""
        for index, at in enumerate(self._next):
            if at != inf:
                state = self.take(slots[index])
                change(state)
                self.put(state)

    def put_off(self, now: float, why: UnresolvedReason) -> bool:
        """Delay due work as `SlotState.put_off` does, in place: no budget pays for it."""
        reason, changed = UnownedCode.of(why), False
        for index in self.due(now):
            code = self._codes[index]
            if code & UnownedCode.REASON != reason and not code & UnownedCode.DEAD:
                self._codes[index] = reason | code & ~UnownedCode.REASON
                changed = True
        return changed

    def codes(self) -> bytes:
        """Return each slot's `UnownedCode`."""
        return bytes(self._codes)
