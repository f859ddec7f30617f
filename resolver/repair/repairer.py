"""Passes over the slots: the node's clock. Each starts a turn for every container with work."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from typing import TYPE_CHECKING

from resolver.base.budget import Budgets, Metered, Slices
from resolver.base.memory import Resident
from resolver.base.reasons import SampleReason
from resolver.containers.known_namespaces import KnownNamespaces
from resolver.containers.log_names import ContainerNames
from resolver.gpu.attribution import NOTHING
from resolver.hami.directory_finder import DirectoryFinder
from resolver.hami.hostpid_policy import WatcherFinding
from resolver.hami.mapping_finder import MappingFinder
from resolver.hami.slot_owner import OwnerFinder
from resolver.repair.abandoned import Abandoned
from resolver.repair.agenda import Pass
from resolver.repair.holds import REPORT_SECONDS
from resolver.repair.known_regions import Discovery, KnownRegions
from resolver.repair.orders import Writing
from resolver.repair.owner_watch import Owners
from resolver.repair.turns import Turns
from resolver.workers.lanes import Lanes, TenantReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from resolver.base.journal import Journal
    from resolver.config import HostpidNamespace, Settings
    from resolver.gpu.attribution import Joined
    from resolver.hami.hostpid_policy import HostpidPolicy
    from resolver.linux.procfs import Procfs
    from resolver.pids.pidmap import PidMap
    from resolver.state import HamiCounts, RegionReport
    from resolver.workers.supervisor import WorkerProcess


class Repairer:
    """The node's regions and their slots' state."""

    def __init__(
        self,
        settings: Settings,
        procfs: Procfs,
        pidmap: PidMap,
        counters: Counter[str],
        journal: Journal,
        reader: TenantReader | None = None,
        namespaces: KnownNamespaces | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Share ``namespaces`` with look-ups. ``wake`` is called when the next pass may be sooner."""
        self.settings, self.pidmap, self.journal, self._wake = settings, pidmap, journal, wake
        self._reader = reader = reader or TenantReader(procfs)
        self._namespaces = namespaces = namespaces or KnownNamespaces(procfs, pidmap)
        self.budgets, self.owners, self.writing = (
            Budgets(),
            Owners(procfs, pidmap),
            Writing(counters, journal),
        )
        if isinstance(reader, Lanes):
            reader.budgets = self.budgets
        self.names = ContainerNames(settings.container_logs_dir, settings.pod_logs_dir)
        self._abandoned = Abandoned(procfs, reader=reader)
        self._judging: asyncio.Task[None] | None = None  # files that may be abandoned
        finder = OwnerFinder(procfs, pidmap, namespaces, self.names, reader)
        self.found = KnownRegions(
            self.owners, finder, self._abandoned, self.budgets, reader, counters, journal
        )
        self.regions, self.agenda, self.watches = self.found.by_path, self.found.agenda, self.found.watches
        self.found.discoveries = (*self._discoveries(procfs),)
        self.turns = Turns(
            self.found, self.names, reader, self.writing, self._refresh, wake, counters, journal
        )
        self._joined: Joined | None = None  # NVML's last answer
        self._refreshing, self._refreshed = asyncio.Lock(), -math.inf  # the map, and when that began
        self._policy: HostpidPolicy | None = None
        self._resident = Resident()

    def _discoveries(self, procfs: Procfs) -> Iterator[Discovery]:
        if self.settings.mapped_regions:

            def users_without_slot() -> set[int]:
                owned_or_ended = (None, SampleReason.PROCESS_ENDED)
                used = (self._joined or NOTHING).used
                return {use.host_pid for use in used if use.no_slot not in owned_or_ended}

            arrival, in_use = self.pidmap.arrival, self.found.in_use
            yield MappingFinder(
                procfs, users_without_slot, arrival, in_use, reader=self._reader, wake=self._wake
            )
        yield DirectoryFinder(
            self.settings.containers_dir,
            procfs,
            budgets=self.budgets,
            watches=self.watches,
            names=self.names,
            reader=self._reader,
            wake=self._wake,
        )

    @property
    def workers(self) -> list[WorkerProcess]:
        """All child processes."""
        lanes = self._reader.workers if isinstance(self._reader, Lanes) else ()
        return [self.writing.worker, *lanes]

    async def pass_once(
        self, policy: HostpidPolicy, joined: Joined, *, patient: bool = True, everything: bool = True
    ) -> None:
        """Run one pass over due regions, or ``everything``. ``patient=False`` ignores budgets.

        Containers with the most budget left come first.
        """
        self._resident.trim(time.monotonic())  # some 20 ms, rarely: no reason to rest after the pass
        current = Pass(self.settings, policy, joined, self.budgets, patient=patient, everything=everything)
        await Metered(self._pass(current), current.spend)
        self.agenda.rest_after(current.spent, self.settings.interval, time.monotonic())

    async def _pass(self, this: Pass) -> None:
        self._take_in(this)
        self.budgets.tidy()
        if isinstance(self._reader, Lanes):
            self._reader.tidy()
        self.journal.catch_up()
        await self.found.discover(this)
        await this.slices.yield_if_due()
        self._take_in_ends(this)
        if self._judging is not None and not this.patient:
            await asyncio.wait({self._judging})
        await this.slices.yield_if_due()
        await self.turns.take(await self.found.read_due(this, self.turns.going), this)

    async def _refresh(self, seen: float, this: Pass) -> bool:
        """Refresh the map of processes unless it is younger than ``seen``; False if that is too early."""
        async with self._refreshing:
            if self._refreshed < seen:
                began = time.monotonic()
                # A separate task is not charged to any container.
                refresh = self.pidmap.catch_up(Slices(), rate_limited=this.patient)
                if not await asyncio.create_task(refresh):
                    return False
                await asyncio.create_task(self._namespaces.catch_up(Slices(), bounded=this.patient))
                self._refreshed = began
        return True

    def _take_in(self, this: Pass) -> None:
        """Process new reports of NVML and the kernel."""
        if this.joined is not self._joined:
            changed = this.joined.changed(self._joined)
            self._joined = this.joined
            for path, repairs in self.regions.items():
                reports = bool(repairs.held) and this.now - repairs.planned >= REPORT_SECONDS
                if reports:  # they show if its watcher is still wrong
                    repairs.unsettle()
                if reports or (changed != set() and repairs.values_changed(changed)):
                    self.agenda.by(path, this.now)
        if this.policy != self._policy:
            self._policy, this.everything = this.policy, True
        self.take_events()
        self.watches.tidy()
        self.journal.trouble("watches", self.watches.why_not, "not_watched", "watched_again")

    def _take_in_ends(self, this: Pass) -> None:
        """Process ended owners and abandoned files."""
        now = time.monotonic()
        for repairs in self.owners.ended():
            self.agenda.by(repairs.region.path, now)
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
        self._wake()

    def close(self) -> None:
        """Release the child, handles and files."""
        self.turns.close()
        if self._judging is not None:
            self._judging.cancel()
        self.writing.worker.stop()
        self.writing.holds.close()
        self.found.close()
        self.owners.close()

    def take_events(self) -> None:
        """Read some kernel events; may bring `next_pass` forward."""
        if self.watches.take():
            self.agenda.events_lost(time.monotonic())
            for repairs in self.regions.values():
                repairs.attach()

    def next_pass(self) -> float:
        """Return the next known work's monotonic time."""
        interval = self.settings.interval
        wait = interval if self.owners.polled else max(interval, self._abandoned.wait())
        wanted = min(discovery.wants() for discovery in self.found.discoveries)
        return self.agenda.next_pass(wait, wanted, time.monotonic(), self.turns.going)

    def watchers(self) -> dict[str, int]:
        """Count containers by their watchers' evidence of the policy: one sample found confirms it."""
        counts: dict[str, set[str]] = {finding.value: set() for finding in WatcherFinding}
        for repairs in self.regions.values():
            if repairs.finding is not None:
                counts[repairs.finding].add(repairs.ownership.account)
        for finding in (WatcherFinding.CONTRADICTS, WatcherFinding.DOUBTS):
            counts[finding] -= counts[WatcherFinding.CONFIRMS]
        return {finding: len(accounts) for finding, accounts in counts.items()}

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
        return {path: count for path, count in counts.items() if count is not None}

    def reports(self) -> tuple[RegionReport, ...]:
        """Return every region's report, as of its last turn."""
        return tuple(self.found.reports.values())
