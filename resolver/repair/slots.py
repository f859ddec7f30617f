"""Slots of one region: an object for each owned slot, eleven bytes for any other. Does no I/O.

A tenant fills 1,024 slots of a file at no cost.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container
from math import inf

from resolver.base.reasons import RepairReason, UnresolvedReason
from resolver.base.retry import doubled
from resolver.hami.hostpid_policy import HostpidPolicy, classify
from resolver.hami.packed_slots import PackedSlots, SlotRecord
from resolver.hami.region import RegionView
from resolver.linux.procfs import ProcessHandle
from resolver.repair.reported_values import Evidence, reordering

_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.5, 300.0
#: Seconds after which an environment that could not be read is read again.
_READ_AGAIN_SECONDS = 30.0
#: State of an unowned slot in one byte: 1, or more for each reason of `_REASONS`, and flags. Dead are those abandoned
#: by all processes, too; unsure are dead ones whose file was touched since.
_UNOWNED, _REASON, _DEAD, _ABANDONED, _UNSURE = 1, 0x1F, 0x20, 0x40, 0x80
_REASONS: tuple[UnresolvedReason | None, ...] = (None, *UnresolvedReason)
#: How often a slot without a process is checked again, at first each pass, then ever more rarely. A dead one can be
#: taken again without a byte or the file's time changing; only lost events are found so late.
EAGER_LOOKS, _LONGEST_LOOK = 4, 60.0
#: Seconds: later searches are at its multiples, when right regions are read (`schedule.aligned`).
_TOGETHER = 4.0
_SETTLED_LOOKS = EAGER_LOOKS + 6  # from then on the pauses are as long as they get
#: Answers without a search, and seconds until a container that makes the kernel wait is asked again.
NOT_SEARCHED, _SLOW_SEARCH = {UnresolvedReason.OVER_BUDGET, UnresolvedReason.TOO_SLOW}, 1.0
#: Answers after which a dead slot may have an owner again.
_MAY_LIVE = {
    UnresolvedReason.AMBIGUOUS,
    UnresolvedReason.ACCESS_DENIED,
    UnresolvedReason.TOO_LARGE,
    UnresolvedReason.UNPROVEN,
    UnresolvedReason.OTHER_POD,
}
#: Answers with which a slot is dead once no process has its file open.
_NOT_FOUND = (UnresolvedReason.NO_SUCH_PROCESS, UnresolvedReason.OVER_BUDGET)
#: Searches and reads that are due so soon are made at once.
SOON_SECONDS = 0.005
_UNREAD = RegionView(0, (), (), (), 0, 1, PackedSlots((b"", b"", b"")))


def _reason(code: int) -> UnresolvedReason | None:
    return _REASONS[(code & _REASON) - _UNOWNED]


class OwnedSlot:
    """A PID's slot and its owner in one region."""

    def __init__(self, slot: SlotRecord, owner: ProcessHandle) -> None:
        self.slot, self.owner = slot, owner
        self.names = ("", "")  # pod UID and kubelet's name of the owner's container
        self.variables: tuple[str, str] | None = None  # of `hami_variables`, None until they were read
        self.read_again = 0.0  # monotonic; infinity once they were read
        self.reason: UnresolvedReason | None = None
        self.repaired: RepairReason | None = None
        self.doubted = False  # its hostpid may be another owner's: nothing is written before a search
        self.followed = False  # a process attached to the file since its owner was found
        self.written: int | None = None  # the hostpid of our one write to this generation
        self.written_at: int | None = None  # the slot's index at that time
        self.announced: int | None = None  # the hostpid that a dry run has announced for this generation
        self.guessed = False  # changed since our write, once, as the process's own guess does: its last store
        self.conflicts = 0
        self.not_before = 0.0
        self.wrong_since: float | None = None
        self.stuck = ""  # why its sm_util does not stay right
        self.evidence = Evidence()

    def observe(self, slot: SlotRecord) -> None:
        """Update the slot's content.

        In a shared file, another container's process with the same PID can take over the slot: an unknown ``hostpid``
        may be its.
        """
        if slot.hostpid not in (self.slot.hostpid, 0, slot.pid):
            self.doubted = self.doubted or slot.hostpid != self.owner.process.host_pid
        self.slot = slot

    def named(self, pod_uid: str, container: str) -> None:
        self.names = pod_uid, container

    def reads(self, now: float) -> bool:
        """Check if the owner's environment is to be read, which a tenant can make fail for a while."""
        due, self.read_again = now >= self.read_again, max(self.read_again, now + _READ_AGAIN_SECONDS)
        return due

    def knows(self, core_policy: str, visible_devices: str) -> None:
        """Note `hami_variables` of the owner's environment."""
        self.variables, self.read_again = (core_policy, visible_devices), inf

    def waits(self, why: UnresolvedReason) -> None:
        self.reason = why

    def wrong(
        self,
        policy: HostpidPolicy,
        now: float,
        crowded: Callable[[int], bool],
        conflicts: list[tuple[OwnedSlot, float]],
    ) -> tuple[RepairReason, int] | None:
        """Return why the ``hostpid`` is wrong and the right one; None if it is right, or not to be written now."""
        slot, host_pid = self.slot, self.owner.process.host_pid
        wanted = policy.wanted(host_pid, slot.pid)
        if self.doubted or wanted is None:
            self.waits(UnresolvedReason.OVER_BUDGET if self.doubted else UnresolvedReason.DRIVER_UNKNOWN)
            return None
        self.reason = None
        other = slot.pid if wanted == host_pid else host_pid
        shared = slot.hostpid != wanted and crowded(slot.hostpid)
        wrong = classify(slot.hostpid, wanted, other, shared=shared)
        if wrong is None:
            self.wrong_since = None
            return None
        if self.wrong_since is None:
            self.wrong_since = now
        if self.written_at not in (None, slot.index):
            # A move copied the slot before we wrote, and left what we wrote behind: not another writer's doing.
            self.written = self.written_at = None
        if self.written is not None and slot.hostpid != self.written:
            if slot.hostpid and not self.guessed:
                self.guessed = True  # the process's own guess; no release guesses 0
            else:
                # Another program writes it too.
                wait = doubled(_FIRST_BACKOFF, _LONGEST_BACKOFF, self.conflicts)
                self.conflicts += 1
                self.not_before = now + wait
                conflicts.append((self, wait))
            self.written = None
        if now < self.not_before:
            self.waits(UnresolvedReason.CONFLICT)
            return None
        return wrong, wanted

    def wrote(self, hostpid: int, index: int, why: RepairReason, *, changed: bool) -> None:
        """Note a repair; ``changed``: another writer's value was read back."""
        self.written, self.written_at, self.repaired, self.wrong_since = hostpid, index, why, None
        self.reason = UnresolvedReason.CHANGED if changed else None

    def would_write(self, word: int) -> bool:
        """Note a word that a dry run leaves out; False if it did so before."""
        before, self.announced = self.announced, word
        return before != word

    def reordered(self, uuids: tuple[str, ...]) -> str:
        """Explain that its process has another order of GPUs than NVML; empty if not."""
        return reordering(self.variables[1] if self.variables else "", uuids)

    def explain(
        self, policy: HostpidPolicy, now: float, uuids: tuple[str, ...], blind: Container[int]
    ) -> bool:
        """Note why values do not stay right; True if that is new of this process."""
        self.stuck = self.evidence.why(self.slot.hostpid, policy, now, self.reordered(uuids), blind)
        return bool(self.stuck) and self.evidence.logs()


