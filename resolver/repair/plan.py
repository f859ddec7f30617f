"""Decides, slot by slot, what is wrong in one region and what to write. Reads and writes nothing itself.

A slot *generation* is one process holding one slot: the region's file, the PID in the slot, and the process
(with its start time) that was found to own it. Its place in the array does not count, slots move. Within a
generation ``hostpid`` is written once, and once more after the process's own guess: HAMi takes the slot before CUDA
starts and guesses after it, up to seconds after our repair. Any further change is a conflict, and the next try waits.
"""

from __future__ import annotations

from array import array
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from resolver.config import WriteUtilization
from resolver.hami.discovery import PodFile
from resolver.hami.hostpid_policy import classify
from resolver.reasons import RepairReason, UnresolvedReason
from resolver.repair.quarantine import Blame
from resolver.repair.reported_values import Verdict, differs
from resolver.repair.slot_states import UnownedSlots
from resolver.retry import doubled
from resolver.workers import slot_writer

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    from resolver.hami.discovery import Location, Whose
    from resolver.hami.hostpid_policy import HostpidPolicy
    from resolver.hami.region import RegionView, SharedRegion
    from resolver.repair.slot_states import SlotState

_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.5, 300.0
#: Nothing is known yet of whose a slot is.
_NOT_LOOKED = {None, UnresolvedReason.OVER_BUDGET, UnresolvedReason.ACCESS_DENIED, UnresolvedReason.TOO_LARGE}
#: So many contested values of one region are put right between passes, too.
FOLLOWED = 16


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


