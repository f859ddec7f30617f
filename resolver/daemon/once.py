"""One check and one round of repairs without a loop: for ``run --once``, and without a daemon."""

import asyncio
from collections.abc import Callable

from resolver.base.source_records import SourceName
from resolver.config import Settings
from resolver.daemon.service import Service
from resolver.repair.plan import Order
from resolver.repair.region import RegionRepairs
from resolver.repair.reported_values import TWO_TICKS
from resolver.repair.slots import OwnedSlot
from resolver.state import Snapshot


async def once(
    settings: Settings, on_would_repair: Callable[[RegionRepairs, OwnedSlot, Order], None] | None = None
) -> Snapshot:
    """Make one pass, in about half a second, and return its snapshot. ``dry_run`` writes nothing.

    ``on_would_repair`` is called with each `hostpid` that a dry run would write.
    """
    service = Service(settings)
    service.repairer.writing.on_would_repair = on_would_repair
    service.gpus.search_seconds = 0.0  # the passes below find every file
    try:
        if settings.source != SourceName.AUTO:
            await service.start_source()
        await service.collect_once()
        # The second check distinguishes a process that is gone from one that was only missed.
        for _ in range(2):
            await service.pass_once(patient=False)
        await service.collect_once()
        await service.pass_once(patient=False)
        await asyncio.sleep(TWO_TICKS)  # a longer difference is no watcher's
        await service.pass_once(patient=False)
        return service.snapshots.take()
    finally:
        service.close()
