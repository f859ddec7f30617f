"""What is known of slots: an object for each that a process owns, some bytes for each that nobody is known to own.

A process costs its tenant something, a slot that is merely filled in nothing: 1,024 of them in each file.
"""

from __future__ import annotations

from array import array
from math import inf
from typing import TYPE_CHECKING

from resolver.linux.procfs import ProcessHandle
from resolver.reasons import UnresolvedReason
from resolver.repair.reported_values import Evidence
from resolver.retry import doubled
from resolver.state import UnownedCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resolver.hami.packed_slots import SlotRecord
    from resolver.reasons import RepairReason
    from resolver.state import SlotReport

#: How often a slot without a process is checked again, at first each pass, then ever more rarely.
EAGER_LOOKS, _LONGEST_LOOK = 4, 30.0
#: A dead slot can be taken again without a byte of it changing, and on tmpfs without the file's time changing.
_DEAD_LOOK = 1.0
#: The same where the kernel reports each process that attaches. An event that was lost shows by the file's time, or by
#: other bytes; what shows by neither is found so late. In a container that has ended it takes a walk over all.
_WATCHED_DEAD_LOOK = 60.0
#: A search among all processes takes many passes. Nobody waits for one that can only say again that a slot is dead: it
#: does not go on with each pass that somebody's events bring, as the longer a pass, the later is the next one.
_DEAD_SEARCH = 0.25
#: After so many they come no more rarely.
_SETTLED_LOOKS = EAGER_LOOKS + 6
_MOST_LOOKS = 255  # that are counted; the pauses grow no longer
#: Answers that leave it open whether a process owns the slot: what was dead may have been taken again.
_MAY_LIVE = {
    UnresolvedReason.AMBIGUOUS,
    UnresolvedReason.ACCESS_DENIED,
    UnresolvedReason.TOO_LARGE,
    UnresolvedReason.UNPROVEN,
    UnresolvedReason.OTHER_POD,
}
#: One for all: made by a type with parameters, each empty one would be another.
_NOTHING_ANNOUNCED: frozenset[tuple[int | None, int]] = frozenset()


class SlotState:
    """What is known of one PID's slot in one region."""

    __slots__ = (
        "abandoned",
        "announced",
        "conflicts",
        "dead",
        "evidence",
        "followed",
        "guessed",
        "looks",
        "next_look",
        "not_before",
        "owner",
        "reason",
        "repaired",
        "shown",
        "slot",
        "stuck",
        "unsure",
        "written",
        "written_at",
        "wrong_since",
    )

    def __init__(self, slot: SlotRecord) -> None:
        self.slot = slot
        self.owner: ProcessHandle | None = None
        self.reason: UnresolvedReason | None = None
        self.repaired: RepairReason | None = None
        self.dead = False
        self.abandoned = False  # dead because nobody has the file open, see `resolver.repair.abandoned`
        self.unsure = False  # the file was touched since it was called dead, and nobody has looked yet
        self.followed = False  # a process attached to the file since its owner was found
        self.looks = 0  # in vain, in a row
        self.next_look = 0.0
        self.written: int | None = None  # the hostpid of our one write to this generation
        self.written_at: int | None = None  # the slot's index at that time
        self.announced = _NOTHING_ANNOUNCED  # (device, value) that a dry run has announced
        self.guessed = False  # changed since our write, once, as the process's own guess does
        self.conflicts = 0
        self.not_before = 0.0
        self.wrong_since: float | None = None
        self.stuck = ""  # why its sm_util does not stay right; see `resolver.repair.reported_values`
        self.evidence: Evidence | None = None  # while it has an owner
        self.shown: SlotReport | None = (
            None  # what was last said of it, as long as that is all there is to say
        )

    def due(self, now: float) -> bool:
        """Whether its owner has to be looked for now."""
        return self.owner is None and now >= self.next_look

    def found(self, result: ProcessHandle | UnresolvedReason, now: float, *, watched: bool = False) -> None:
        """Take in the answer of a search for the owner. ``watched``: a process that attaches is reported."""
        if isinstance(result, ProcessHandle):
            self.owner, self.reason, self.dead, self.looks = result, None, False, 0
            self.abandoned = self.unsure = self.followed = False
            self.written, self.guessed, self.conflicts, self.not_before = None, False, 0, 0.0
            self.announced = _NOTHING_ANNOUNCED
            self.stuck, self.evidence = "", Evidence()
            return
        self.reason = result
        if result is UnresolvedReason.OVER_BUDGET:  # it was not looked for, or not among all
            if self.dead and not self.unsure:
                self.next_look = now + _DEAD_SEARCH
            return
        self.unsure = False
        if result in _MAY_LIVE:
            self.looks = min(self.looks, EAGER_LOOKS) if self.dead else self.looks
            self.dead = False
        self.looks += 1
        if self.looks > EAGER_LOOKS:
            longest = _LONGEST_LOOK
            if self.dead:
                longest = _WATCHED_DEAD_LOOK if watched else _DEAD_LOOK
            self.next_look = now + doubled(0.5, longest, self.looks - EAGER_LOOKS)

    def is_unowned(self) -> bool:
        """Whether nothing has to be known of it but what `UnownedSlots` keeps."""
        plain = self.repaired is None and self.wrong_since is None and not self.stuck and not self.announced
        return self.owner is None and plain

    def release(self) -> None:
        """Give the handle of its process back."""
        if self.owner is not None:
            self.owner.close()
        self.owner = None

    def owner_ended(self) -> None:
        """Its process is gone; whether another one took the slot is for the next look to find out.

        That is one look. The next ones are as rare as those at any dead slot, unless somebody has attached: where
        a container has ended, each of them may go through all processes of the node.
        """
        self.release()
        looks = EAGER_LOOKS if self.followed else _SETTLED_LOOKS
        self.dead, self.unsure, self.looks, self.next_look = True, False, looks, 0.0
        self.reason, self.repaired, self.wrong_since = None, None, None
        self.stuck, self.evidence = "", None

    def touched(self, *, attached: bool = False) -> None:
        """The file was written to: a process may have taken this slot again. Look once more now, if nobody owns it.

        ``attached``: the kernel reports a write, as each process that attaches makes one; its stores change the time.
        A change of the slot's own bytes brings no look forward: a tenant can flip them as fast as it likes.
        """
        self.next_look = 0.0
        self.looks = min(self.looks, EAGER_LOOKS)
        self.unsure = True
        self.followed = self.followed or attached
        if self.abandoned:  # that was true until now
            self.dead = self.abandoned = False


