"""Known regions: found by discoveries, located, and released when gone."""

from __future__ import annotations

import resource
import sys
import time
from typing import TYPE_CHECKING

from resolver.base.counters import CounterByReason
from resolver.base.errors import RegionRejected
from resolver.base.reasons import RegionReason, SampleReason
from resolver.hami.directory_finder import DirectoryFinder
from resolver.hami.mapping_finder import MappingFinder
from resolver.hami.placements import AUTO, KNOWN_DIRS
from resolver.repair.orders import directory_of
from resolver.repair.plan import RegionRepairs

if TYPE_CHECKING:
    from collections.abc import Callable

    from resolver.gpu.attribution import Joined
    from resolver.hami.discovery import FoundRegion
    from resolver.hami.region import SharedRegion
    from resolver.repair.parts import Parts, Pass

_ANSWERS = 3  # answers until a new file is a region: its directory, itself, the next file
#: Ways to find regions, which are treated alike.
Discovery = DirectoryFinder | MappingFinder


class KnownRegions:
    """Discoveries of regions, kept in ``parts.regions``."""

    def __init__(self, parts: Parts, forget: Callable[[RegionRepairs], None]) -> None:
        """Call ``forget`` with each vanished region."""
        self._parts, self._forget = parts, forget
        self.joined: Joined | None = None  # NVML's last answer
        procfs, reader = parts.procfs, parts.reader
        self.discoveries: tuple[Discovery, ...] = (
            DirectoryFinder(
                parts.settings.containers_dir,
                procfs,
                budgets=parts.budgets,
                watches=parts.watches,
                names=parts.names,
                reader=reader,
                wake=parts.wake,
            ),
        )
        if parts.settings.mapped_regions:
            arrival, users = parts.pidmap.arrival, self._users_without_slot
            self.discoveries = (
                MappingFinder(procfs, users, arrival, self._in_use, reader=reader),
                *self.discoveries,
            )

    def _users_without_slot(self) -> set[int]:
        """Return NVML's host PIDs without a known slot."""
        known = (None, SampleReason.PROCESS_ENDED)  # None: it owns a slot
        used = self.joined.used if self.joined else ()
        return {each.host_pid for each in used if each.no_slot not in known}

    def _in_use(self, path: str) -> bool:
        """Check for a slot with a living owner."""
        repairs = self._parts.regions.get(path)
        return repairs is not None and any(state.owner is not None for state in repairs.states.values())

    async def discover(self, this: Pass) -> None:
        """Search for new regions where due."""
        agenda = self._parts.agenda
        full, by_clock = agenda.search_due(this.now)
        by_clock = by_clock or this.everything
        if full and all(len(each.regions) < each.max_regions for each in self.discoveries):
            self._parts.journal.trouble("descriptors", "", "out_of_descriptors", "means_restored")
        for discovery in self.discoveries:
            if full:
                discovery.max_regions = min(sys.maxsize, 2 * discovery.max_regions)  # see `shed`
            if by_clock or this.now >= discovery.wants():
                await self._refresh(discovery, this, full=full)
            for _ in range(_ANSWERS):
                if this.patient or not await discovery.settle():
                    break
                await self._refresh(discovery, this, full=False)
            for path in discovery.dirs:
                lacks = (
                    f"none of {', '.join(KNOWN_DIRS)} exists" if path == AUTO else f"{path} does not exist"
                )
                trouble = f"{lacks}; waiting for it" if path in discovery.missing_dirs else ""
                self._parts.journal.trouble(
                    f"dir {path}", trouble, "containers_dir_missing", "containers_dir_found", path=path
                )
        if by_clock:
            watched = all(discovery.watched for discovery in self.discoveries)
            pause = agenda.searched(this.now, self._parts.settings.interval, full=full, watched=watched)
            if not this.everything:
                # All regions due before the next such pass, to share one wake-up.
                this.ahead = pause

    async def _refresh(self, discovery: Discovery, this: Pass, *, full: bool) -> None:
        changes = discovery.refresh(full=full)
        for region in changes.removed:
            self.drop(region.path)
        for found in changes.added:
            await this.slices.breathe()
            self._add(found)
        for path, why in changes.rejected:
            self._count_rejected(path, why)

    def _add(self, found: FoundRegion) -> None:
        parts, (region, ownership, location) = self._parts, found
        age = max(0.0, time.time() - region.mtime_ns / 1e9)  # since a process attached: it writes a byte
        parts.agenda.found(region.path, time.monotonic() - age)
        blame = parts.writing.blame(ownership.account)
        parts.regions[region.path] = RegionRepairs(region, ownership, location, blame)
        parts.journal.record(
            "region_found",
            about=directory_of(region.path),
            container=ownership.container,
            path=region.path,
            layout=region.layout.name,
        )

    def rejected(self) -> dict[str, RegionReason]:
        """Return reasons of skipped files, by path."""
        return {path: why for each in self.discoveries for path, why in each.rejected.items()}

    def reject(self, region: SharedRegion, why: RegionRejected) -> None:
        """Drop a region with an unusable file."""
        self._count_rejected(region.path, why)
        for discovery in self.discoveries:
            discovery.reject(region, why)  # those that do not know it do nothing
        self.drop(region.path)

    def _count_rejected(self, path: str, why: RegionRejected) -> None:
        self._parts.counters[CounterByReason.REJECTED.of(why.reason)] += 1
        about = directory_of(path)
        self._parts.journal.record(
            "region_rejected", level="warning", about=about, path=path, reason=why.reason, why=why.detail
        )

    def drop(self, path: str) -> None:
        """Remove a region, if known."""
        parts = self._parts
        parts.reports.pop(path, None)
        repairs = parts.regions.pop(path, None)
        if repairs is not None:
            self._release(repairs)
            self._forget(repairs)
            parts.agenda.forget(path)
            parts.watches.forget(path)
            parts.journal.forget(path)
            container = repairs.ownership.container
            parts.journal.record("region_gone", about=directory_of(path), container=container, path=path)

    def shed(self) -> None:
        """Drop half of the regions to free descriptors; each full search doubles the limit again."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        text = f"all {limit} descriptors are in use, so some regions are not repaired: raise the limit (ulimit -n)"
        self._parts.journal.trouble("descriptors", text, "out_of_descriptors", "means_restored")
        why = RegionRejected(RegionReason.IO_ERROR, "it was given up, all descriptors are in use")
        for discovery in self.discoveries:
            regions = list(discovery.regions.values())
            discovery.max_regions = max(1, len(regions) // 2)
            for region in regions[discovery.max_regions :]:
                discovery.reject(region, why)
                self.drop(region.path)

    def _release(self, repairs: RegionRepairs) -> None:
        for state in repairs.states.values():
            self._parts.owners.unwatch(state)
        repairs.close()

    def close(self) -> None:
        """Release all regions and discoveries."""
        for repairs in self._parts.regions.values():
            self._release(repairs)
        self._parts.regions.clear()
        self._parts.reports.clear()
        for discovery in self.discoveries:
            discovery.close()
