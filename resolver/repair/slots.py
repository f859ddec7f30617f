"""Slots of one region: an object for each owned slot, a shared one for others in the same state. Does no I/O.

A tenant fills 1,024 slots of a file at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from copy import copy
from functools import lru_cache
from math import inf
from typing import NamedTuple

from msgspec import Struct, field

from resolver.base.reasons import RepairReason, UnresolvedReason
from resolver.base.retry import doubled
from resolver.hami.hostpid_policy import HostpidPolicy, classify
from resolver.hami.packed_slots import PackedSlots, SlotRecord
from resolver.hami.process_reads import reordering
from resolver.hami.region import RegionView
from resolver.linux.procfs import ProcessHandle
from resolver.repair.reported_values import Evidence

_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.5, 300.0
#: Seconds after which an environment that could not be read is read again.
_READ_AGAIN_SECONDS = 30.0
#: Checks of a slot without a process in each pass, before they get rarer, and their longest pause in seconds. They find
#: a reused dead slot after a lost event, even if neither a byte nor the file's time changed.
EAGER_LOOKS, _LONGEST_LOOK = 4, 60.0
#: Later searches are due at multiples of these seconds, when right regions are read (`schedule.aligned`).
_TOGETHER = 4.0
_SETTLED_LOOKS = EAGER_LOOKS + 6  # after these the pauses are at their longest
#: Answers without a search, and seconds until a container that makes the kernel wait is asked again.
_NOT_SEARCHED, _SLOW_SEARCH = {UnresolvedReason.OVER_BUDGET, UnresolvedReason.TOO_SLOW}, 1.0
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
#: Searches and reads that are due within these seconds are made now.
SOON_SECONDS = 0.005


class OwnedSlot(Struct, eq=False):
    """A PID's slot and its owner in one region."""

    slot: SlotRecord
    owner: ProcessHandle
    names: tuple[str, str] = ("", "")  # pod UID and kubelet's name of the owner's container
    variables: tuple[str, str] | None = None  # of `hami_variables`, None until they were read
    read_again: float = 0.0  # monotonic; infinity once they were read
    reason: UnresolvedReason | None = None
    repaired: RepairReason | None = None
    doubted: bool = False  # its hostpid may be another owner's: nothing is written before a search
    followed: bool = False  # a process attached to the file since its owner was found
    written: int | None = None  # the hostpid of our one write to this generation
    written_at: int | None = None  # the slot's index at that time
    announced: int | None = None  # the hostpid that a dry run has announced for this generation
    guessed: bool = False  # it changed once since our write, as by the process's guess, its last store
    conflicts: int = 0
    not_before: float = 0.0
    wrong: bool = False  # the hostpid is wrong, and was not written since
    stuck: str = ""  # why its sm_util does not stay right
    evidence: Evidence = field(default_factory=Evidence)

    def twin(self) -> OwnedSlot:
        """Return a copy to plan with; `become` makes it the slot's state."""
        twin = copy(self)
        twin.evidence = self.evidence.twin()
        return twin

    def become(self, planned: OwnedSlot) -> None:
        self.reason, self.wrong, self.evidence = planned.reason, planned.wrong, planned.evidence
        self.written, self.written_at, self.guessed = planned.written, planned.written_at, planned.guessed
        self.conflicts, self.not_before = planned.conflicts, planned.not_before

    def observe(self, slot: SlotRecord) -> None:
        """Update the slot's content.

        In a shared file, another container's process with the same PID can take over the slot: an unknown ``hostpid``
        may be that process's.
        """
        if slot.hostpid not in (self.slot.hostpid, 0, slot.pid):
            self.doubted = self.doubted or slot.hostpid != self.owner.process.host_pid
        self.slot = slot

    def follow(self, *, attached: bool) -> None:
        self.followed = self.followed or attached

    def named(self, pod_uid: str, container: str) -> None:
        self.names = pod_uid, container

    def reads(self, now: float) -> bool:
        """Check if the owner's environment is due to be read; a tenant can make reads fail for a while."""
        due, self.read_again = now >= self.read_again, max(self.read_again, now + _READ_AGAIN_SECONDS)
        return due

    def knows(self, core_policy: str, visible_devices: str) -> None:
        """Note `hami_variables` of the owner's environment."""
        self.variables, self.read_again = (core_policy, visible_devices), inf

    def waits(self, why: UnresolvedReason) -> None:
        self.reason = why

    def weigh(
        self, policy: HostpidPolicy, now: float, crowded: Callable[[int], bool]
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
        self.wrong = wrong is not None
        if wrong is None:
            return None
        if self.written_at not in (None, slot.index):
            # A move copied the slot before our write, which stayed behind: no other writer is involved.
            self.written = self.written_at = None
        if self.written is not None and slot.hostpid != self.written:
            if slot.hostpid and not self.guessed:
                self.guessed = True  # the process's own guess; no release guesses 0
            else:
                self.conflicts += 1  # another program writes it too
                self.not_before = now + self.backoff()
            self.written = None
        if now < self.not_before:
            self.waits(UnresolvedReason.CONFLICT)
            return None
        return wrong, wanted

    def backoff(self) -> float:
        """Return the seconds until the next attempt after the last conflict."""
        return doubled(_FIRST_BACKOFF, _LONGEST_BACKOFF, self.conflicts - 1)

    def wrote(self, hostpid: int, index: int, why: RepairReason, *, changed: bool) -> None:
        """Note a repair; ``changed``: another writer's value was read back."""
        self.written, self.written_at, self.repaired, self.wrong = hostpid, index, why, False
        self.reason = UnresolvedReason.CHANGED if changed else None

    def would_write(self, word: int) -> bool:
        """Note a word that a dry run does not write; False if it was noted before."""
        before, self.announced = self.announced, word
        return before != word

    def reordered(self, uuids: tuple[str, ...]) -> str:
        """Explain that its process has another order of GPUs than NVML; empty if not."""
        return reordering(self.variables[1] if self.variables else "", uuids)

    def explain(
        self, policy: HostpidPolicy, now: float, uuids: tuple[str, ...], blind: Container[int]
    ) -> bool:
        """Note why values do not stay right; True the first time for this process."""
        self.stuck = self.evidence.why(self.slot.hostpid, policy, now, self.reordered(uuids), blind)
        return bool(self.stuck) and self.evidence.logs()


class Unowned(NamedTuple):
    """State of slots without an owner."""

    why: UnresolvedReason | None = None  # after the last search
    looks: int = 0  # searches in a row that found no owner
    due: float = 0.0  # the next search; infinity if the slot can't have an owner
    dead: bool = False
    abandoned: bool = False  # dead because no process has the file open
    unsure: bool = False  # the file was touched since the last search

    def not_found(self, why: UnresolvedReason, now: float) -> Unowned:
        """Note a search in vain."""
        if why in _NOT_SEARCHED:
            due = now + _SLOW_SEARCH if why is UnresolvedReason.TOO_SLOW else self.due
            return self._replace(why=why, due=due)
        looks, dead, due = self.looks, self.dead, self.due
        if why in _MAY_LIVE:
            looks, dead = min(looks, EAGER_LOOKS) if dead else looks, False
        looks = min(looks + 1, 255)
        if looks > EAGER_LOOKS:
            due = now + doubled(0.5, _LONGEST_LOOK, (looks - EAGER_LOOKS) << dead)
            due = due if due < now + _TOGETHER else due // _TOGETHER * _TOGETHER
        return self._replace(why=why, looks=looks, due=due, dead=dead, unsure=False)

    def touched(self) -> Unowned:
        """Note a write to the file, after which a process may have reused the slot.

        Changed bytes alone trigger no search: tenants can flip them at any rate.
        """
        if self.due == inf:
            return self
        looks, dead = min(self.looks, EAGER_LOOKS), self.dead and not self.abandoned
        return self._replace(looks=looks, due=0.0, dead=dead, abandoned=False, unsure=True)

    def abandon(self) -> Unowned:
        """Note that no process has the file open."""
        gone = self.due != inf and self.why in _NOT_FOUND
        return self._replace(dead=True, abandoned=True) if gone else self


@lru_cache(1024)
def _shared(state: Unowned) -> Unowned:
    """Return the same object for equal states."""
    return state


class RegionSlots:
    """Slots of one region: ``owned`` by PID, and ``unowned`` by index."""

    def __init__(self) -> None:
        self.view = RegionView(0, (), (), (), 0, 1, PackedSlots((b"", b"", b"")))
        self.owned: dict[int, OwnedSlot] = {}
        self.unowned: list[Unowned | None] = []
        self._twice: set[int] = set()  # PIDs that several slots hold

    def take(self, view: RegionView) -> list[OwnedSlot]:
        """Match a new view's slots by PID, mark ambiguous or invalid ones; return owned slots that vanished."""
        before, self.view = self.view, view
        slots, unowned = view.slots, list[Unowned | None]([None] * len(view.slots))
        ambiguous = _shared(Unowned(UnresolvedReason.AMBIGUOUS, due=inf))
        by_pid: dict[int, int] = {}  # index by PID
        twice: set[int] = set()
        for index, ns_pid in slots.in_use():
            if ns_pid <= 0:
                unowned[index] = _shared(Unowned(UnresolvedReason.INVALID_PID, due=inf))
            elif ns_pid in twice:
                unowned[index] = ambiguous
            elif ns_pid in by_pid:
                # The same PID twice: a slot in mid-move, or a faked one. Neither may be written.
                twice.add(ns_pid)
                unowned[index] = unowned[by_pid.pop(ns_pid)] = ambiguous
            else:
                by_pid[ns_pid] = index
        earlier = {ns_pid: index for index, ns_pid in before.slots.in_use() if self.searched(index)}
        for ns_pid, index in by_pid.items():
            if ns_pid in self.owned:
                self.owned[ns_pid].observe(slots[index])
            else:
                unowned[index] = self.unowned[earlier[ns_pid]] if ns_pid in earlier else _shared(Unowned())
        gone = [self.owned.pop(ns_pid) for ns_pid in self.owned.keys() - by_pid.keys() - twice]
        self.unowned, self._twice = unowned, twice
        return gone

    def distinguished(self) -> list[OwnedSlot]:
        """Return owned slots with a unique PID."""
        return [state for ns_pid, state in self.owned.items() if ns_pid not in self._twice]

    def _distinct(self) -> dict[int, Unowned]:
        """Return the states of unowned slots by their objects' ids."""
        return {id(state): state for state in self.unowned if state is not None}

    def _change(self, change: Callable[[Unowned], Unowned]) -> bool:
        """Change all unowned slots; True if any changed."""
        after = {key: _shared(change(state)) for key, state in self._distinct().items()}
        before, self.unowned = self.unowned, [after.get(id(state)) for state in self.unowned]
        return before != self.unowned

    def reasons(self) -> set[UnresolvedReason | None]:
        """Return why owners are unknown."""
        return {state.why for state in self._distinct().values()}

    def unclear(self) -> bool:
        """Check if any unowned slot is not certainly dead."""
        return not all(state.dead for state in self._distinct().values())

    def dead(self, index: int) -> bool:
        """Check if the slot is certainly dead."""
        state = self.unowned[index]
        return state is not None and state.dead and not state.unsure

    def codes(self) -> tuple[bytes, dict[int, tuple[bool, UnresolvedReason | None]]]:
        """Return the codes and their meanings of `resolver.state.SlotReports`."""
        known: dict[tuple[bool, UnresolvedReason | None], int] = {}
        codes = {
            key: known.setdefault((state.dead, state.why), len(known) + 1)
            for key, state in self._distinct().items()
        }
        return bytes(codes.get(id(state), 0) for state in self.unowned), {
            code: meaning for meaning, code in known.items()
        }

    # -- searches -----------------------------------------------------------------------------------

    def searched(self, index: int) -> bool:
        """Check that the slot has no owner, and may have one."""
        state = self.unowned[index]
        return state is not None and state.due != inf

    def due(self, now: float) -> list[int]:
        """Return indexes of slots due for a search, last first."""
        due = [index for index, state in enumerate(self.unowned) if state and state.due <= now + SOON_SECONDS]
        due.extend(state.slot.index for state in self.distinguished() if state.doubted)
        return due[::-1]

    def next_look(self) -> float:
        """Return when the next search for an owner is due."""
        return min((state.due for state in self._distinct().values()), default=inf)

    def at(self, index: int) -> tuple[int, int, OwnedSlot | None]:
        """Return the PID and hostpid of the slot at this index, and its state if it has an owner."""
        slot = self.view.slots[index]
        return slot.pid, slot.hostpid, None if self.searched(index) else self.owned[slot.pid]

    def keeps_owner(self, state: OwnedSlot, found: ProcessHandle | UnresolvedReason) -> bool:
        """Check if a search confirms the owner, which settles a doubt; else forget the owner."""
        if isinstance(found, UnresolvedReason):
            if found in _NOT_SEARCHED:
                return True
        elif found.process == state.owner.process:
            found.close()
            state.doubted = False
        if state.doubted:
            del self.owned[state.slot.pid]
            self.unowned[state.slot.index] = _shared(Unowned())
        return not state.doubted

    def own(self, index: int, owner: ProcessHandle) -> OwnedSlot:
        slot, self.unowned[index] = self.view.slots[index], None
        state = self.owned[slot.pid] = OwnedSlot(slot, owner)
        return state

    def not_found(self, index: int, why: UnresolvedReason, now: float) -> Unowned:
        """Note a search in vain; return the slot's state."""
        state = self.unowned[index] = _shared((self.unowned[index] or Unowned()).not_found(why, now))
        return state

    def call_dead(self, index: int, *, dead: bool) -> None:
        self.unowned[index] = _shared((self.unowned[index] or Unowned())._replace(dead=dead))

    def abandon(self) -> None:
        """Mark slots without a process as dead: no process has the file open."""
        self._change(Unowned.abandon)

    def ended(self, state: OwnedSlot) -> None:
        """Note an owner's end.

        One search shows if another process took it. Later ones, which may walk all processes, are rare unless a process
        has attached.
        """
        ns_pid, index = state.slot.pid, state.slot.index
        if self.owned.get(ns_pid) is not state:
            return  # its slot has gone
        del self.owned[ns_pid]
        if ns_pid not in self._twice:
            looks = EAGER_LOOKS if state.followed else _SETTLED_LOOKS
            self.unowned[index] = _shared(Unowned(looks=looks, dead=True))

    def touched(self, *, attached: bool) -> None:
        """Note a write to the file; ``attached``: by an attaching process, which always writes."""
        for state in self.owned.values():
            state.follow(attached=attached)
        self._change(Unowned.touched)

    def put_off(self, now: float, why: UnresolvedReason = UnresolvedReason.OVER_BUDGET) -> bool:
        """Delay due work at the container's expense; True if any reason changed."""
        waiting = [state for state in self.distinguished() if state.doubted or state.wrong]
        changed = any(state.reason is not why for state in waiting)
        for state in waiting:
            state.waits(why)
        due = self._change(
            lambda state: state._replace(why=why) if state.due <= now and not state.dead else state
        )
        return due or changed