class UnownedSlots:
    """Slots that nobody is known to own, by their index in the region; `SlotState` in eleven bytes each.

    One is either in here or has a `SlotState`. Slots that have none of their own (``odd``) are in here, too.
    """

    __slots__ = ("_codes", "_looks", "_next")

    def __init__(self, count: int) -> None:
        self._codes = bytearray(count)  # 0: none here; else what `UnownedCode` says
        self._looks = bytearray(count)
        self._next = array("d", [inf]) * count  # inf: odd, or none here

    def __contains__(self, index: int) -> bool:
        return self._codes[index] != 0 and self._next[index] != inf

    def begin(self, index: int) -> None:
        """Nothing is known of this one yet."""
        self._codes[index], self._looks[index], self._next[index] = UnownedCode.UNOWNED, 0, 0.0

    def put(self, state: SlotState) -> None:
        """Keep what is known of a slot instead of its state, of which `SlotState.is_unowned` must be true."""
        index = state.slot.index
        code = UnownedCode.of(state.reason)
        for is_so, bit in (
            (state.dead, UnownedCode.DEAD),
            (state.abandoned, UnownedCode.ABANDONED),
            (state.unsure, UnownedCode.UNSURE),
        ):
            code |= bit if is_so else 0
        self._codes[index] = code
        self._looks[index], self._next[index] = min(state.looks, _MOST_LOOKS), state.next_look

    def take(self, slot: SlotRecord) -> SlotState:
        """The state of a slot that is in here, and is not any more."""
        state, code = SlotState(slot), self._codes[slot.index]
        state.reason = UnownedCode.reason(code)
        state.dead, state.abandoned, state.unsure = (
            bool(code & bit) for bit in (UnownedCode.DEAD, UnownedCode.ABANDONED, UnownedCode.UNSURE)
        )
        state.looks, state.next_look = self._looks[slot.index], self._next[slot.index]
        self._codes[slot.index], self._next[slot.index] = 0, inf
        return state

    def move(self, index: int, before: UnownedSlots, was: int) -> None:
        """The same slot was at another index before."""
        self._codes[index] = before._codes[was]
        self._looks[index], self._next[index] = before._looks[was], before._next[was]

    def set_odd(self, index: int, why: UnresolvedReason) -> None:
        """A slot without a state of its own."""
        self._codes[index], self._next[index] = UnownedCode.of(why), inf

    def odd(self) -> dict[int, UnresolvedReason]:
        """The slots without a state of their own, by index."""
        found = ((index, UnownedCode.reason(code)) for index, code in enumerate(self._codes) if code)
        return {index: why for index, why in found if why is not None and self._next[index] == inf}

    def reasons(self) -> set[UnresolvedReason | None]:
        """Why nobody is known to own them, each once."""
        return {UnownedCode.reason(code) for code in set(self._codes) if code}

    def unclear(self) -> bool:
        """Whether anything is in here that is not certainly dead."""
        return any(code and not code & UnownedCode.DEAD for code in self._codes)

    def due(self, now: float) -> array[int]:
        """Indexes of those whose owner has to be looked for now."""
        return array("h", [index for index, at in enumerate(self._next) if at <= now])

    def next_look(self) -> float:
        """When the first of them is due, on a monotonic clock."""
        return min(self._next, default=inf)

    def dead(self, indexes: Iterator[int]) -> list[int]:
        """Those of the slots that are certainly dead."""
        wanted = UnownedCode.DEAD
        mask = UnownedCode.DEAD | UnownedCode.UNSURE
        return sorted({index for index in indexes if self._codes[index] & mask == wanted})

    def touched(self) -> None:
        """As `SlotState.touched`, for each of them."""
        for index, at in enumerate(self._next):
            if at != inf:
                code = self._codes[index] | UnownedCode.UNSURE
                if code & UnownedCode.ABANDONED:
                    code &= ~(UnownedCode.DEAD | UnownedCode.ABANDONED)
                self._codes[index], self._next[index] = code, 0.0
                self._looks[index] = min(self._looks[index], EAGER_LOOKS)

    def abandon(self) -> None:
        """Nobody has the file open: those without a process are dead."""
        gone = UnownedCode.of(UnresolvedReason.NO_SUCH_PROCESS)
        for index, code in enumerate(self._codes):
            if code & UnownedCode.REASON == gone and self._next[index] != inf:
                self._codes[index] = code | UnownedCode.DEAD | UnownedCode.ABANDONED

    def put_off(self, now: float) -> bool:
        """Those that are due have to wait; whether that is news of any."""
        waits, news = UnownedCode.of(UnresolvedReason.OVER_BUDGET), False
        for index in self.due(now):
            code = self._codes[index]
            if not code & UnownedCode.DEAD and code & UnownedCode.REASON != waits:
                self._codes[index], news = code & ~UnownedCode.REASON | waits, True
        return news

    def codes(self) -> bytes:
        """What is to be said of each now, see `UnownedCode`."""
        return bytes(self._codes)
