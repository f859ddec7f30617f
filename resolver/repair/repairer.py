"""Pass over the slots: find regions, read them, find owners, repair errors."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING

from resolver.base.budget import Metered
from resolver.base.memory import Resident
from resolver.containers.known_namespaces import KnownNamespaces
from resolver.hami.hostpid_policy import WatcherFinding
from resolver.hami.slot_owner import OwnerFinder
from resolver.repair.abandoned import Abandoned
from resolver.repair.holds import REPORT_SECONDS
from resolver.repair.known_regions import KnownRegions
from resolver.repair.parts import Pass
from resolver.repair.reading import Readings
from resolver.repair.turns import Turns
from resolver.workers.lanes import Lanes

if TYPE_CHECKING:
    from resolver.config import HostpidNamespace
    from resolver.gpu.attribution import Joined
    from resolver.hami.hostpid_policy import HostpidPolicy
    from resolver.repair.parts import Parts
    from resolver.repair.plan import RegionRepairs
    from resolver.state import HamiCounts, RegionReport
    from resolver.workers.supervisor import WorkerProcess


class Repairer:
    """The node's regions and their slots' state."""

    def __init__(self, parts: Parts, namespaces: KnownNamespaces | None = None) -> None:
        """Share ``namespaces`` with look-ups."""
        self.parts, procfs, pidmap = parts, parts.procfs, parts.pidmap
        self.regions, self.owners, self.budgets = parts.regions, parts.owners, parts.budgets
        self.agenda, self.watches, self.writing = parts.agenda, parts.watches, parts.writing
        self.pidmap, self.journal = pidmap, parts.journal
        self._namespaces = namespaces or KnownNamespaces(procfs, pidmap)
        finder = OwnerFinder(procfs, pidmap, self._namespaces, parts.names, parts.reader)
        self._abandoned = Abandoned(procfs, reader=parts.reader)
        self._judging: asyncio.Task[None] | None = None  # files that may be abandoned
        self.turns = Turns(parts, finder, self._abandoned.suspect)
        self.found = KnownRegions(parts, self._forget)
        self.readings = Readings(parts, self.turns.leave_out, self.found.reject)
        self._policy: HostpidPolicy | None = None
        self._answered = 0.0  # when NVML's last answer was first seen, on the monotonic clock
        self._resident = Resident()

    @property
    def workers(self) -> list[WorkerProcess]:
        """All child processes."""
        lanes = self.parts.reader.workers if isinstance(self.parts.reader, Lanes) else ()
        return [self.writing.worker, *lanes]

    async def pass_once(
        self, policy: HostpidPolicy, joined: Joined, *, patient: bool = True, everything: bool = True
    ) -> None:
        """Run one pass over due regions, or ``everything``. ``patient=False`` ignores budgets.

        Containers with the most budget left come first.
        """
        self._resident.look(time.monotonic())  # some 20 ms, rarely: no reason to rest after the pass
        this = Pass(policy, joined, self.budgets, patient=patient, everything=everything)

        def spend(seconds: float) -> None:
            this.spent += seconds

        await Metered(self._pass(this), spend)
        self.agenda.rest_after(this.spent, self.parts.settings.interval, time.monotonic())

    async def _pass(self, this: Pass) -> None:
        self._take_in(this)
        self.budgets.forget_full()
        if isinstance(self.parts.reader, Lanes):
            self.parts.reader.tidy()
        self.journal.catch_up()
        await self.found.discover(this)
        await this.slices.breathe()
        self._take_in_ends(this)
        if self._judging is not None and not this.patient:
            await asyncio.wait({self._judging})
        await this.slices.breathe()
        busy = await self.readings.read_due(this)
        # The map has to be younger than the sight of the slots: then a process that is not in it does not exist.
        asked = any(work.due for works in busy.values() for work in works)
        if asked and not await self.pidmap.catch_up(this.slices, unhurried=this.patient):
            for works in busy.values():
                for work in works:
                    del work.due[:]
        elif asked:
            await self._namespaces.catch_up(this.slices, bounded=this.patient)  # not charged to any container
        await self.turns.take(busy, this)

    def _forget(self, repairs: RegionRepairs) -> None:
        """Forget a vanished region."""
        path = repairs.region.path
        self.turns.owner_finder.forget(repairs.proof)
        self._abandoned.forget(path)

    def _take_in(self, this: Pass) -> None:
        """Process new reports of NVML and the kernel."""
        if this.joined is not self.found.joined:
            changed = this.joined.changed(self.found.joined)
            self.found.joined, self._answered = this.joined, this.now
            for path, repairs in self.regions.items():
                reports = bool(repairs.held) and this.now - repairs.planned >= REPORT_SECONDS
                if reports:  # they show if its watcher is still wrong
                    repairs.unsettle()
                if reports or (changed != set() and repairs.values_changed(changed)):
                    self.agenda.by(path, this.now)
        if this.policy != self._policy:
            self._policy, this.everything = this.policy, True
        this.answered = self._answered
        self.take_events()
        self.watches.tidy()
        self.journal.trouble("watches", self.watches.why_not, "not_watched", "watched_again")

    def _take_in_ends(self, this: Pass) -> None:
        """Process ended owners and abandoned files."""
        now = time.monotonic()
        for state in self.owners.ended():
            for path, repairs in self.regions.items():
                if repairs.ended(state):
                    self.agenda.by(path, now)
        if self._judging is None and self._abandoned.wait() <= 0:
            self._judging = asyncio.create_task(self._judge_abandoned(patient=this.patient))

    async def _judge_abandoned(self, *, patient: bool) -> None:
        try:
            for repairs in await self._abandoned.judge(patient=patient):
                self.agenda.by(repairs.region.path, time.monotonic())
                self.journal.record(
                    "region_abandoned", container=repairs.ownership.container, path=repairs.region.path
                )
        finally:
            self._judging = None
        self.parts.wake()

    def close(self) -> None:
        """Release the child, handles and files."""
        self.turns.close()
        if self._judging is not None:
            self._judging.cancel()
        self.writing.worker.stop()
        self.writing.holds.close()
        self.found.close()
        self.watches.close()
        self.owners.close()

    def take_events(self) -> None:
        """Read some kernel events; may bring `next_pass` forward."""
        if self.watches.take():
            self.agenda.events_lost(time.monotonic())
            for repairs in self.regions.values():
                repairs.attached = True

    def next_pass(self) -> float:
        """Return the next known work's monotonic time."""
        interval = self.parts.settings.interval
        wait = interval if self.owners.polled else max(interval, self._abandoned.wait())
        wanted = min(each.wants() for each in self.found.discoveries)
        return self.agenda.next_pass(wait, wanted, time.monotonic())

    def watchers(self) -> dict[str, int]:
        """Count containers by what their watchers show of the policy: one sample found confirms it."""
        found: dict[str, set[str]] = {each.value: set() for each in WatcherFinding}
        for repairs in self.regions.values():
            if repairs.finding is not None:
                found[repairs.finding].add(repairs.ownership.account)
        for finding in (WatcherFinding.CONTRADICTS, WatcherFinding.DOUBTS):
            found[finding] -= found[WatcherFinding.CONFIRMS]
        return {finding: len(accounts) for finding, accounts in found.items()}

    def numbers(self) -> Counter[HostpidNamespace]:
        """Count containers by the number with which their watchers found samples."""
        seen = {
            (repairs.ownership.account, namespace)
            for repairs in self.regions.values()
            for namespace in repairs.numbers
        }
        return Counter(namespace for _, namespace in seen)

    def unwatched(self) -> int:
        """Count regions without change reports by the kernel."""
        return sum(path not in self.watches for path in self.regions)

    def hami_counts(self) -> dict[str, HamiCounts]:
        """Return HAMi-core's counts by path, as far as read."""
        counts = {path: repairs.counts for path, repairs in self.regions.items()}
        return {path: each for path, each in counts.items() if each is not None}

    def reports(self) -> tuple[RegionReport, ...]:
        """Return every region's report, as of its last turn."""
        return tuple(self.parts.reports.values())
