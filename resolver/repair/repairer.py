"""Passes over the node's slots: each starts a turn for every container with work."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from math import inf

from resolver.base.budget import Metered, Slices
from resolver.base.journal import Journal
from resolver.base.memory import Resident
from resolver.base.reasons import SampleReason
from resolver.config import HostpidNamespace, Settings
from resolver.containers.known_namespaces import KnownNamespaces
from resolver.containers.log_names import ContainerNames
from resolver.gpu.attribution import Joined
from resolver.hami.directory_finder import DirectoryFinder
from resolver.hami.hostpid_policy import HostpidPolicy, WatcherFinding
from resolver.hami.mapping_finder import MappingFinder
from resolver.hami.slot_owner import OwnerFinder
from resolver.linux.procfs import Procfs
from resolver.pids.pidmap import PidMap
from resolver.repair.abandoned import Abandoned
from resolver.repair.known_regions import Discovery, KnownRegions
from resolver.repair.orders import Writing
from resolver.repair.owners import Owners
from resolver.repair.turns import Turns
from resolver.state import HamiCounts, RegionReport
from resolver.workers.lanes import TenantReader
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
        self.budgets, self.writing = reader.budgets, Writing(counters, journal)
        self.names = names = ContainerNames(settings.container_logs_dir, settings.pod_logs_dir)
        self._abandoned = Abandoned(procfs, reader, journal, wake)
        finder = OwnerFinder(procfs, pidmap, namespaces, names, reader)
        self.owners = Owners(procfs, pidmap, names, finder, self._abandoned)
        self.found = KnownRegions(self.owners, self.budgets, counters, journal)
        self.regions, self.watches = self.found.by_path, self.found.watches
        self.found.discoveries.extend(self._discoveries(procfs))
        self.turns = Turns(settings, self.found, reader, self.writing, self._refresh, wake, counters, journal)
        self.not_before = 0.0  # no event starts a pass before this time
        self._refreshing, self._refreshed = asyncio.Lock(), -inf  # the last refresh of the map began then
        self._resident = Resident()

    def _discoveries(self, procfs: Procfs) -> Iterator[Discovery]:
        if self.settings.mapped_regions:

            def users_without_slot() -> set[int]:
                owned_or_ended = (None, SampleReason.PROCESS_ENDED)
                used = self.turns.joined.used
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
        return [self.writing.worker, *self._reader.workers]

    def reload(self, settings: Settings) -> None:
        """Use other settings, and list, read and check everything in the next pass."""
        self.settings = settings
        self.found.start_over()

    async def pass_once(
        self, policy: HostpidPolicy, joined: Joined, *, patient: bool = True, everything: bool = True
    ) -> None:
        """Run one pass over due regions, or ``everything``. ``patient=False`` ignores budgets.

        Containers with the most budget left come first.
        """
        self._resident.trim(time.monotonic())  # some 20 ms, rarely: no reason to rest after the pass
        spent = self.turns.spent
        if everything:
            self.found.everything()
        self.turns.take_in(self.settings, policy, joined, patient=patient)
        await Metered(self._pass(patient=patient), self.turns.spend)
        # Rest twice as long as the pass took, despite events.
        rest = min(2 * (self.turns.spent - spent), self.settings.interval)
        self.not_before = time.monotonic() + rest

    async def _pass(self, *, patient: bool) -> None:
        self.found.take_events()
        self.watches.tidy()
        self.journal.trouble("watches", self.watches.why_not, "not_watched", "watched_again")
        self.budgets.tidy()
        self._reader.tidy()
        self.journal.catch_up()
        slices = Slices()
        await self.found.discover(slices, self.settings.interval, patient=patient)
        await slices.yield_if_due()
        self.owners.note_ends()
        await self._abandoned.judge_due(patient=patient)
        await slices.yield_if_due()
        await self.turns.take()

    async def _refresh(self, seen: float) -> bool:
        """Refresh the map of processes unless it is younger than ``seen``; False if that is too early."""
        async with self._refreshing:
            if self._refreshed < seen:
                began, patient = time.monotonic(), self.turns.patient
                # A separate task is not charged to any container.
                if not await asyncio.create_task(self.pidmap.catch_up(Slices(), rate_limited=patient)):
                    return False
                await asyncio.create_task(self._namespaces.catch_up(Slices(), bounded=patient))
                self._refreshed = began
        return True

    def close(self) -> None:
        self.turns.close()
        self._abandoned.close()
        self.writing.worker.stop()
        self.writing.holds.close()
        self.found.close()
        self.owners.close()

    def next_pass(self) -> float:
        """Return the monotonic time of the next known work."""
        interval = self.settings.interval
        wait = interval if self.owners.polled else max(interval, self._abandoned.wait())
        return max(min(time.monotonic() + wait, self.found.wants(self.turns.going)), self.not_before)

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
        """Count the regions whose changes the kernel does not report."""
        return sum(path not in self.watches for path in self.regions)

    def hami_counts(self) -> dict[str, HamiCounts]:
        counts = {path: repairs.counts for path, repairs in self.regions.items()}
        return {path: count for path, count in counts.items() if count is not None}

    def reports(self) -> tuple[RegionReport, ...]:
        return tuple(repairs.report for repairs in self.regions.values() if repairs.report is not None)
