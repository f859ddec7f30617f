"""HAMi-core's counts in each region, for consumers of HAMi's metric names (``--hami-metrics``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resolver.state import Counted, HamiCounts

if TYPE_CHECKING:
    from resolver.repair.plan import RegionRepairs
    from resolver.workers.lanes import TenantReader

_EVERY_SECONDS = 1.0


class CountsOfRegions:
    """Counts of each region, at most one second older than the pass, without values in unowned slots."""

    def __init__(self) -> None:
        self._known: dict[str, HamiCounts] = {}
        self._due: dict[str, float] = {}

    def known(self) -> dict[str, HamiCounts]:
        """Return the counts by path."""
        return dict(self._known)

    async def take(self, reader: TenantReader, repairs: RegionRepairs, now: float) -> None:
        """Read a region's counts if they are due."""
        path = repairs.region.path
        if now >= self._due.get(path, 0.0):
            self._due[path] = now + _EVERY_SECONDS
            counts = await _count(reader, repairs)
            if path in self._due:
                self._known[path] = counts

    def forget(self, path: str) -> None:
        """Remove a region."""
        self._known.pop(path, None)
        self._due.pop(path, None)


async def _count(reader: TenantReader, repairs: RegionRepairs) -> HamiCounts:
    region, view = repairs.region, repairs.view
    owned = [state.slot for state in repairs.distinguished() if state.owner is not None]
    device_num = view.device_num if view is not None else 0
    places = [region.where_used(slot, device_num) for slot in owned]
    at = region.layout.last_kernel_time
    places += [(at, 8)] if at is not None else []
    found = await region.pieces(reader, repairs.ownership.account, places)
    last_kernel = int.from_bytes(found.get(at, b""), "little") if at is not None else 0
    sums = [(0, 0, 0, 0)] * device_num
    unknown = HamiCounts((), last_kernel)
    if view is None or repairs.unclear():
        return unknown
    for slot in owned:
        data = found.get(region.layout.slot_offset(slot.index))
        used = region.used(data, slot, device_num) if data is not None else None
        if used is None:
            return unknown
        sums = [(a + e, b + f, c + g, d + h) for (a, b, c, d), (e, f, g, h) in zip(sums, used, strict=True)]
    return HamiCounts(tuple(Counted(*each) for each in sums), last_kernel)
