"""Plan of repairs: the errors in one region, slot by slot, and the words to write. Does no I/O.

A slot *generation* is one process holding one slot, at any index, because slots move. Its ``hostpid`` is written once,
and again after the process's guess, seconds after HAMi took the slot. Further changes are conflicts and delay the next
attempt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from resolver.base.reasons import RepairReason, UnresolvedReason
from resolver.base.retry import doubled
from resolver.config import HostpidNamespace, WriteUtilization
from resolver.hami.hostpid_policy import FILLS_NOTHING, WatcherFinding, classify
from resolver.repair.quarantine import Blame
from resolver.repair.region_slots import RegionSlots
from resolver.repair.reported_values import Verdict, reordering
from resolver.repair.slot_states import SlotState
from resolver.workers import slot_writer

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    from resolver.hami.discovery import Location, Ownership
    from resolver.hami.hostpid_policy import HostpidPolicy
    from resolver.hami.layout import Layout
    from resolver.hami.region import RegionView, SharedRegion
    from resolver.linux.procfs import ProcessHandle
    from resolver.state import HamiCounts

_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.5, 300.0
#: The owner is not known yet.
_NOT_LOOKED = {
    None,
    UnresolvedReason.OVER_BUDGET,
    UnresolvedReason.TOO_SLOW,
    UnresolvedReason.ACCESS_DENIED,
    UnresolvedReason.TOO_LARGE,
}
#: Seconds after an end in which other watchers may refill its slot from older samples, and seconds between two writes
#: of zeroes: watchers refill at each tick.
_REFILLED_SECONDS, _ZERO_AGAIN_SECONDS = 2.0, 0.4


class Order(NamedTuple):
    """A word to change. ``device`` is None for a ``hostpid``."""

    state: SlotState
    owner: ProcessHandle | None  # when it was given
    slot: int
    device: int | None
    reason: RepairReason | None
    guard_offset: int
    guard: int
    target_offset: int
    expected: int
    new: int


class RegionRepairs(RegionSlots):
    """Repairs of one region. ``close`` releases handles."""

    def __init__(
        self,
        region: SharedRegion,
        ownership: Ownership,
        location: Location,
        blame: Blame | None = None,
    ) -> None:
        """Take ``blame``, of writer failures caused by the container's files."""
        super().__init__(region, ownership, location)
        self.blame = blame or Blame()
        self._refilled_until, self._zeroed_at = 0.0, float("-inf")
        self._inputs: tuple[object, ...] = ()  # of the last plan
        self.unwritable_until = 0.0  # nothing is written before, for this reason
        self.unwritable = UnresolvedReason.WRITE_FAILED
        #: The file certainly belongs to its container: not while another pod uses one that all can reach.
        self._certain = not self.proof.open
        self.counts: HamiCounts | None = None  # of HAMi-core
        self.counts_due = 0.0
        self.held: list[
            Order
        ] = []  # words that a watcher sets wrong whenever it ticks, with their right values
        self.not_held_until = 0.0  # they changed too often
        self.planned = 0.0  # at the last plan
        self.right = False  # at the last plan: each hostpid, one of a process found since the last attachment
        self.finding: WatcherFinding | None = None  # the watcher's evidence on the policy
        self.numbers: set[HostpidNamespace] = set()  # with which watchers found samples

    def stirs(self, now: float, *inputs: object, ahead: float = 0.0) -> bool:
        """Check for work, or a search due within ``ahead`` seconds; new ``inputs`` recheck every slot."""
        inputs = (*inputs, self._paused(now))
        if inputs != self._inputs:
            self._inputs = inputs
            self.unsettle()
        if now >= self._refilled_until:
            self._refilled_until = 0.0
        return self._settled != self._changes or now + ahead >= self._next_look

    def quiet_until(self) -> float:
        """Return the monotonic time until which only events cause work; 0 is now."""
        return 0.0 if self._settled != self._changes or self._refilled_until else self._next_look

    def _paused(self, now: float) -> UnresolvedReason | None:
        """Return why not to write now, if so."""
        if self.blame.quarantined(now):
            return UnresolvedReason.QUARANTINED
        uncertain = self._uncertain()
        if uncertain is not None:
            return uncertain
        return self.unwritable if now < self.unwritable_until else None

    def _uncertain(self) -> UnresolvedReason | None:
        """Return why the file may not be its container's; None once that was certain.

        Directories may have been exchanged before the daemon started. After a slot of the container without one of
        another pod, other pods are only guests.
        """
        if not self._certain:
            states = self.distinguished()
            reasons = self.unowned.reasons() | {state.reason for state in states if state.owner is None}
            if UnresolvedReason.OTHER_POD in reasons:
                return UnresolvedReason.OTHER_POD
            if reasons & _NOT_LOOKED:
                return UnresolvedReason.OVER_BUDGET
            self._certain = any(state.owner is not None for state in states)
        return None

    def plan(
        self,
        now: float,
        policy: HostpidPolicy,
        actual_utilization: Callable[[int, str], int | None],
        writes: WriteUtilization,
        on_conflict: Callable[[SlotState, float], None],
        answered: float,
        idle: Container[str] = (),
    ) -> Iterator[Order | None]:
        """Yield the words to change now, every ``hostpid`` first, and set each state's reason for not writing.

        None is a chance to yield to other work. ``actual_utilization(host_pid, uuid)`` is in per cent or None, from
        NVML's answer at ``answered``; devices in ``idle`` have no load by their own samples. ``on_conflict`` gets the
        seconds until the next attempt.
        """
        changes, settled = self._changes, True  # copied first: `_settled` must not pass later changes
        self.held, self.planned, self._settled = [], now, -1
        view = self.view
        if view is None:
            return
        right: list[SlotState] = []
        paused = self._paused(now)
        if paused is not None:
            writes = WriteUtilization.NEVER
        for state in self.distinguished():
            yield None
            if state.owner is None:
                if state.dead and not state.unsure:
                    right.append(state)
                continue
            order = self._hostpid(state, state.owner.process.host_pid, now, policy, on_conflict)
            if order is not None and paused is not None:
                state.reason, order = paused, None
            if order is None and state.reason in (None, UnresolvedReason.DRIVER_UNKNOWN):
                right.append(state)  # then only its watcher's values are taken as evidence
                continue
            settled = False
            if state.evidence is not None:
                state.evidence.since = None  # no watcher can be right
            if order is not None:
                yield order
        self.right = settled and not self.unclear()
        self.right = self.right and any(state.owner is not None and not state.followed for state in right)
        for state in right:
            yield None
            if state.owner is None:
                orders, calm = self._zeroes(state, now), not any(state.slot.sm_util)
            else:
                allowed = writes if state.reason is None else WriteUtilization.NEVER
                orders, calm = self._values(view, state, actual_utilization, now, answered, allowed, idle)
                orders = orders if state.reason is None else []
            settled = settled and calm and not orders
            yield from orders if writes is not WriteUtilization.NEVER else ()
        self._settled = changes if settled else -1
        yield from self._zero_unowned(view, writes, now)

    def _zero_unowned(self, view: RegionView, writes: WriteUtilization, now: float) -> Iterator[Order | None]:
        """Yield orders to zero slots of ended processes and copies left by moves.

        HAMi's monitors up to 2.9 add them up.
        """
        slots, found = view.slots, False
        for index in slots.loaded() if writes is not WriteUtilization.NEVER else ():
            if slots.vacant(index):
                state = SlotState(slots[index])
                state.dead = True
            elif self.unowned.dead(index):
                state = self.at(index)
            else:
                continue
            found = True
            yield None
            yield from self._zeroes(state, now)
        if found:
            self._refilled_until = now + _REFILLED_SECONDS
            self._settled = -1  # they are checked again until they are 0

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
        if state.doubted:
            state.reason = UnresolvedReason.OVER_BUDGET
            return None
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
            # A move copied the slot before our write and left it behind: no other writer.
            state.written = state.written_at = None
        if state.written is not None and slot.hostpid != state.written:
            if slot.hostpid and not state.guessed:
                state.guessed = True  # the process's own guess; no release guesses 0
            else:
                # Another writer changes it, too.
                wait = doubled(_FIRST_BACKOFF, _LONGEST_BACKOFF, state.conflicts)
                state.conflicts += 1
                state.not_before = now + wait
                on_conflict(state, wait)
            state.written = None
        if now < state.not_before:
            state.reason = UnresolvedReason.CONFLICT
            return None
        offset = self.region.layout.slot_offset(slot.index)
        expected, new = slot_word(slot.pid, slot.hostpid), slot_word(slot.pid, wanted)
        state.reason = None  # clear the old reason; a dry run never does
        return Order(
            state,
            owner=state.owner,
            slot=slot.index,
            device=None,
            reason=wrong,
            guard_offset=offset,
            guard=expected,
            target_offset=offset,
            expected=expected,
            new=new,
        )

    def _zeroes(self, state: SlotState, now: float) -> list[Order]:
        """Return orders that zero a dead slot; later if others were just zeroed before."""
        if self._zeroed_at < now < self._zeroed_at + _ZERO_AGAIN_SECONDS:
            return []
        if any(state.slot.sm_util):
            self._zeroed_at = now
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
        idle: Container[str],
    ) -> tuple[list[Order], bool]:
        """Return orders that copy NVML's values to an owned slot, and True if all are right and uncontested.

        Values that watchers update are not ordered.
        """
        orders: list[Order] = []
        if state.owner is None or state.evidence is None:
            return orders, False
        calm = True
        host_pid, evidence = state.owner.process.host_pid, state.evidence
        if evidence.since is None:
            evidence.since = now
        held = writes is not WriteUtilization.NEVER and now >= self.not_held_until
        for device, present in enumerate(state.slot.sm_util):
            actual = actual_utilization(host_pid, view.uuids[device])
            if actual is None:
                continue
            word = evidence.word(device, present)
            idles = view.uuids[device] in idle
            verdict = word.judge(present, actual, answered, evidence.since, now, idle=idles)
            calm = calm and verdict is Verdict.RIGHT
            if word.disputed and state.variables and reordering(state.variables[1], view.uuids):
                word.disputed = False  # the watcher's value is another GPU's
            if not actual and not word.enough_for_zero():
                continue
            if held and word.contested:
                self.held.append(self._value(state, device, present, actual))
            if verdict is Verdict.WRONG or (writes is WriteUtilization.ALWAYS and present != actual):
                orders.append(self._value(state, device, present, actual))
        return orders, calm and evidence.calm(held=held)

    def note_finding(self, now: float, refused: Container[str]) -> None:
        """Note what the container's watcher shows of the policy; a process with one number for both shows nothing.

        The driver refuses the older call for samples of the devices in ``refused``. A library without the newer one
        does not get it while it runs.
        """
        findings: set[WatcherFinding | None] = set()
        self.numbers = set()
        blind = self.blind(refused)
        for state in self.distinguished():
            if state.owner is not None and state.evidence is not None:
                host_pid, *inside = state.owner.process.ns_pids
                if len(inside) == 1 and host_pid not in inside:
                    findings.add(finding := state.evidence.finding(now, blind))
                    if finding is WatcherFinding.CONFIRMS and state.slot.hostpid in (host_pid, *inside):
                        by_host = state.slot.hostpid == host_pid
                        self.numbers.add(HostpidNamespace.HOST if by_host else HostpidNamespace.CONTAINER)
        unable = WatcherFinding.UNABLE if findings and self.finding is WatcherFinding.UNABLE else None
        self.finding = next((each for each in WatcherFinding if each in findings), unable)
        if self.finding is WatcherFinding.DOUBTS and self.region.layout.name != FILLS_NOTHING:
            # With another order of GPUs than NVML's, watchers write a GPU's value into another's place.
            orders = {state.variables[1] if state.variables else None for state in self.distinguished()}
            self.finding = WatcherFinding.CONTRADICTS if orders == {""} else self.finding

    def blind(self, refused: Container[str]) -> set[int]:
        """Return the positions of these devices."""
        return {n for n, uuid in enumerate(self.view.uuids if self.view else ()) if uuid in refused}

    def _value(self, state: SlotState, device: int, present: int, value: int) -> Order:
        slot, layout, view = state.slot, self.region.layout, self.view
        offset = layout.sm_util_offset(slot.index, device)
        if offset is None:
            raise AssertionError(f"{layout.name} has no sm_util, and a slot of it cannot have values")
        guard_offset, guard = layout.slot_offset(slot.index), slot_word(slot.pid, slot.hostpid)
        if view is not None and slot.index >= view.proc_num:
            # A process that takes this slot counts it in before it says any load there: both are one aligned word.
            guard_offset, guard = layout.proc_num, slot_word(view.proc_num, view.utilization_switch)
        return Order(
            state,
            owner=state.owner,
            slot=slot.index,
            device=device,
            reason=None,
            guard_offset=guard_offset,
            guard=guard,
            target_offset=offset,
            expected=present,
            new=value,
        )


