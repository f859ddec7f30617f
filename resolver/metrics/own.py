"""The daemon's cost: its process under Prometheus's usual names, and its children."""

from __future__ import annotations

import contextlib
import os
import resource
from typing import TYPE_CHECKING

from prometheus_client.process_collector import ProcessCollector

from resolver.linux.procfs import usage
from resolver.metrics import families as f

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

_process = ProcessCollector(registry=None)
_PAGE = os.sysconf("SC_PAGE_SIZE")
_most = [0.0]  # CPU seconds: a child that ends between two reads must not make a counter fall


def collect() -> Iterator[Metric]:
    """``process_*``, and the children's CPU time and memory."""
    yield from _process.collect()
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu, pages, count = ended.ru_utime + ended.ru_stime, 0, 0
    for child in _children():
        used = usage(child)
        if used.state:
            cpu, pages, count = cpu + used.cpu_seconds, pages + used.resident_pages, count + 1
    _most[0] = max(_most[0], cpu)
    yield f.CHILDREN.single(count)
    yield f.CHILDREN_CPU.single(_most[0])
    yield f.CHILDREN_MEMORY.single(pages * _PAGE)


def _children() -> Iterator[int]:
    """Yield the PIDs of this process's children; each thread has a list."""
    for thread in os.listdir("/proc/self/task"):
        with (
            contextlib.suppress(OSError),
            open(f"/proc/self/task/{thread}/children", encoding="ascii") as file,
        ):
            yield from map(int, file.read().split())