class UnownedSlots:
    """Unowned slots by index; also those that can't have an owner (``odd``)."""

    __slots__ = ("_codes", "_looks", "_next")

    def __init__(self, count: int) -> None:
        self._codes = bytearray(count)  # 0: none here
        self._looks = bytearray(count)  # searches in vain, in a row
        self._next = array("d", [inf]) * count  # inf: odd, or none here

    def __contains__(self, index: int) -> bool:
        return self._codes[index] != 0 and self._next[index] != inf

    def begin(self, index: int) -> None:
        self._codes[index], self._looks[index], self._next[index] = _UNOWNED, 0, 0.0

    def remove(self, index: int) -> None:
        """Remove a slot: it has an owner."""
        self._codes[index], self._next[index] = 0, inf

    def move(self, index: int, before: UnownedSlots, was: int) -> None:
        """Copy a slot from its previous index."""
        self._codes[index] = before._codes[was]
        self._looks[index], self._next[index] = before._looks[was], before._next[was]

    def set_odd(self, index: int, why: UnresolvedReason) -> None:
        """Add a slot that can't have an owner."""
        self._codes[index], self._next[index] = _UNOWNED + _REASONS.index(why), inf

    def ended(self, index: int, *, followed: bool) -> None:
        """Add a dead slot: its owner has ended. One search shows if another process took it.

        Later searches, which may walk all processes, are rare unless a process has attached (``followed``).
        """
        looks = EAGER_LOOKS if followed else _SETTLED_LOOKS
        self._codes[index], self._looks[index], self._next[index] = _UNOWNED | _DEAD, looks, 0.0

    def not_found(self, index: int, why: UnresolvedReason, now: float) -> None:
        """Note a search in vain."""
        flags = self._codes[index] & (_DEAD | _ABANDONED | _UNSURE)
        if why not in NOT_SEARCHED:
            looks = self._looks[index]
            if why in _MAY_LIVE:
                looks = min(looks, EAGER_LOOKS) if flags & _DEAD else looks
                flags &= ~_DEAD
            flags &= ~_UNSURE
            self._looks[index] = looks = min(looks + 1, 255)
            if looks > EAGER_LOOKS:
                at = now + doubled(0.5, _LONGEST_LOOK, (looks - EAGER_LOOKS) << bool(flags & _DEAD))
                self._next[index] = at if at < now + _TOGETHER else at // _TOGETHER * _TOGETHER
        elif why is UnresolvedReason.TOO_SLOW:
            self._next[index] = now + _SLOW_SEARCH
        self._codes[index] = _UNOWNED + _REASONS.index(why) | flags

    def called_dead(self, index: int) -> bool:
        """Check if the slot is dead, unless the file was touched since then."""
        return bool(self._codes[index] & _DEAD)

    def call_dead(self, index: int, *, dead: bool) -> None:
        self._codes[index] = self._codes[index] & ~_DEAD | (_DEAD if dead else 0)

    def missed_again(self, index: int) -> bool:
        """Check that no process was found more than once."""
        return self._looks[index] > 1

    def abandon(self) -> None:
        """Mark slots without a process as dead: no process has the file open."""
        for index, code in enumerate(self._codes):
            if index in self and _reason(code) in _NOT_FOUND:
                self._codes[index] |= _DEAD | _ABANDONED

    def touched(self) -> None:
        """Note a write to the file, after which a process may have reused a slot.

        Changed bytes alone trigger no search: tenants can flip them at any rate.
        """
        for index, code in enumerate(self._codes):
            if index in self:
                self._looks[index], self._next[index] = min(self._looks[index], EAGER_LOOKS), 0.0
                # An abandoned slot was dead until now.
                self._codes[index] = (code & ~(_DEAD | _ABANDONED) if code & _ABANDONED else code) | _UNSURE

    def put_off(self, now: float, why: UnresolvedReason) -> bool:
        """Delay due work; True if any reason changed."""
        reason, changed = _UNOWNED + _REASONS.index(why), False
        for index in self.due(now):
            code = self._codes[index]
            if code & _REASON != reason and not code & _DEAD:
                self._codes[index] = reason | code & ~_REASON
                changed = True
        return changed

    def reasons(self) -> set[UnresolvedReason | None]:
        return {_reason(code) for code in set(self._codes) if code}

    def unclear(self) -> bool:
        """Check if any of them is not certainly dead."""
        return any(code and not code & _DEAD for code in self._codes)

    def due(self, now: float) -> array[int]:
        return array("h", [index for index, at in enumerate(self._next) if at <= now])

    def next_look(self) -> float:
        return min(self._next, default=inf)

    def dead(self, index: int) -> bool:
        """Check if the slot is certainly dead."""
        return self._codes[index] & (_DEAD | _UNSURE) == _DEAD

    def states(self) -> tuple[bytes, dict[int, tuple[bool, UnresolvedReason | None]]]:
        """Return the codes and their meanings of `resolver.state.SlotReports`."""
        codes = bytes(self._codes)
        return codes, {code: (bool(code & _DEAD), _reason(code)) for code in set(codes) - {0}}


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
        earlier = {ns_pid: index for index, ns_pid in before.slots.in_use() if index in self.unowned}
        for ns_pid, index in by_pid.items():
            if ns_pid in self.owned:
                self.owned[ns_pid].observe(slots[index])
            elif ns_pid in earlier:
                unowned.move(index, self.unowned, earlier[ns_pid])
            else:
                unowned.begin(index)
                self.next_look = 0.0
            if ns_pid in self._twice:
                self.next_look = 0.0
        gone = [self.owned.pop(ns_pid) for ns_pid in self.owned.keys() - by_pid.keys() - twice]
        self.unowned, self._twice = unowned, twice
        if any(state.doubted for state in self.owned.values()):
            self.next_look = 0.0
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
        doubted = any(state.doubted for state in self.distinguished())
        self.next_look = 0.0 if doubted else self.unowned.next_look()

    def at(self, index: int) -> tuple[int, int, OwnedSlot | None]:
        """Return the PID and hostpid of the slot at this index, and its state if it has an owner."""
        slot = self.view.slots[index]
        return slot.pid, slot.hostpid, None if index in self.unowned else self.owned[slot.pid]

    def keeps_owner(self, state: OwnedSlot, found: ProcessHandle | UnresolvedReason) -> bool:
        """Check if the owner stays after a search, which settles a doubt; else forget it."""
        if isinstance(found, UnresolvedReason):
            if found in NOT_SEARCHED:
                return True
        elif found.process == state.owner.process:
            found.close()
            state.doubted = False
        if state.doubted:
            del self.owned[state.slot.pid]
            self.unowned.begin(state.slot.index)
        return not state.doubted

    def own(self, index: int, owner: ProcessHandle) -> OwnedSlot:
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
        waiting = [state for state in self.distinguished() if state.doubted or state.wrong_since is not None]
        changed = any(state.reason is not why for state in waiting)
        for state in waiting:
            state.reason = why
        return self.unowned.put_off(now, why) or changed
