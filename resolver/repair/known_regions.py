"""Known regions: found by discoveries, read from the page cache or by a lane, reported, and released when gone."""

from __future__ import annotations

import math
import resource
import sys
import time
from typing import TYPE_CHECKING

from resolver.base.counters import CounterByReason, CounterName
from resolver.base.errors import RegionRejected, TooSlow, WorkerFailed
from resolver.base.reasons import RegionReason, UnresolvedReason
from resolver.hami.directory_finder import DirectoryFinder
from resolver.hami.mapping_finder import MappingFinder
from resolver.hami.placements import AUTO, KNOWN_DIRS
from resolver.hami.watches import Watches
from resolver.linux.inotify import MODIFY
from resolver.repair.agenda import Agenda
from resolver.repair.orders import directory_of
from resolver.repair.region import RegionRepairs
from resolver.repair.region_report import region_report

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Container

    from resolver.base.budget import Budgets
    from resolver.base.journal import Journal
    from resolver.hami.discovery import FoundRegion
    from resolver.hami.region import RegionView, SharedRegion
    from resolver.hami.slot_owner import OwnerFinder
    from resolver.repair.abandoned import Abandoned
    from resolver.repair.agenda import Pass
    from resolver.repair.owner_watch import Owners
    from resolver.state import RegionReport
    from resolver.workers.lanes import TenantReader

#: Seconds after which a pass reads no more regions.
_READ_SECONDS = 0.05
_ANSWERS = 2  # answers until a new file is a region: the list of directories, its directory's files
#: Ways to find regions, which are treated alike.
Discovery = DirectoryFinder | MappingFinder


