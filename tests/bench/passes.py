"""A pass of the daemon over resolved slots with nothing to repair."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

from resolver import log
from resolver.config import HostpidNamespace, Settings
from resolver.daemon.service import Service
from tests.bench.crowd import crowd, host_pids, make_regions
from tests.bench.timing import Progress, RowValues

_PASSES = 400


def measure(scratch: Path, progress: Progress) -> list[RowValues]:
    """64 regions of 8 slots, and 256 of 32: sixteen times the slots."""
    log.setup("json", "error")
    small, small_asked = _measure(scratch / "small", 64, 8, progress)
    large, large_asked = _measure(scratch / "large", 256, 32, progress)
    return [
        (
            "pass over 64 regions of 8 slots, nothing to repair",
            small * 1e3,
            "ms",
            5.0,
            "three of four passes",
        ),
        ("  the pass after NVML was asked", small_asked * 1e3, "ms", 5.0, "every slot is looked at"),
        ("pass over 256 regions of 32 slots", large * 1e3, "ms", None, ""),
        ("  over the smaller, per slot", large / small / 16, "times", 1.0, "1 is linear growth"),
        ("  the pass after NVML was asked", large_asked * 1e3, "ms", None, ""),
        ("  over the smaller, per slot", large_asked / small_asked / 16, "times", 1.0, "1 is linear growth"),
    ]


def _measure(directory: Path, regions: int, slots: int, progress: Progress) -> tuple[float, float]:
    """Median seconds of a pass, and of one after a collection."""
    progress(f"{regions} regions of {slots} slots, each slot a real process")
    make_regions(directory, regions, slots)
    with crowd(regions, slots, directory) as starter:
        return asyncio.run(_passes(directory, regions * slots, host_pids(starter)))


async def _passes(directory: Path, count: int, truth: dict[int, list[int]]) -> tuple[float, float]:
    settings = Settings(containers_dir=(str(directory),), hostpid_namespace=HostpidNamespace.HOST)
    service = Service(settings)
    try:
        for _ in range(20):
            await service.pass_once(patient=False)
        snapshot = service.snapshots.take()
        right = sum(
            slot.hostpid == slot.host_pid == truth[int(region.pod_uid.removeprefix("pod-"))][slot.ns_pid - 1]
            for region in snapshot.regions
            for slot in region.slots
        )
        if right != count:
            raise RuntimeError(f"{right} of {count} slots are right; counters: {dict(service.counters)}")
        quiet: list[float] = []
        asked: list[float] = []
        for number in range(_PASSES):
            if number % 2:
                service.gpus.joined = service.gpus.joined._replace()
            began = time.perf_counter()
            await service.pass_once()
            (asked if number % 2 else quiet).append(time.perf_counter() - began)
    finally:
        service.close()
    return statistics.median(quiet), statistics.median(asked)
