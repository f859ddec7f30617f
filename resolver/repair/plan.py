"""Decides, slot by slot, what is wrong in one region and what to write. Reads and writes nothing itself.

A slot *generation* is one process holding one slot: the region's file, the PID in the slot, and the process
(with its start time) that was found to own it. Its place in the array does not count, slots move. Within a
generation ``hostpid`` is written once, and once more after the process's own guess: HAMi takes the slot before CUDA
starts and guesses after it, up to seconds after our repair. Any further change is a conflict, and the next try waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from resolver.config import WriteUtilization
from resolver.hami.hostpid_policy import classify
from resolver.linux.procfs import ProcessHandle
from resolver.reasons import RepairReason, UnresolvedReason
from resolver.repair.quarantine import Blame
from resolver.repair.reported_values import Evidence, Verdict, differs
from resolver.retry import doubled
from resolver.workers import slot_writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from resolver.hami.discovery import Location, Whose
    from resolver.hami.hostpid_policy import Policy
    from resolver.hami.region import RegionView, SharedRegion, Slot

_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.5, 300.0
#: How often a slot without a process is looked at again, at first each pass, then ever more rarely.
_EAGER_LOOKS, _LONGEST_LOOK = 4, 30.0
#: A dead slot can be taken again without a byte of it changing, and on tmpfs without the file's time changing.
_DEAD_LOOK = 1.0
#: So many contested values of one region are put right between passes, too.
FOLLOWED = 16
#: Answers that leave it open whether a process owns the slot: what was dead may have been taken again.
_MAY_LIVE = {
    UnresolvedReason.AMBIGUOUS,
    UnresolvedReason.ACCESS_DENIED,
    UnresolvedReason.TOO_LARGE,
    UnresolvedReason.UNPROVEN,
}
#: One for all: made by a type with parameters, each empty one would be another.
_NOTHING_TOLD: frozenset[tuple[int | None, int]] = frozenset()


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
        "abandoned",
        "announced",
        "conflicts",
        "dead",
        "evidence",
        "guessed",
        "looks",
        "next_look",
        "not_before",
        "owner",
        "reason",
        "repaired",
        "slot",
        "stuck",
        "unsure",
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
        self.abandoned = False  # dead because nobody has the file open, see `resolver.repair.abandoned`
        self.unsure = False  # the file was touched since it was called dead, and nobody has looked yet
        self.looks = 0  # in vain, in a row
        self.next_look = 0.0
        self.written: int | None = None  # the hostpid of our one write to this generation
        self.written_at: int | None = None  # the slot's index at that time
        self.announced = _NOTHING_TOLD  # (device, value) that a dry run has told
        self.guessed = False  # changed since our write, once, as the process's own guess does
        self.conflicts = 0
        self.not_before = 0.0
        self.wrong_since: float | None = None
        self.stuck = ""  # why its sm_util does not stay right; see `resolver.repair.reported_values`
        self.evidence: Evidence | None = None  # while it has an owner

    def due(self, now: float) -> bool:
        """Whether its owner has to be looked for now."""
        return self.owner is None and now >= self.next_look

    def found(self, result: ProcessHandle | UnresolvedReason, now: float) -> None:
        """Take in the answer of a search for the owner."""
        if isinstance(result, ProcessHandle):
            self.owner, self.reason, self.dead, self.looks = result, None, False, 0
            self.abandoned = self.unsure = False
            self.written, self.guessed, self.conflicts, self.not_before = None, False, 0, 0.0
            self.announced = _NOTHING_TOLD
            self.stuck, self.evidence = "", Evidence()
            return
        self.reason = result
        if result is UnresolvedReason.OVER_BUDGET:
            return  # it was not looked for
        self.unsure = False
        if result in _MAY_LIVE:
            self.dead = False
        self.looks += 1
        if self.looks > _EAGER_LOOKS:
            wait = doubled(0.5, _LONGEST_LOOK, self.looks - _EAGER_LOOKS)
            self.next_look = now + (min(wait, _DEAD_LOOK) if self.dead else wait)

    def release(self) -> None:
        """Give the handle of its process back."""
        if self.owner is not None:
            self.owner.close()
        self.owner = None

    def owner_ended(self) -> None:
        """Its process is gone; whether another one took the slot is for the next look to find out."""
        self.release()
        self.dead, self.unsure, self.looks, self.next_look = True, False, 0, 0.0
        self.reason, self.repaired, self.wrong_since = None, None, None
        self.stuck, self.evidence = "", None

    def touched(self) -> None:
        """A process attached to the file, and may have taken this slot again: look once more now, if nobody owns it.

        A change of the slot's own bytes brings no look forward: a tenant can flip them as fast as it likes.
        """
        self.next_look = 0.0
        self.looks = min(self.looks, _EAGER_LOOKS)
        self.unsure = True
        if self.abandoned:  # that was true until now
            self.dead = self.abandoned = False


class RegionRepairs:
    """The slots of one region. ``close`` gives the handles back."""

    def __init__(
        self,
        region: SharedRegion,
        whose: Whose,
        location: Location,
        blame: Blame | None = None,
    ) -> None:
        """``blame`` is what the files of this container did to the writer before."""
        self.region = region
        self.whose = whose
        self.place, self.shown = location
        self.blame = blame or Blame()
        self.view: RegionView | None = None
        self.states: dict[int, SlotState] = {}
        self.odd: dict[int, UnresolvedReason] = {}  # slots without a state of their own, by index
        self._unwritable_until = 0.0
        self._crowded: frozenset[int] = frozenset()  # hostpids that several slots hold
        self._twice: set[int] = set()  # pids that several slots hold
        self._mtime_ns = region.mtime_ns
        self._settled: tuple[object, ...] | None = None  # what the last look was made with, if all was right
        self._waiting = False  # for a value that differs: a watcher may put it right
        self.contested = False  # a watcher writes wrong values here, whenever it ticks

    def observe(self, view: RegionView) -> list[SlotState]:
        """Take in what the region says now; returns the states of slots that are no longer there."""
        if self.region.mtime_ns != self._mtime_ns:
            # A new process touched the file: it may have taken a dead slot again without changing a byte of it.
            self._mtime_ns = self.region.mtime_ns
            for state in self.states.values():
                state.touched()
        if view is self.view:
            return []
        self.view = view
        slots = self._sort(view)
        gone = [self.states.pop(ns_pid) for ns_pid in self.states.keys() - slots.keys() - self._twice]
        for ns_pid, slot in slots.items():
            known = self.states.get(ns_pid)
            if known is None:
                self.states[ns_pid] = SlotState(slot)
            else:
                known.slot = slot
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
        self._settled = (self.view, *inputs) if right and not self.odd and not self._waiting else None

    def settled(self, *inputs: object) -> bool:
        """Whether neither the region nor these inputs (told apart by identity) changed since `settle`."""
        known = self._settled
        return known is not None and all(a is b for a, b in zip(known, (self.view, *inputs), strict=True))

    def unsettle(self) -> None:
        """Something happened that the region does not show, such as the end of a process."""
        self._settled = None

    def unwritable(self, now: float, seconds: float) -> None:
        """It cannot be written: try again after a while, and not with every pass."""
        self._unwritable_until = now + seconds

    def put_off(self, now: float) -> bool:
        """Its container is over its budget: what is due is done later. Whether that is news of any slot."""
        news = False
        for state in self.told_apart():
            waits = state.due(now) or state.wrong_since is not None
            if waits and not state.dead and state.reason is not UnresolvedReason.OVER_BUDGET:
                state.reason, news = UnresolvedReason.OVER_BUDGET, True
        return news

    def _paused(self, now: float) -> UnresolvedReason | None:
        """Why nothing is written into this file now; None if it may be."""
        if self.blame.quarantined(now):
            return UnresolvedReason.QUARANTINED
        return UnresolvedReason.WRITE_FAILED if now < self._unwritable_until else None

    def plan(
        self,
        now: float,
        policy: Policy,
        truth: Callable[[int, str], int | None],
        writes: WriteUtilization,
        on_conflict: Callable[[SlotState, float], None],
        answered: float,
    ) -> Iterator[Order | None]:
        """The words to change now, every ``hostpid`` first. Marks every state with why nothing is done for it.

        Each None is a moment to give way: a thousand slots on sixteen devices take some time.
        ``truth(host_pid, uuid)`` is the utilization in per cent: 0 is idle, None is not known; NVML's answer came at
        ``answered``, on the clock of ``now``. ``on_conflict`` is told the state and the seconds until the next try.
        """
        self._waiting = self.contested = False
        view = self.view
        if view is None:
            return
        right: list[SlotState] = []
        paused = self._paused(now)
        if paused is not None:
            writes = WriteUtilization.NEVER
        for state in self.told_apart():
            order = None
            if state.owner is not None:
                order = self._hostpid(state, state.owner.process.host_pid, now, policy, on_conflict)
                if order is not None and paused is not None:
                    state.reason, order = paused, None
            if state.evidence is not None and (order is not None or state.reason is not None):
                state.evidence.since = None  # no watcher can be right
            if order is not None:
                yield order
            elif (state.dead and not state.unsure) if state.owner is None else state.reason is None:
                right.append(state)
            yield None
        for state in right:
            yield None
            orders = (
                self._zeroes(state)
                if state.owner is None
                else self._values(view, state, truth, now, answered, writes)
            )
            yield from orders if writes is not WriteUtilization.NEVER else ()

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
            if slot.hostpid and not state.guessed:
                state.guessed = True  # the process's own guess; no release guesses 0
            else:
                # Somebody else writes it too.
                wait = doubled(_FIRST_BACKOFF, _LONGEST_BACKOFF, state.conflicts)
                state.conflicts += 1
                state.not_before = now + wait
                on_conflict(state, wait)
            state.written = None
        if now < state.not_before:
            state.reason = UnresolvedReason.CONFLICT
            return None
        offset = self.region.layout.hostpid_word(slot.index)
        expected, new = slot_word(slot.pid, slot.hostpid), slot_word(slot.pid, wanted)
        state.reason = None  # of before: in a dry run nobody else takes it away
        return Order(
            state,
            slot=slot.index,
            device=None,
            reason=wrong,
            guard_offset=offset,
            guard=expected,
            target_offset=offset,
            expected=expected,
            new=new,
        )

    def _zeroes(self, state: SlotState) -> list[Order]:
        """For the dead."""
        used = [(device, present) for device, present in enumerate(state.slot.sm_util) if present]
        return [self._value(state, device, present, 0) for device, present in used]

    def _values(
        self,
        view: RegionView,
        state: SlotState,
        truth: Callable[[int, str], int | None],
        now: float,
        answered: float,
        writes: WriteUtilization,
    ) -> list[Order]:
        """What NVML saw, for the living, where no watcher puts that there."""
        if state.owner is None or state.evidence is None:
            return []
        host_pid, evidence = state.owner.process.host_pid, state.evidence
        if evidence.since is None:
            evidence.since = now
        orders = []
        for device, present in enumerate(state.slot.sm_util):
            actual = truth(host_pid, view.uuids[device])
            if actual is None:
                continue
            word = evidence.word(device, present)
            verdict = word.judge(present, actual, answered, evidence.since, now)
            self._waiting |= verdict is not Verdict.RIGHT
            if writes is not WriteUtilization.NEVER and word.contested and actual:
                self.contested = True
            if verdict is Verdict.WRONG or (writes is WriteUtilization.ALWAYS and present != actual):
                orders.append(self._value(state, device, present, actual))
        return orders

    def lingering(self) -> Iterator[tuple[int, str]]:
        """Host PID and device of values above 0 that are ours, or on a device that no release up to 2.9.0 zeroes."""
        for state in self.told_apart():
            if self.view is None or state.owner is None or state.evidence is None:
                continue
            for device, word in state.evidence.words.items():
                if word.seen and (device > 0 or word.ours) and device < len(self.view.uuids):
                    yield state.owner.process.host_pid, self.view.uuids[device]

    def follow(self, read: Callable[[int], int | None], now: float) -> Iterator[Order]:
        """Put contested values right between two passes; ``read`` gives the 8-byte word at an offset of the file.

        At most `FOLLOWED` of them in one region: the tenant pays for what it makes us do with its own values.
        """
        followed = 0
        for state in self.told_apart():
            if state.owner is None or state.evidence is None or state.reason is not None:
                continue
            for device in state.evidence.contested():
                followed += 1
                if followed > FOLLOWED:
                    return
                word = state.evidence.words[device]
                offset = self.region.layout.sm_util_offset(state.slot.index, device)
                present = read(offset) if offset is not None else None
                if present is None or word.actual is None or present == word.seen:
                    continue
                word.see(present, now)
                if differs(present, word.actual):
                    yield self._value(state, device, present, word.actual)

    def _value(self, state: SlotState, device: int, present: int, value: int) -> Order:
        slot, layout = state.slot, self.region.layout
        offset = layout.sm_util_offset(slot.index, device)
        if offset is None:
            raise AssertionError(f"{layout.name} has no sm_util, and a slot of it cannot have values")
        guard_offset, guard = layout.hostpid_word(slot.index), slot_word(slot.pid, slot.hostpid)
        return Order(
            state,
            slot=slot.index,
            device=device,
            reason=None,
            guard_offset=guard_offset,
            guard=guard,
            target_offset=offset,
            expected=present,
            new=value,
        )

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
    message = bytearray(slot_writer.HEAD.pack(file_bytes, len(orders)))
    handles: list[int] = []
    for order in orders:
        owner = order.state.owner
        handle = -1
        if owner is not None:
            handle = len(handles)
            handles.append(owner.fd)
        message += slot_writer.ORDER.pack(
            handle,
            bool(owner and owner.is_pidfd),
            order.guard_offset,
            order.guard,
            order.target_offset,
            order.expected,
            order.new,
        )
    return bytes(message), handles