class KnownRegions:
    """Regions ``by_path``, their ``reports``, when each is read, and the discoveries that find them."""

    discoveries: tuple[Discovery, ...] = ()

    def __init__(
        self,
        owners: Owners,
        finder: OwnerFinder,
        abandoned: Abandoned,
        budgets: Budgets,
        reader: TenantReader,
        counters: Counter[str],
        journal: Journal,
    ) -> None:
        self.by_path: dict[str, RegionRepairs] = {}
        self.reports: dict[str, RegionReport] = {}
        self.agenda, self.watches = Agenda(), Watches(budgets, counters)
        self.owners, self.finder, self.abandoned = owners, finder, abandoned
        self._budgets, self._reader = budgets, reader
        self._counters, self._journal = counters, journal

    def in_use(self, path: str) -> bool:
        """Check for a slot with a living owner."""
        repairs = self.by_path.get(path)
        return repairs is not None and bool(repairs.slots.owned)

    async def discover(self, this: Pass) -> None:
        """Search for new regions where due."""
        agenda = self.agenda
        full, by_clock = agenda.search_due(this.now)
        by_clock = by_clock or this.everything
        if full and all(len(discovery.regions) < discovery.max_regions for discovery in self.discoveries):
            self._journal.trouble("descriptors", "", "out_of_descriptors", "means_restored")
        for discovery in self.discoveries:
            if full:
                discovery.max_regions = min(sys.maxsize, 2 * discovery.max_regions)  # see `shed`
            if by_clock or this.now >= discovery.wants():
                await self._refresh(discovery, this, full=full)
            for _ in range(_ANSWERS):
                if this.patient or not await discovery.settle():
                    break
                await self._refresh(discovery, this, full=False)
        if by_clock:
            watched = all(discovery.watched for discovery in self.discoveries)
            pause = agenda.searched(this.now, this.settings.interval, full=full, watched=watched)
            if not this.everything:
                # All regions due before the next such pass, to share one wake-up.
                this.ahead = pause

    async def _refresh(self, discovery: Discovery, this: Pass, *, full: bool) -> None:
        changes = discovery.refresh(full=full)
        for region in changes.removed:
            self.drop(region.path)
        for addition in changes.added:
            await this.slices.yield_if_due()
            self._add(addition)
        for path, why in changes.rejected:
            self._count_rejected(path, why)
        for path in discovery.dirs:
            lacks = f"none of {', '.join(KNOWN_DIRS)} exists" if path == AUTO else f"{path} does not exist"
            trouble = f"{lacks}; waiting for it" if path in discovery.missing_dirs else ""
            self._journal.trouble(
                f"dir {path}", trouble, "containers_dir_missing", "containers_dir_found", path=path
            )

    def _add(self, found: FoundRegion) -> None:
        region, ownership, location = found
        age = max(0.0, time.time() - region.mtime_ns / 1e9)  # since a process attached: it writes a byte
        self.agenda.found(region.path, time.monotonic() - age, ownership.account)
        record = self._budgets.of(ownership.account)
        self.by_path[region.path] = RegionRepairs(region, ownership, location, record)
        self._journal.record(
            "region_found",
            about=directory_of(region.path),
            container=ownership.container,
            path=region.path,
            layout=region.layout.name,
        )

    def rejected(self) -> dict[str, RegionReason]:
        """Return reasons of skipped files, by path."""
        return {path: why for discovery in self.discoveries for path, why in discovery.rejected.items()}

    def reject(self, region: SharedRegion, why: RegionRejected) -> None:
        """Drop a region with an unusable file."""
        self._count_rejected(region.path, why)
        for discovery in self.discoveries:
            discovery.reject(region, why)  # those that do not know it do nothing
        self.drop(region.path)

    def _count_rejected(self, path: str, why: RegionRejected) -> None:
        self._counters[CounterByReason.REJECTED.of(why.reason)] += 1
        about = directory_of(path)
        self._journal.record(
            "region_rejected", level="warning", about=about, path=path, reason=why.reason, why=why.detail
        )

    def drop(self, path: str) -> None:
        """Remove a region, if known."""
        self.reports.pop(path, None)
        repairs = self.by_path.pop(path, None)
        if repairs is not None:
            self._release(repairs)
            self.agenda.forget(path)
            self.watches.forget(path)
            self._journal.forget(path)
            container = repairs.ownership.container
            self._journal.record("region_gone", about=directory_of(path), container=container, path=path)

    def _release(self, repairs: RegionRepairs) -> None:
        for state in repairs.slots.owned.values():
            self.owners.unwatch(state)
        repairs.close()
        self.finder.forget(repairs.proof)
        self.abandoned.forget(repairs.region.path)

    def shed(self) -> None:
        """Drop half of the regions to free descriptors; each full search doubles the limit again."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        text = f"all {limit} descriptors are in use, so some regions are not repaired: raise the limit (ulimit -n)"
        self._journal.trouble("descriptors", text, "out_of_descriptors", "means_restored")
        why = RegionRejected(RegionReason.IO_ERROR, "it was given up, all descriptors are in use")
        for discovery in self.discoveries:
            regions = list(discovery.regions.values())
            discovery.max_regions = max(1, len(regions) // 2)
            for region in regions[discovery.max_regions :]:
                discovery.reject(region, why)
                self.drop(region.path)

    def close(self) -> None:
        """Release all regions and discoveries."""
        for repairs in self.by_path.values():
            self._release(repairs)
        self.by_path.clear()
        self.reports.clear()
        for discovery in self.discoveries:
            discovery.close()
        self.watches.close()

    # -- reads --------------------------------------------------------------------------------------

    async def read_due(self, this: Pass, going: Container[str]) -> dict[str, list[RegionRepairs]]:
        """Read due regions of no ``going`` account; return those with work by account, most budget left first."""
        busy: dict[str, list[RegionRepairs]] = {}
        due = self.agenda.due(math.inf if this.everything else this.now + this.ahead, going)
        waiting = [self.by_path[path] for path in due]
        began, since = time.monotonic(), time.thread_time()
        for repairs in self._budgets.most_left_first(waiting, lambda each: each.ownership.account):
            account = repairs.ownership.account
            if repairs.closed:
                continue
            if this.over(account):
                self.put_off(repairs, this)
                continue
            self._watch(repairs)
            try:
                view = repairs.region.read_at_once()
                repairs.sees(unread=view is None)
                if view is None or self._look(repairs, view, this):
                    busy.setdefault(account, []).append(repairs)
            except RegionRejected as why:
                self.reject(repairs.region, why)
            now = time.thread_time()
            this.charge(account, now - since)
            if this.slices.over():
                if this.patient and time.monotonic() - began >= _READ_SECONDS:
                    break
                await this.slices.yield_now()
                now = time.thread_time()
            since = now
        return busy

    async def read(self, repairs: RegionRepairs, this: Pass) -> bool:
        """Read by a lane a region that the page cache lacks; False without work."""
        reader, account = self._reader, repairs.ownership.account
        if repairs.unread and not repairs.closed:
            try:
                view = await repairs.region.read_by(reader, account)
                repairs.sees(unread=False)
                has_work = not repairs.closed and self._look(repairs, view, this)
            except RegionRejected as why:
                has_work = False
                self.reject(repairs.region, why)
            except (TooSlow, WorkerFailed):
                has_work = False
                self.put_off(repairs, this, UnresolvedReason.TOO_SLOW)
            if not has_work:
                return False
        if this.settings.hami_metrics and repairs.counts_are_due(this.now) and not repairs.closed:
            await repairs.count(reader, this.now)
        return not repairs.closed

    def _look(self, repairs: RegionRepairs, view: RegionView, this: Pass) -> bool:
        """Process a region's view; True if it has work."""
        settings, watched = this.settings, repairs.region.path in self.watches
        for state in repairs.observe(view, watched=watched):
            self.owners.unwatch(state)
        has_work = repairs.has_work(
            this.now, this.policy, settings.write_utilization, settings.dry_run, ahead=this.ahead
        )
        self.agenda.taken(repairs.region.path, this.now)
        if not has_work:
            self._looked(repairs, this)
        return has_work or (settings.hami_metrics and repairs.counts_are_due(this.now))

    def _watch(self, repairs: RegionRepairs) -> None:
        """Subscribe to kernel events on the file, before it is read."""
        region, agenda = repairs.region, self.agenda
        if region.path in self.watches:
            return

        def on_event(_: int) -> None:
            repairs.attach()
            agenda.attached(region.path, time.monotonic())

        if self.watches.watch(region.path, repairs.ownership.account, region.fd, MODIFY, on_event):
            repairs.attach()  # maybe, while it was not watched

    def _looked(self, repairs: RegionRepairs, this: Pass) -> None:
        """Schedule the region's next read."""
        path, quiet_until = repairs.region.path, repairs.quiet_until()
        watched, interval = path in self.watches, this.settings.interval
        self.agenda.looked(
            path,
            this.now,
            interval,
            watched=watched,
            quiet_until=quiet_until,
            right=repairs.right,
            started=repairs.started,
        )

    def put_off(
        self, repairs: RegionRepairs, this: Pass, why: UnresolvedReason | None = UnresolvedReason.OVER_BUDGET
    ) -> None:
        """Delay due work: its container is over budget, makes the kernel wait, or met a defect."""
        if why is UnresolvedReason.OVER_BUDGET:
            self._counters[CounterName.OVER_BUDGET] += 1
        self.agenda.put_off(repairs.region.path, time.monotonic() + this.settings.interval)
        if why is not None and repairs.slots.put_off(this.now, why):
            self._report(repairs, this)

    def finish(self, repairs: RegionRepairs, this: Pass) -> None:
        """End a region's turn."""
        repairs.slots.rest()
        self._looked(repairs, this)
        self._report(repairs, this)

    def _report(self, repairs: RegionRepairs, this: Pass) -> None:
        report = region_report(repairs, this.joined, self.owners.container_id, time.monotonic())
        self.reports[repairs.region.path] = report
