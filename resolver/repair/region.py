"""One region: its file and container, its slots, when they need work, and its watchers' evidence."""

from __future__ import annotations

import time
from math import inf
from typing import TYPE_CHECKING

from resolver.base.reasons import UnresolvedReason
from resolver.config import HostpidNamespace
from resolver.hami.hostpid_policy import FILLS_NOTHING, WatcherFinding
from resolver.hami.layout import parse_used
from resolver.repair.plan import Inputs, Order, RegionPlan
from resolver.repair.region_slots import RegionSlots
from resolver.repair.reported_values import TWO_TICKS
from resolver.repair.schedule import STARTED, Schedule
from resolver.state import Counted, HamiCounts

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from resolver.base.budget import Account
    from resolver.hami.discovery import Location, Ownership
    from resolver.hami.region import RegionView, SharedRegion
    from resolver.repair.slot_states import OwnedSlot
    from resolver.state import RegionReport
    from resolver.workers.lanes import TenantReader

#: Seconds after an end in which other watchers may refill its slot from older samples.
_REFILLED_SECONDS = 2.0
#: Seconds after which held words are reviewed though nothing changed: their reports show if a watcher is still wrong.
REPORT_SECONDS = 9.9
_UNWRITABLE_SECONDS = 5.0
_COUNTS_SECONDS = 1.0
#: Seconds without holds in a file whose words changed faster than watchers write.
_TOO_OFTEN_SECONDS = 10.0
#: The owner is not known yet.
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
        self._changes = 0  # of everything that a plan depends on
        self._settled = -1  # `_changes` at the last plan after which no hostpid was wrong
        self._values_due = inf  # when the values are checked again
        self._inputs: tuple[object, ...] = ()  # of the last plan
        self._mtime_ns = region.mtime_ns
        self.attached = False  # since the last look: it may have taken a dead slot without changing a byte
        self._came = False  # the process that attached last: its slot's owner was found
        self._refilled_until, self._zeroed_at = 0.0, -inf
        self._unwritable_until, self._unwritable = 0.0, UnresolvedReason.WRITE_FAILED
        #: The file certainly belongs to its container: not while another pod uses one that all can reach.
        self._certain = not self.proof.open
        self.counts: HamiCounts | None = None  # of HAMi-core
        self._counts_due = 0.0
        self.held: list[Order] = []  # of the last plan
        self.conflicts: list[
            tuple[OwnedSlot, float]
        ] = []  # of the last plan, with the seconds that each waits
        self.not_held_until = 0.0  # they changed too often
        self.planned = 0.0  # at the last plan
        self.right = False  # at the last plan: each hostpid, and that of the process that attached last
        self.started = False  # and each process has guessed, or had a minute for it
        self.finding: WatcherFinding | None = None  # the watcher's evidence on the policy
        self.numbers: set[HostpidNamespace] = set()  # with which watchers found samples

    @property
    def view(self) -> RegionView:
        """The last view."""
        return self.slots.view

    @property
    def closed(self) -> bool:
        """True once it is given up, which may be while something is awaited."""
        return self.region.fd < 0

    def observe(self, view: RegionView, *, watched: bool = False) -> list[OwnedSlot]:
        """Update the slots from a view; return owned slots that vanished.

        ``watched``: the kernel reports attaching processes. Only they can hide a move; stores change the file's time,
        too.
        """
        if self.attached or self.region.mtime_ns != self._mtime_ns:
            attached, self.attached = self.attached, False
            self._mtime_ns = self.region.mtime_ns
            self.slots.touched(attached=attached)
            self._came = self._came and not attached
            if attached or not watched:
                self.region.read_all()  # the next time: a move may have been missed
        if view is self.view:
            return []
        gone = self.slots.take(view)
        self.unsettle()
        return gone

    def unsettle(self) -> None:
        """Check every slot again."""
        self._changes += 1
        if any(state.doubted for state in self.slots.owned.values()):
            self.slots.next_look = 0.0

    def values_changed(self, host_pids: Container[int] | None, now: float) -> bool:
        """Note new NVML values (None: of all processes); True if a slot here is affected, or a hold to be reviewed."""
        owners = (state.owner.process.host_pid for state in self.slots.owned.values())
        changed = any(host_pids is None or host_pid in host_pids for host_pid in owners)
        changed = changed or (bool(self.held) and now - self.planned >= REPORT_SECONDS)
        if changed:
            self.unsettle()
        return changed

    def abandon(self) -> None:
        """Mark the unowned slots as dead: no process has the file open."""
        self.slots.unowned.abandon()
        self.unsettle()

    def has_work(self, now: float, *inputs: object) -> bool:
        """Check for work; new ``inputs`` recheck every slot."""
        inputs = (*inputs, self._paused(now))
        if inputs != self._inputs:
            self._inputs = inputs
            self.unsettle()
        if now >= self._refilled_until:
            self._refilled_until = 0.0
        due = self.slots.search_due(now) or now >= self._values_due
        return due or self._settled != self._changes

    def quiet_until(self) -> float:
        """Return the monotonic time until which only events cause work; 0 is now."""
        busy = self._settled != self._changes or self._refilled_until
        return 0.0 if busy else min(self.slots.next_look, self._values_due)

    def _paused(self, now: float) -> UnresolvedReason | None:
        """Return why not to write now, if so."""
        if self.record.quarantined(now):
            return UnresolvedReason.QUARANTINED
        uncertain = self._uncertain()
        if uncertain is not None:
            return uncertain
        return self._unwritable if now < self._unwritable_until else None

    def _uncertain(self) -> UnresolvedReason | None:
        """Return why the file may not be its container's; None once that was certain.

        Directories may have been exchanged before the daemon started. After a slot of the container without one of
        another pod, other pods are only guests.
        """
        if not self._certain:
            reasons = self.slots.unowned.reasons()
            if UnresolvedReason.OTHER_POD in reasons:
                return UnresolvedReason.OTHER_POD
            if reasons & _NOT_LOOKED:
                return UnresolvedReason.OVER_BUDGET
            self._certain = bool(self.slots.distinguished())
        return None

    def plan(self, inputs: Inputs) -> Iterator[Order | None]:
        """Yield the words to change now, see `RegionPlan.orders`."""
        changes, self._settled = self._changes, -1  # `_settled` stays behind what changes meanwhile
        now, self.planned = inputs.now, inputs.now
        paused, holds = self._paused(now), now >= self.not_held_until
        inputs = inputs._replace(paused=paused, holds=holds, zeroed_at=self._zeroed_at)
        plan = RegionPlan(self.region.layout, self.slots, inputs)
        self.held, self.conflicts = plan.held, plan.conflicts
        yield from plan.orders()
        self._zeroed_at = plan.zeroed_at
        self._came = self._came or not all(state.followed for state in plan.right)
        self.right = plan.settled and self._came and not self.slots.unowned.unclear()
        self.started = self.right and all(
            state.guessed or state.evidence.begins(now) <= now - STARTED for state in plan.right
        )
        self._settled = changes if plan.settled else -1
        self._values_due = inf if plan.calm else now + TWO_TICKS  # a watcher may put them right until then
        if plan.loaded:
            self._refilled_until = now + _REFILLED_SECONDS

    def attach(self) -> None:
        """Note that a process attached, or may have."""
        self.attached = True

    def counts_are_due(self, now: float) -> bool:
        """Check if HAMi-core's counts are due."""
        return now >= self._counts_due

    async def count(self, reader: TenantReader) -> None:
        """Read HAMi-core's counts if they are due; they are unknown while any slot's owner is."""
        if not self.counts_are_due(now := time.monotonic()):
            return
        self._counts_due, layout = now + _COUNTS_SECONDS, self.region.layout
        device_num = 0 if self.slots.unowned.unclear() else self.view.device_num
        owned = [state.slot for state in self.slots.distinguished() if device_num]
        length = layout.used + device_num * layout.used_size
        places = [(layout.slot_offset(slot.index), length) for slot in owned]
        if layout.last_kernel_time is not None:
            places.append((layout.last_kernel_time, 8))
        pieces = await self.region.pieces(reader, self.ownership.account, places)
        sums = [(0, 0, 0, 0)] * device_num
        for slot in owned:
            data = pieces.get(layout.slot_offset(slot.index), b"")
            if int.from_bytes(data[:4], "little", signed=True) != slot.pid:
                sums = []
                break
            used = parse_used(layout, data, device_num)
            sums = [
                (a + e, b + f, c + g, d + h) for (a, b, c, d), (e, f, g, h) in zip(sums, used, strict=True)
            ]
        last_kernel = int.from_bytes(pieces.get(layout.last_kernel_time or 0, b""), "little")
        self.counts = HamiCounts(tuple(Counted(*count) for count in sums), last_kernel)

    def let_go(self, now: float) -> None:
        """Hold no value for a while: they changed too often."""
        self.not_held_until = now + _TOO_OFTEN_SECONDS

    def unwritable(self, why: UnresolvedReason) -> None:
        """Note that the file can't be opened for writing: it is tried again in a while."""
        self._unwritable, self._unwritable_until = why, time.monotonic() + _UNWRITABLE_SECONDS

    def note_finding(self, now: float, refused: Container[str]) -> None:
        """Note the watcher's evidence on the policy; a process with one number for both gives none.

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
        """Return the positions of these devices."""
        return {n for n, uuid in enumerate(self.view.uuids) if uuid in refused}

    def close(self) -> None:
        """Release descriptor and handles."""
        for state in self.slots.owned.values():
            state.owner.close()
        self.slots.owned.clear()
        self.region.close()
