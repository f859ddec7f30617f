"""CPU time and memory of a process and its children, from outside."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

_TICK = 1 / os.sysconf("SC_CLK_TCK")


class Cpu(NamedTuple):
    """Seconds on a CPU so far. ``children`` counts those that live and those that were waited for."""

    own: float
    children: float

    def per_cent(self, since: Cpu, seconds: float) -> Cpu:
        return Cpu(
            (self.own - since.own) / seconds * 100, max(0.0, self.children - since.children) / seconds * 100
        )


def cpu(host_pid: int) -> Cpu:
    """Return the CPU time of a process and of its children, by the scheduler's nanoseconds."""
    fields = Path(f"/proc/{host_pid}/stat").read_text().rpartition(")")[2].split()
    reaped = sum(map(int, fields[13:15])) * _TICK  # cutime and cstime, in ticks of 10 ms
    return Cpu(_on_cpu(host_pid), reaped + sum(map(_on_cpu, children(host_pid))))


def children(host_pid: int) -> list[int]:
    """Return the living children of all threads of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{host_pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, (task / "children").read_text().split())
    return found


def rss(host_pid: int) -> float:
    """Resident MiB of one process; 0 if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, IndexError):
        status = Path(f"/proc/{host_pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024
    return 0.0


def memory(host_pid: int) -> float:
    """Proportional MiB of a process and its children; those that have ended take nothing."""
    return sum(map(pss, [host_pid, *children(host_pid)]))


def pss(host_pid: int) -> float:
    """Proportional MiB of one process (the kernel's PSS); 0 if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        rollup = Path(f"/proc/{host_pid}/smaps_rollup").read_text()
        return int(rollup.split("\nPss:")[1].split()[0]) / 1024
    return 0.0


def _on_cpu(host_pid: int) -> float:
    total = 0
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{host_pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9