def slot_word(pid: int, hostpid: int) -> int:
    """Return a slot's 8-byte word: low half ``pid``, high half ``hostpid``."""
    return (pid & 0xFFFFFFFF) | (hostpid & 0xFFFFFFFF) << 32


def encode(
    orders: list[Order], layout: Layout, hold: tuple[int, int] | None = None
) -> tuple[bytes, list[int]]:
    """Return orders in the writer's format, and their handles' descriptors.

    ``hold``: the file's key and the corrections allowed in a second; then the words are held.
    """
    message = bytearray(
        slot_writer.HEAD.pack(layout.file_bytes, len(orders) | (slot_writer.HOLDS if hold else 0))
    )
    message += slot_writer.HOLD.pack(*hold) if hold else b""
    handles: list[int] = []
    for order in orders:
        owner, handle = order.owner, -1
        if owner is not None:
            if owner.fd not in handles:
                handles.append(owner.fd)
            handle = handles.index(owner.fd)
        message += slot_writer.ORDER.pack(
            handle,
            bool(owner and owner.is_pidfd),
            order.guard_offset,
            order.guard,
            order.target_offset,
            order.expected,
            order.new,
        )
    message += slot_writer.SLOTS.pack(layout.procs, layout.slot_size, layout.owner_pid)
    return bytes(message), handles
