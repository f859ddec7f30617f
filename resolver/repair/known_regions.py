"""Known regions: found by discoveries, and released when gone."""

import resource
import time
from collections import Counter
from collections.abc import Container

from resolver.base.budget import Budgets, Slices
from resolver.base.counters import CounterByReason
from resolver.base.errors import RegionRejected
from resolver.base.journal import Journal
from resolver.base.reasons import RegionReason
from resolver.hami.directory_finder import DirectoryFinder
from resolver.hami.discovery import FoundRegion
from resolver.hami.mapping_finder import MappingFinder
from resolver.hami.placements import AUTO, KNOWN_DIRS
from resolver.hami.region import SharedRegion
from resolver.hami.watches import Watches
from resolver.linux.inotify import MODIFY
from resolver.repair.orders import directory_of
from resolver.repair.owners import Owners
from resolver.repair.region import RegionRepairs
from resolver.repair.schedule import QUIET_INTERVALS, aligned

_ANSWERS = 2  # lane answers that find a new file: the list of directories, its directory's files
#: Seconds between listings of all directories: in general, and if the kernel reports changes in all of them.
_LIST_EVERY, _LIST_WATCHED = 1.0, 120.0
#: Ways to find regions, which are treated alike.
Discovery = DirectoryFinder | MappingFinder


