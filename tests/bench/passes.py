"""A pass of the daemon over resolved slots with nothing to repair."""

import asyncio
import os
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from resolver.base import journal as log
from resolver.config import HostpidNamespace, Settings
from resolver.daemon.service import Service
from resolver.repair.schedule import STARTED
from tests.bench.crowd import UUID, crowd, host_pids, make_regions
from tests.bench.timing import RowValues, progress

_PASSES = 400  # a quarter of each kind
_NEWS, _DUE = 2, 3  # kinds of pass: after new NVML values; over due regions only


def measure(scratch: Path) -> list[RowValues]:
    """64 regions of 8 slots, 256 of 32, and 1,024 of 8: sixteen times the slots."""
    log.setup_logging("json", "error")
    small = _measure(scratch / "small", 64, 8)
    large = _measure(scratch / "large", 256, 32)
    many = _measure(scratch / "many", 1024, 8)
    linear, same = "1 is linear growth", "its answer is the same as before"
    after, news = "  the pass after NVML was asked", "  … one process in each region has a new value"
    return [
        _row("pass over 64 regions of 8 slots, nothing to repair", small.quiet, "three of four passes"),
        _row(after, small.asked, same),
        _row(news, small.news),
        _row("pass over 256 regions of 32 slots", large.quiet),
        ("  per slot, compared with 64 regions", large.quiet / small.quiet / 16, "times", 1.0, linear),
        _row("  a pass in which no file is due", large.due, "most passes of the daemon"),
        _row(after, large.asked, same),
        ("  per slot, compared with 64 regions", large.asked / small.asked / 16, "times", 1.0, linear),
        _row(news, large.news),
        _row("pass over 1024 regions of 8 slots", many.quiet),
        _row(news, many.news),
    ]


def _row(name: str, seconds: float, beside: str = "") -> RowValues:
    return name, seconds * 1e3, "ms", None, beside


class _Medians(NamedTuple):
    """Median seconds of a pass: nothing new; the same answer of NVML again; a new one; no region due.

    The first three read every region, due or not.
    """

    quiet: float
    asked: float
    news: float
    due: float


def _measure(directory: Path, regions: int, slots: int) -> _Medians:
    progress(f"{regions} regions of {slots} slots, each slot a real process")
    make_regions(directory, regions, slots)
    with crowd(regions, slots, directory) as starter:
        started = time.time() - STARTED
        for path in directory.glob("*/*.cache"):
            os.utime(path, (started, started))  # no recent attachment
        return asyncio.run(_passes(directory, regions * slots, host_pids(starter)))


async def _passes(directory: Path, count: int, truth: dict[int, list[int]]) -> _Medians:
    settings = Settings(containers_dir=(str(directory),), hostpid_namespace=HostpidNamespace.HOST)
    service = Service(settings)
    try:
        for _ in range(20):
            await service.pass_once(patient=False)
        snapshot = service.snapshots.take()
        right = sum(
            slot.hostpid
            == slot.host_pid
            == truth[int((region.pod_uid or "").removeprefix("pod-"))][slot.pid - 1]
            for region in snapshot.regions
            for slot in region.slots
        )
        if right != count:
            raise RuntimeError(f"{right} of {count} slots are right; counters: {dict(service.counters)}")
        seconds: list[list[float]] = [[], [], [], []]
        joined = service.gpus.joined = service.gpus.joined._replace(asked=frozenset({UUID}))
        firsts = frozenset((host_pids[0], UUID) for host_pids in truth.values())
        unknown = False
        for number in range(_PASSES):
            kind = number % len(seconds)
            if kind in {1, _NEWS}:  # in each region one process's value becomes unknown, or known again
                unknown ^= kind == _NEWS
                service.gpus.joined = joined._replace(values=dict.fromkeys(firsts) if unknown else {})
            began = time.perf_counter()
            await service.pass_once(everything=kind != _DUE)
            while going := service.repairer.turns.going:  # turns that this pass began
                await asyncio.wait(going.values())
            seconds[kind].append(time.perf_counter() - began)
    finally:
        service.close()
    return _Medians(*map(statistics.median, seconds))
