"""One region: its file and container, its slots, when they need work, its watchers' evidence, and its report."""

import time
from collections.abc import Callable, Container, Iterator
from math import inf

from resolver.base.budget import Account
from resolver.base.reasons import UnresolvedReason
from resolver.config import HostpidNamespace, WriteUtilization
from resolver.gpu.attribution import Joined
from resolver.hami.discovery import Location, Ownership
from resolver.hami.hostpid_policy import FILLS_NOTHING, WatcherFinding
from resolver.hami.region import RegionView, SharedRegion
from resolver.repair.plan import Inputs, Order, leftovers, plan_slot, value_order, zeroes
from resolver.repair.reported_values import TWO_TICKS
from resolver.repair.schedule import STARTED, Schedule, aligned
from resolver.repair.slots import SOON_SECONDS, OwnedSlot, RegionSlots
from resolver.state import Counted, HamiCounts, LimitState, RegionReport, SlotReport, SlotReports
from resolver.workers.lanes import TenantReader

#: Seconds between two writes of zeroes to ended processes' slots: other watchers refill them at each tick.
_ZERO_AGAIN_SECONDS = 0.4
#: Seconds after a zeroing in which other watchers may refill the slot from older samples.
_REFILLED_SECONDS = 2.0
#: Seconds after which held words are reviewed though nothing changed: their reports show if a watcher is still wrong.
REPORT_SECONDS = 9.9
_UNWRITABLE_SECONDS = 5.0
_COUNTS_SECONDS = 1.0
#: Seconds without holds in a file whose words changed faster than watchers write.
_TOO_OFTEN_SECONDS = 10.0
#: Reasons with which the owner may still be found.
_NOT_LOOKED = {
    None,
    UnresolvedReason.OVER_BUDGET,
    UnresolvedReason.TOO_SLOW,
    UnresolvedReason.ACCESS_DENIED,
    UnresolvedReason.TOO_LARGE,
}


