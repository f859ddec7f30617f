"""What HAMi-core itself counts in each region, for those who read HAMi's own names (``--hami-metrics``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resolver.state import Counted, HamiCounts

if TYPE_CHECKING:
    from resolver.repair.plan import RegionRepairs

_EVERY_SECONDS = 1.0


class CountsOfRegions:
    """The counts of each region, at most a second older than the pass.

    One small read for each slot with a living owner: what a tenant writes into slots that are nobody's costs nothing,
    and is not in the counts.
    """

    def __init__(self) -> None:
        self._known: dict[str, HamiCounts] = {}
        self._due: dict[str, float] = {}

    def known(self) -> dict[str, HamiCounts]:
        """By path."""
        return dict(self._known)

    def take(self, repairs: RegionRepairs, now: float) -> None:
        """Read one, if it is time."""
        path = repairs.region.path
        if now >= self._due.get(path, 0.0):
            self._due[path] = now + _EVERY_SECONDS
            self._known[path] = _count(repairs)

    def forget(self, path: str) -> None:
        """That region is gone."""
        self._known.pop(path, None)
        self._due.pop(path, None)


def _count(repairs: RegionRepairs) -> HamiCounts:
    region, view = repairs.region, repairs.view
    at = region.layout.last_kernel_time
    last_kernel = (at is not None and region.word(at)) or 0
    if view is None or repairs.unclear():
        return HamiCounts((), last_kernel)
    sums = [(0, 0, 0, 0)] * view.device_num
    for state in repairs.distinguished():
        if state.owner is None:
            continue
        used = region.used(state.slot, view.device_num)
        if used is None:
            return HamiCounts((), last_kernel)
        sums = [(a + e, b + f, c + g, d + h) for (a, b, c, d), (e, f, g, h) in zip(sums, used, strict=True)]
    return HamiCounts(tuple(Counted(*each) for each in sums), last_kernel)