class RegionRepairs:
    """The slots of one region. ``close`` gives the handles back."""

    __slots__ = (
        "_attached",
        "_certain",
        "_inputs",
        "_mtime_ns",
        "_news",
        "_next_look",
        "_open",
        "_planned",
        "_twice",
        "_unowned",
        "_unwritable_until",
        "_was_paused",
        "blame",
        "contested",
        "place",
        "region",
        "shown",
        "states",
        "view",
        "whose",
    )

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
        self.states: dict[int, SlotState] = {}  # by PID: those with an owner, or that are being worked on
        self._unowned = UnownedSlots(0)  # all others
        self._twice: set[int] = set()  # pids that several slots hold
        self._open: dict[int, SlotState] = {}  # the states that may need something
        self._planned: list[SlotState] = []  # those that the last plan was about
        self._news = True  # something else than states may need something
        self._next_look = 0.0
        self._inputs: tuple[object, ...] = ()  # what the last plan was made with
        self._was_paused: UnresolvedReason | None = None
        self._unwritable_until = 0.0
        self._mtime_ns = region.mtime_ns
        self._attached = False  # since the last look
        #: Whether it is certain whose the file is: not while another pod uses one that all can reach.
        self._certain = not isinstance(self.place, PodFile)
        self.contested = False  # a watcher writes wrong values here, whenever it ticks

    # -- what changed -------------------------------------------------------------------------------

    def attached(self) -> None:
        """A process wrote into the file: it may take a dead slot again without changing a byte of it."""
        self._attached = True

    def observe(self, view: RegionView) -> list[SlotState]:
        """Take in what the region says now; returns the states of slots that are no longer there."""
        if self._attached or self.region.mtime_ns != self._mtime_ns:
            attached, self._attached = self._attached, False
            self._mtime_ns = self.region.mtime_ns
            for state in self.states.values():
                state.touched(attached=attached)
            self._unowned.touched()
            self._next_look = 0.0
            self.unsettle()
        if view is self.view:
            return []
        before, self.view = self.view, view
        self._news = True
        if before is None or before.uuids != view.uuids or not view.slots.same_pids(before.slots):
            gone = self._sort(view, before)
            self.unsettle()
            return gone
        for index in view.slots.changed(before.slots):
            held = self.states.get(view.slots.pid(index))
            if held is not None and held.slot.index == index:
                held.slot = view.slots[index]
                self._reopen(held)
        return []

    def _sort(self, view: RegionView, before: RegionView | None) -> list[SlotState]:
        """Whose slot is where now; those that have none of their own are odd."""
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
        known = {ns_pid: index for index, ns_pid in were if index in self._unowned}
        for ns_pid, index in found.items():
            if ns_pid in self.states:
                self.states[ns_pid].slot = slots[index]
            elif ns_pid in known:
                unowned.move(index, self._unowned, known[ns_pid])
            else:
                unowned.begin(index)
                self._next_look = 0.0
        gone = [self.states.pop(ns_pid) for ns_pid in self.states.keys() - found.keys() - twice]
        for state in gone:
            self._open.pop(state.slot.pid, None)
        self._unowned, self._twice = unowned, twice
        return gone

    def values_changed(self, host_pids: Container[int] | None) -> bool:
        """NVML says something else of these processes than before (None: of any); whether one owns a slot here."""
        known = False
        for state in self.states.values():
            if state.owner is not None and (host_pids is None or state.owner.process.host_pid in host_pids):
                self._reopen(state)
                known = True
        return known

    def ended(self, state: SlotState) -> bool:
        """A process that owned a slot has ended; whether the slot was one of these."""
        if self.states.get(state.slot.pid) is not state:
            return False
        self._reopen(state)
        self._next_look = 0.0
        return True

    def abandon(self) -> None:
        """Nobody has the file open any more: its unowned slots are dead."""
        for state in self.distinguished():
            if state.owner is None and state.reason is UnresolvedReason.NO_SUCH_PROCESS:
                state.dead = state.abandoned = True
        self._unowned.abandon()
        self.unsettle()

    def unsettle(self) -> None:
        """Look at every slot anew."""
        self._news = True
        for state in self.states.values():
            self._reopen(state)

    def _reopen(self, state: SlotState) -> None:
        self._open[state.slot.pid] = state
        state.shown = None

    # -- what is known ------------------------------------------------------------------------------

    @property
    def odd(self) -> dict[int, UnresolvedReason]:
        """The slots without a state of their own, by index."""
        return self._unowned.odd()

    def distinguished(self) -> list[SlotState]:
        """The states of slots that are the only one with their PID, as far as they have one."""
        return [state for ns_pid, state in self.states.items() if ns_pid not in self._twice]

    def unclear(self) -> bool:
        """Whether there is a slot of which it is not known whose it is, or that it is dead."""
        return self._unowned.unclear() or any(
            state.owner is None and not state.dead for state in self.distinguished()
        )

    def unowned_codes(self) -> bytes:
        """What is to be said of each slot without a state, by index; see `UnownedCode`."""
        return self._unowned.codes()

    def changed(self) -> list[SlotState]:
        """The states of which something may be new since they were last shown."""
        return [
            state
            for ns_pid, state in self.states.items()
            if (state.shown is None or ns_pid in self._open) and ns_pid not in self._twice
        ]

    def planned(self) -> list[SlotState]:
        """The states that the last plan was about."""
        return self._planned

    # -- whether there is anything to do ------------------------------------------------------------

    def stirs(self, now: float, *inputs: object, ahead: float = 0.0) -> bool:
        """Whether anything is to be done. With other ``inputs`` than last time, every slot is checked anew.

        An owner is looked for that is due within ``ahead`` seconds.
        """
        # Said as plainly as this where it is asked for every region: each call costs as much as what it does.
        settled = self._certain and now >= self.blame.until and now >= self._unwritable_until
        paused = None if settled else self._paused(now)
        if inputs != self._inputs or paused is not self._was_paused:
            self._inputs, self._was_paused = inputs, paused
            self.unsettle()
        return self._news or bool(self._open) or now + ahead >= self._next_look

    def quiet_until(self) -> float:
        """Before this nothing is to be done, on the monotonic clock, unless something happens; 0: look again."""
        return 0.0 if self._news or self._open else self._next_look

    def due(self, now: float) -> array[int]:
        """Indexes of the slots whose owner has to be looked for now, from the last one to the first."""
        if now < self._next_look:
            return array("h")
        due = self._unowned.due(now)
        due.extend(state.slot.index for state in self.distinguished() if state.due(now))
        due.reverse()
        return due

    def at(self, index: int) -> SlotState:
        """The state of a slot that is due; see `put_back`."""
        slots = self.view.slots if self.view is not None else ()
        slot = slots[index]
        if index not in self._unowned:
            return self.states[slot.pid]
        state = self._unowned.take(slot)
        self.states[state.slot.pid] = state
        self._reopen(state)
        return state

    def put_back(self, state: SlotState) -> None:
        """Keep only what has to be kept of it, if nobody owns it."""
        ns_pid = state.slot.pid
        if state.is_unowned() and ns_pid not in self._twice:
            del self.states[ns_pid], self._open[ns_pid]
            self._unowned.put(state)

    def rest(self) -> None:
        """All that could be done now was."""
        for state in list(self._open.values()):
            self.put_back(state)
        looks = (state.next_look for state in self._open.values() if state.owner is None)
        self._next_look = min(min(looks, default=inf), self._unowned.next_look())
        self._planned = []

    def unwritable(self, now: float, seconds: float) -> None:
        """It cannot be written: try again after a while, and not with every pass."""
        self._unwritable_until = now + seconds

    def put_off(self, now: float) -> bool:
        """Its container is over its budget: what is due is done later. Whether that is news of any slot."""
        news = self._unowned.put_off(now)
        for state in self._open.values():
            waits = state.due(now) or state.wrong_since is not None
            waits = waits and state.slot.pid not in self._twice
            if waits and not state.dead and state.reason is not UnresolvedReason.OVER_BUDGET:
                state.reason, news = UnresolvedReason.OVER_BUDGET, True
        return news

    def _paused(self, now: float) -> UnresolvedReason | None:
        """Why nothing is written into this file now; None if it may be."""
        if self.blame.quarantined(now):
            return UnresolvedReason.QUARANTINED
        uncertain = self._uncertain()
        if uncertain is not None:
            return uncertain
        return UnresolvedReason.WRITE_FAILED if now < self._unwritable_until else None

    def _uncertain(self) -> UnresolvedReason | None:
        """Why it isn't certain that the file is the container's that it is named after; None once it was.

        Somebody may have exchanged directories before we came: then processes of another pod have slots in it. Once
        none had, and ours did, who comes later is only a guest.
        """
        if not self._certain:
            states = self.distinguished()
            reasons = self._unowned.reasons() | {state.reason for state in states if state.owner is None}
            if UnresolvedReason.OTHER_POD in reasons:
                return UnresolvedReason.OTHER_POD
            if reasons & _NOT_LOOKED:
                return UnresolvedReason.OVER_BUDGET
            self._certain = any(state.owner is not None for state in states)
        return None

    # -- the plan -----------------------------------------------------------------------------------

    def plan(
        self,
        now: float,
        policy: HostpidPolicy,
        actual_utilization: Callable[[int, str], int | None],
        writes: WriteUtilization,
        on_conflict: Callable[[SlotState, float], None],
        answered: float,
    ) -> Iterator[Order | None]:
        """The words to change now, every ``hostpid`` first. Marks every state with why nothing is done for it.

        It is about the slots that changed, or of which something else is new; a state stays open until nothing is to
        be done for it. Each None is a moment to give way: a thousand slots on sixteen devices take some time.
        ``actual_utilization(host_pid, uuid)`` is the utilization in per cent: 0 is idle, None is not known.
        NVML's answer came at ``answered``, on the clock of ``now``. ``on_conflict`` gets the state and the seconds
        until the next try.
        """
        self.contested = False
        view = self.view
        if view is None:
            return
        right: list[SlotState] = []
        paused = self._paused(now)
        if paused is not None:
            writes = WriteUtilization.NEVER
        self._planned = [state for ns_pid, state in self._open.items() if ns_pid not in self._twice]
        for state in self._planned:
            state.shown = None
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
            if state.owner is None:
                orders, calm = self._zeroes(state), False
            else:
                orders, calm = self._values(view, state, actual_utilization, now, answered, writes)
            if calm and not orders:
                self._open.pop(state.slot.pid, None)
            yield from orders if writes is not WriteUtilization.NEVER else ()
        yield from self._zero_unowned(view, writes)

    def _zero_unowned(self, view: RegionView, writes: WriteUtilization) -> Iterator[Order | None]:
        """The load is taken away from dead slots; after the last one there is no more news."""
        dead = self._unowned.dead(view.slots.loaded()) if writes is not WriteUtilization.NEVER else ()
        for index in dead:
            yield None
            yield from self._zeroes(self.at(index))
        self._news = bool(dead)  # they are checked again until they are 0

    def _hostpid(
        self,
        state: SlotState,
        host_pid: int,
        now: float,
        policy: HostpidPolicy,
        on_conflict: Callable[[SlotState, float], None],
    ) -> Order | None:
        slot = state.slot
        wanted = policy.wanted(host_pid, slot.pid)
        if wanted is None:
            state.reason = UnresolvedReason.DRIVER_UNKNOWN
            return None
        other = slot.pid if wanted == host_pid else host_pid
        shared = self.view is not None and slot.hostpid != wanted and self.view.slots.crowded(slot.hostpid)
        wrong = classify(slot.hostpid, wanted, other, shared=shared)
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
        actual_utilization: Callable[[int, str], int | None],
        now: float,
        answered: float,
        writes: WriteUtilization,
    ) -> tuple[list[Order], bool]:
        """What NVML saw, for the living, where no watcher puts that there; and whether nothing more is to come of it.

        That is so while each value is right and nobody contests it: `Word.judge` would say the same again until the
        slot or NVML says something else.
        """
        orders: list[Order] = []
        if state.owner is None or state.evidence is None:
            return orders, False
        calm = True
        host_pid, evidence = state.owner.process.host_pid, state.evidence
        if evidence.since is None:
            evidence.since = now
        for device, present in enumerate(state.slot.sm_util):
            actual = actual_utilization(host_pid, view.uuids[device])
            if actual is None:
                continue
            word = evidence.word(device, present)
            verdict = word.judge(present, actual, answered, evidence.since, now)
            calm = calm and verdict is Verdict.RIGHT
            if writes is not WriteUtilization.NEVER and word.contested and actual:
                self.contested = True
            if verdict is Verdict.WRONG or (writes is WriteUtilization.ALWAYS and present != actual):
                orders.append(self._value(state, device, present, actual))
        return orders, calm and evidence.calm()

    def lingering(self) -> Iterator[tuple[int, str]]:
        """Host PID and device of values above 0 that are ours, or on a device that no release up to 2.9.0 zeroes."""
        for state in self.distinguished():
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
        for state in self.distinguished():
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
        self._open.clear()
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