class RegionRepairs:
    """Repairs of one region. ``record`` is its account's record."""

    def __init__(
        self,
        region: SharedRegion,
        ownership: Ownership,
        location: Location,
        record: Account,
        attached: float = 0.0,
    ) -> None:
        self.region, self.ownership, self.record = region, ownership, record
        self.schedule = Schedule(attached)
        self.report: RegionReport | None = None  # of the last turn
        self.proof, self.shown = location
        self.slots = RegionSlots()
        self.work_at = 0.0  # time of the next work even without a change; 0 is now
        self._pause: UnresolvedReason | None = None  # why the last plan wrote nothing
        self._mtime_ns = region.mtime_ns
        self.attached = False  # a process, since the last read: it may reuse a dead slot unchanged
        self._came = False  # the slot owner of the last attachment was found
        self._zeroed_at = -inf
        self._unwritable_until, self._unwritable = 0.0, UnresolvedReason.WRITE_FAILED
        #: The file certainly belongs to its container; False while another pod uses a file that all pods reach.
        self._certain = not self.proof.open
        self.counts: HamiCounts | None = None  # of HAMi-core
        self._counts_due = 0.0
        self.held: list[Order] = []  # of the last plan
        self._adds = False  # watchers add to values instead of setting them
        self.conflicts: list[OwnedSlot] = []  # met by the last plan
        self.not_held_until = 0.0  # words changed too often: no holds until then
        self.right = False  # each hostpid was, at the last plan, and no slot's owner was unclear
        self.started = False  # right, and each process has guessed or had a minute to
        self.finding: WatcherFinding | None = None  # the watcher's evidence on the policy
        self.numbers: set[HostpidNamespace] = set()  # with which watchers found samples

    @property
    def view(self) -> RegionView:
        return self.slots.view

    @property
    def closed(self) -> bool:
        """True once the region is given up, which may happen during an ``await``."""
        return self.region.fd < 0

    def observe(self, view: RegionView, *, watched: bool = False) -> list[OwnedSlot]:
        """Update the slots from a view; return owned slots that vanished.

        ``watched``: the kernel reports attaching processes, and only those can hide a move. Without a report, a new
        file time comes from stores.
        """
        if self.attached or self.region.mtime_ns != self._mtime_ns:
            attached, self.attached = self.attached, False
            self._mtime_ns = self.region.mtime_ns
            self.slots.touched(attached=attached)
            self.unsettle()
            self._came = self._came and not attached
            if attached or not watched:
                self.region.start_with()  # read all slots: a move may have been missed
        if view is self.view:
            return []
        self.unsettle()
        return self.slots.take(view)

    def unsettle(self) -> None:
        """Check every slot again, as soon as the region is read."""
        self.work_at = 0.0

    def values_changed(self, host_pids: Container[int] | None) -> None:
        """Note new NVML values of these processes (None: of any)."""
        owners = (state.owner.process.host_pid for state in self.slots.owned.values())
        if any(host_pids is None or host_pid in host_pids for host_pid in owners):
            self._read_soon()

    def ended(self, state: OwnedSlot) -> None:
        """Note an owner's end."""
        self.slots.ended(state)
        self._read_soon()

    def abandon(self) -> None:
        """Mark the unowned slots as dead: no process has the file open."""
        self.slots.abandon()
        self._read_soon()

    def _read_soon(self) -> None:
        self.unsettle()
        self.schedule.by(time.monotonic())

    def has_work(self, now: float) -> bool:
        """Check for work: it is due, or writing was paused or resumed since the last plan."""
        return now + SOON_SECONDS >= self.work_at or self._paused(now) is not self._pause

    def rest(self, interval: float, *, watched: bool) -> None:
        """Schedule the next read; ``watched``: the kernel reports attaching processes."""
        self.schedule.looked(
            interval, watched=watched, work_at=self.work_at, right=self.right, started=self.started
        )
        last = self.schedule.last
        if last < self._zeroed_at + _REFILLED_SECONDS:  # a watcher may refill a value
            self.schedule.by(aligned(last, interval))

    def _paused(self, now: float) -> UnresolvedReason | None:
        """Return why nothing may be written now.

        A file that all pods reach may be another container's: directories may have been exchanged before the daemon
        started. After a slot of the container without one of another pod, other pods are only guests.
        """
        if self.record.quarantined(now):
            return UnresolvedReason.QUARANTINED
        if not self._certain:
            reasons = self.slots.reasons()
            if UnresolvedReason.OTHER_POD in reasons:
                return UnresolvedReason.OTHER_POD
            if reasons & _NOT_LOOKED:
                return UnresolvedReason.OVER_BUDGET
            self._certain = bool(self.slots.distinguished())
        return self._unwritable if now < self._unwritable_until else None

    def plan(self, inputs: Inputs) -> Iterator[list[Order]]:
        """Plan slot by slot, keep each slot's new state, and yield its words to change."""
        now, layout = inputs.now, self.region.layout
        self._pause = self._paused(now)
        inputs = inputs._replace(paused=self._pause, holds=now >= self.not_held_until)
        self.work_at, self.held, self.conflicts = inf, [], []
        settled = calm = started = True
        values: list[tuple[OwnedSlot, int, int]] = []  # that may be held, with their devices
        watchers = 0
        for state in self.slots.distinguished():
            conflicts, planned = state.conflicts, plan_slot(layout, self.view, state, inputs)
            state.become(planned.after)
            if state.conflicts > conflicts:
                self.conflicts.append(state)
            watchers += planned.right
            if planned.right:
                self._came = self._came or not state.followed
                started = started and (state.guessed or state.evidence.begins(now) <= now - STARTED)
            values += [(state, *value) for value in planned.values]
            settled, calm = settled and planned.right, calm and planned.calm
            yield planned.orders
        self._hold(values, watchers)
        writes = inputs.writes is not WriteUtilization.NEVER and inputs.paused is None
        waits = self._zeroed_at < now < self._zeroed_at + _ZERO_AGAIN_SECONDS
        for slot in leftovers(self.slots) if writes else ():
            calm = False  # leftovers are checked again until they are 0
            self._zeroed_at = self._zeroed_at if waits else now
            yield [] if waits else zeroes(layout, self.view, slot)
        self.right = settled and self._came and not self.slots.unclear()
        self.started = self.right and started
        # A watcher may put values right within two ticks. The writer reports what it held.
        values_due = inf if calm and not self.held else now + (REPORT_SECONDS if calm else TWO_TICKS)
        self.work_at = min(self.work_at, self.slots.next_look(), values_due) if settled else 0.0

    def _hold(self, values: list[tuple[OwnedSlot, int, int]], watchers: int) -> None:
        """Choose the values to hold: contested ones, or all if two watchers may add at once.

        A container whose watchers were seen to add has that library while any process lives.
        """
        words = [state.evidence.words[device] for state, device, _ in values]
        self._adds = watchers > 0 and (self._adds or any(word.grew for word in words))
        for word, (state, device, value) in zip(words, values, strict=True):
            if word.is_held(may_double=self._adds and watchers > 1):
                self.held.append(value_order(self.region.layout, self.view, state.slot, device, value, state))

    def attach(self, now: float | None = None) -> None:
        """Note an attachment; without ``now``, one that may have been missed."""
        self.attached = True
        if now is not None:
            self.schedule.attach(now)

    def counts_are_due(self, now: float) -> bool:
        return now >= self._counts_due

    async def count(self, reader: TenantReader) -> None:
        """Read HAMi-core's counts if they are due; they are unknown while any slot's owner is."""
        if not self.counts_are_due(now := time.monotonic()):
            return
        self._counts_due = now + _COUNTS_SECONDS
        device_num = 0 if self.slots.unclear() else self.view.device_num
        slots = [state.slot for state in self.slots.distinguished()]
        sums, last_kernel = await self.region.counts(reader, self.ownership.account, slots, device_num)
        self.counts = HamiCounts(tuple(Counted(*each) for each in sums), last_kernel)

    def let_go(self, now: float) -> None:
        """Hold no values for a while, because they changed too often."""
        self.not_held_until = now + _TOO_OFTEN_SECONDS

    def unwritable(self, why: UnresolvedReason) -> None:
        """Note that the file can't be opened for writing: it is tried again in a while."""
        self._unwritable, self._unwritable_until = why, time.monotonic() + _UNWRITABLE_SECONDS

    def note_finding(self, now: float, refused: Container[str]) -> None:
        """Note the watcher's evidence on the policy; a process with equal PIDs gives none.

        The driver refuses the older call for samples of the devices in ``refused``. A library without the newer one
        does not get it while it runs.
        """
        findings: set[WatcherFinding | None] = set()
        self.numbers = set()
        blind = self.blind(refused)
        for state in self.slots.distinguished():
            host_pid, *inside = state.owner.process.ns_pids
            if len(inside) == 1 and host_pid not in inside:
                findings.add(finding := state.evidence.finding(now, blind))
                if finding is WatcherFinding.CONFIRMS and state.slot.hostpid in (host_pid, *inside):
                    by_host = state.slot.hostpid == host_pid
                    self.numbers.add(HostpidNamespace.HOST if by_host else HostpidNamespace.CONTAINER)
        unable = WatcherFinding.UNABLE if findings and self.finding is WatcherFinding.UNABLE else None
        self.finding = next((finding for finding in WatcherFinding if finding in findings), unable)
        if self.finding is WatcherFinding.DOUBTS and self.region.layout.name != FILLS_NOTHING:
            # With another order of GPUs than NVML's, watchers write a GPU's value into another's place.
            states = self.slots.distinguished()
            orders = {state.variables[1] if state.variables else None for state in states}
            self.finding = WatcherFinding.CONTRADICTS if orders == {""} else self.finding

    def blind(self, refused: Container[str]) -> set[int]:
        """Return the positions of the devices in ``refused``."""
        return {n for n, uuid in enumerate(self.view.uuids) if uuid in refused}

    def write_report(self, joined: Joined, container_id: Callable[[int], str]) -> None:
        if not self.closed:
            self.report = region_report(self, joined, container_id, time.monotonic())

    def close(self) -> None:
        for state in self.slots.owned.values():
            state.owner.close()
        self.slots.owned.clear()
        self.region.close()


