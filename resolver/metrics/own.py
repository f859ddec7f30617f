"""What the daemon itself costs: its own process under Prometheus's usual names, and its children."""

from __future__ import annotations

import contextlib
import os
import resource
from typing import TYPE_CHECKING

from prometheus_client.process_collector import ProcessCollector

from resolver.metrics import families as f

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

_process = ProcessCollector(registry=None)
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_most = [0.0]  # CPU seconds: a child that ends between two reads must not make a counter fall


def collect() -> Iterator[Metric]:
    """``process_*``, and the children's CPU time and memory."""
    yield from _process.collect()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu, pages, count = usage.ru_utime + usage.ru_stime, 0, 0
    children = list(_children())
    for child in children:
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{child}/stat", "rb") as file:
                # Behind the name, which may hold anything, from field 3 on: utime 14, stime 15, rss 24.
                fields = file.read().rpartition(b")")[2].split()
            cpu += (int(fields[11]) + int(fields[12])) / _TICKS
            pages += int(fields[21])
            count += 1
    _most[0] = max(_most[0], cpu)
    yield f.CHILDREN.metric([((), count)])
    yield f.CHILDREN_CPU.metric([((), _most[0])])
    yield f.CHILDREN_MEMORY.metric([((), pages * _PAGE)])
    shares = [_proportional(process) for process in ("self", *map(str, children))]
    known = [share for share in shares if share is not None]
    yield f.PROPORTIONAL_MEMORY.metric([((), sum(known))] if len(known) == len(shares) else [])


def _proportional(process: str) -> int | None:
    """Bytes of a process's pages, each divided by the number of processes that map it; None if unknown."""
    try:
        with open(f"/proc/{process}/smaps_rollup", "rb") as file:  # since Linux 4.14
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(b"Pss:"))
    except FileNotFoundError:
        return 0 if process != "self" and not os.path.exists(f"/proc/{process}") else None
    except ProcessLookupError:
        return 0  # it has ended meanwhile
    except (OSError, StopIteration):
        return None


def _children() -> Iterator[int]:
    """PIDs of this process's children: each thread has a list of its own."""
    for thread in os.listdir("/proc/self/task"):
        with (
            contextlib.suppress(OSError),
            open(f"/proc/self/task/{thread}/children", encoding="ascii") as file,
        ):
            yield from map(int, file.read().split())