class KnownRegions:
    """Regions ``by_path``, and the discoveries that find them. Times are monotonic."""

    def __init__(
        self,
        owners: Owners,
        budgets: Budgets,
        counters: Counter[str],
        journal: Journal,
    ) -> None:
        self.by_path: dict[str, RegionRepairs] = {}
        self.discoveries: list[Discovery] = []
        self.watches = Watches(budgets, counters)
        self.owners, self.budgets = owners, budgets
        self._counters, self._journal = counters, journal
        self.list_at = self.refresh_at = 0.0  # next listing, and next refresh by the clock
        self._lost_at = 0.0  # when all was, or will be, checked after a loss of events

    # -- times --------------------------------------------------------------------------------------

    def everything(self, when: float = 0.0) -> None:
        """Refresh the discoveries and read every region by this time."""
        self.refresh_at = min(self.refresh_at, when)
        for repairs in self.by_path.values():
            repairs.schedule.by(when)

    def start_over(self) -> None:
        """List and read everything in the next pass."""
        self.list_at = 0.0
        self.everything()

    def take_events(self) -> None:
        """Read some kernel events; after a loss, check everything, at a limited rate: tenants can cause losses."""
        if not self.watches.take():
            return
        now = time.monotonic()
        if now > self._lost_at:  # else a check is already scheduled
            self._lost_at = max(now, self._lost_at + _LIST_EVERY)
        self.list_at = min(self.list_at, self._lost_at)
        self.everything(self._lost_at)
        for repairs in self.by_path.values():
            repairs.attach()

    def wants(self, going: Container[str]) -> float:
        """Return when a discovery, or a region of no ``going`` account, is due."""
        due = min(self.list_at, self.refresh_at, *(discovery.wants() for discovery in self.discoveries))
        for repairs in self.by_path.values():  # few calls: this runs for each event
            if repairs.schedule.due < due and repairs.ownership.account not in going:
                due = repairs.schedule.due
        return due

    def due(self, until: float, going: Container[str]) -> list[RegionRepairs]:
        """Return due regions of no ``going`` account: those with most budget left, and least recently read, first."""
        due = [
            repairs
            for repairs in self.by_path.values()
            if repairs.schedule.due <= until and repairs.ownership.account not in going
        ]
        due.sort(key=lambda repairs: repairs.schedule.last)
        return self.budgets.most_left_first(due, lambda repairs: repairs.ownership.account)

    # -- discoveries --------------------------------------------------------------------------------

    def in_use(self, path: str) -> bool:
        repairs = self.by_path.get(path)
        return repairs is not None and bool(repairs.slots.owned)

    async def discover(self, slices: Slices, interval: float, *, patient: bool) -> None:
        """Run due discoveries; if not ``patient``, until nothing more is to come."""
        now = time.monotonic()
        full, by_clock = now >= self.list_at, now >= min(self.list_at, self.refresh_at)
        if full and all(len(discovery.regions) < discovery.max_regions for discovery in self.discoveries):
            self._journal.trouble("descriptors", "", "out_of_descriptors", "means_restored")
        for discovery in self.discoveries:
            if full:
                discovery.allow_more()
            if by_clock or now >= discovery.wants():
                await self._refresh(discovery, slices, full=full)
            for _ in range(_ANSWERS):
                if patient or not await discovery.settle():
                    break
                await self._refresh(discovery, slices, full=False)
        if by_clock:
            watched = all(discovery.watched for discovery in self.discoveries)
            self.refresh_at = aligned(now, interval * QUIET_INTERVALS) if watched else now + interval
            if full:
                self.list_at = now + (_LIST_WATCHED if watched else _LIST_EVERY)

    async def _refresh(self, discovery: Discovery, slices: Slices, *, full: bool) -> None:
        changes = discovery.refresh(full=full)
        for region in changes.removed:
            self.drop(region.path)
        for addition in changes.added:
            await slices.yield_if_due()
            self._add(addition)
        for path, why in changes.rejected:
            self._count_rejected(path, why)
        for path in discovery.dirs:
            lacks = f"none of {', '.join(KNOWN_DIRS)} exists" if path == AUTO else f"no directory {path}"
            trouble = f"{lacks}; waiting for it" if path in discovery.missing_dirs else ""
            self._journal.trouble(
                f"dir {path}", trouble, "containers_dir_missing", "containers_dir_found", path=path
            )

    def _add(self, found: FoundRegion) -> None:
        region, ownership, location = found
        age = max(0.0, time.time() - region.mtime_ns / 1e9)  # since a process attached: it writes a byte
        record = self.budgets.of(ownership.account)
        self.by_path[region.path] = RegionRepairs(region, ownership, location, record, time.monotonic() - age)
        self._journal.record(
            "region_found",
            about=directory_of(region.path),
            container=ownership.container,
            path=region.path,
            layout=region.layout.name,
        )

    def watch(self, repairs: RegionRepairs) -> None:
        """Subscribe to kernel events on the file, before it is read."""
        region, account = repairs.region, repairs.ownership.account
        on_event = lambda _: repairs.attach(time.monotonic())  # noqa: E731
        if region.path not in self.watches and self.watches.watch(
            region.path, account, region.fd, MODIFY, on_event
        ):
            repairs.attach()  # a process may have attached before the watch

    def rejected(self) -> dict[str, RegionReason]:
        return {path: why for discovery in self.discoveries for path, why in discovery.rejected.items()}

    def reject(self, region: SharedRegion, why: RegionRejected) -> None:
        """Drop a region with an unusable file."""
        self._count_rejected(region.path, why)
        for discovery in self.discoveries:
            discovery.reject(region, why)  # it ignores another discovery's region
        self.drop(region.path)

    def _count_rejected(self, path: str, why: RegionRejected) -> None:
        self._counters[CounterByReason.REJECTED.of(why.reason)] += 1
        about = directory_of(path)
        self._journal.record(
            "region_rejected", level="warning", about=about, path=path, reason=why.reason, why=why.detail
        )

    def drop(self, path: str) -> None:
        repairs = self.by_path.pop(path, None)
        if repairs is not None:
            self.owners.release(repairs)
            self.watches.forget(path)
            self._journal.forget(path)
            container = repairs.ownership.container
            self._journal.record("region_gone", about=directory_of(path), container=container, path=path)

    def shed(self) -> None:
        """Drop half of the regions to free descriptors."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        text = f"all {limit} descriptors are in use, so some regions are not repaired: raise the limit (ulimit -n)"
        self._journal.trouble("descriptors", text, "out_of_descriptors", "means_restored")
        for discovery in self.discoveries:
            for region in discovery.shed():
                self.drop(region.path)

    def close(self) -> None:
        for repairs in self.by_path.values():
            self.owners.release(repairs)
        self.by_path.clear()
        for discovery in self.discoveries:
            discovery.close()
        self.watches.close()