def region_report(
    repairs: RegionRepairs, joined: Joined, container_id: Callable[[int], str], now: float
) -> RegionReport:
    """Report a region's used slots; ``container_id`` maps host PIDs to containers."""
    region, view = repairs.region, repairs.view
    uuids = view.uuids
    states = repairs.slots.distinguished()
    claim = repairs.ownership.claim
    owned = tuple([_slot_report(state, uuids, joined, container_id if claim else None) for state in states])
    container_ids = (container_id(state.owner.process.host_pid) for state in states)
    # Only a ResourceClaim's file has several containers; any other belongs to its first owner's.
    first = next(filter(None, container_ids), "")
    ids = sorted({slot.container_id for slot in owned} - {""}) if claim else [first] if first else []
    named = "" if claim else next((state.names[1] for state in states if state.names[1]), "")
    ended, moved = view.slots.left_behind()
    return RegionReport(
        path=region.path,
        pod_uid=repairs.ownership.pod_uid or None,
        container_name=named or repairs.ownership.container_name or None,
        layout=region.layout.name,
        device_uuids=uuids,
        slots=SlotReports(owned, view.slots, *repairs.slots.codes(), len(uuids)),
        container_id=ids[0] if len(ids) == 1 else None,
        quarantined=repairs.record.quarantined(now),
        limit=view.limit,
        sm_limit=view.sm_limit,
        limiting=view.utilization_switch != 0,
        claim=claim or None,
        container_ids=tuple(ids),
        placement=repairs.ownership.placement or None,
        ended=ended,
        moved=moved,
        limits=tuple(_limit(uuid, joined, repairs.finding) for uuid in uuids) if joined.refused else (),
    )


def _limit(uuid: str, joined: Joined, finding: WatcherFinding | None) -> LimitState | None:
    """Return why HAMi-core can't enforce a limit on a device; None if it can."""
    if uuid not in joined.refused or finding is WatcherFinding.CONFIRMS:
        return None
    return LimitState.NO_EFFECT if finding is WatcherFinding.UNABLE else LimitState.UNKNOWN


def _slot_report(
    state: OwnedSlot, uuids: tuple[str, ...], joined: Joined, container_id: Callable[[int], str] | None
) -> SlotReport:
    """Report a slot; ``container_id`` adds the owner's container."""
    slot, host_pid, disputed = state.slot, state.owner.process.host_pid, state.evidence.disputed()
    return SlotReport(
        pid=slot.pid,
        slot=slot.index,
        hostpid=slot.hostpid,
        host_pid=host_pid,
        dead=False,
        unresolved=state.reason,
        repaired=state.repaired,
        sm_util=slot.sm_util,
        utilization=tuple(
            None if device in disputed else joined.utilization(host_pid, uuid)
            for device, uuid in enumerate(uuids)
        ),
        stuck=state.stuck,
        container_id=container_id(host_pid) if container_id else "",
        core_policy=state.variables[0] if state.variables else None,
    )
