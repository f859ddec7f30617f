"""HAMi-core's own counts of a region, read where ``hami_metrics`` is on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resolver.hami.layout import parse_used
from resolver.state import Counted, HamiCounts

if TYPE_CHECKING:
    from resolver.repair.plan import RegionRepairs
    from resolver.workers.lanes import TenantReader


async def count(reader: TenantReader, repairs: RegionRepairs) -> HamiCounts:
    """Read HAMi-core's counts; they are unknown while any slot's owner is."""
    region, view, layout = repairs.region, repairs.view, repairs.region.layout
    owned = [state.slot for state in repairs.distinguished() if state.owner is not None]
    device_num = view.device_num if view is not None else 0
    length = layout.used + device_num * layout.used_size
    places = [(layout.slot_offset(slot.index), length) for slot in owned]
    at = layout.last_kernel_time
    places += [(at, 8)] if at is not None else []
    found = await region.pieces(reader, repairs.ownership.account, places)
    last_kernel = int.from_bytes(found.get(at, b""), "little") if at is not None else 0
    sums = [(0, 0, 0, 0)] * device_num
    unknown = HamiCounts((), last_kernel)
    if view is None or repairs.unclear():
        return unknown
    for slot in owned:
        data = found.get(layout.slot_offset(slot.index), b"")
        if int.from_bytes(data[:4], "little", signed=True) != slot.pid:
            return unknown
        used = parse_used(layout, data, device_num)
        sums = [(a + e, b + f, c + g, d + h) for (a, b, c, d), (e, f, g, h) in zip(sums, used, strict=True)]
    return HamiCounts(tuple(Counted(*each) for each in sums), last_kernel)
