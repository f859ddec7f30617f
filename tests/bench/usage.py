"""CPU time and memory of a process and its children, from outside. Which pages they have, only root sees."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path
from typing import NamedTuple

_TICK = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Cpu(NamedTuple):
    """Seconds on a CPU so far. ``children`` counts those that live and those that were waited for."""

    own: float
    children: float

    def per_cent(self, since: Cpu, seconds: float) -> Cpu:
        """Per cent of a core over that many seconds."""
        return Cpu(
            (self.own - since.own) / seconds * 100, max(0.0, self.children - since.children) / seconds * 100
        )


def cpu(host_pid: int) -> Cpu:
    """What a process and its children have used, from the scheduler's nanoseconds."""
    reaped = sum(map(int, _stat(host_pid)[13:15])) * _TICK  # cutime and cstime, in ticks of 10 ms
    return Cpu(_on_cpu(host_pid), reaped + sum(map(_on_cpu, children(host_pid))))


def children(host_pid: int) -> list[int]:
    """Its living children, of whichever of its threads."""
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


class Memory(NamedTuple):
    """MiB of some processes together.

    ``proportional`` is the kernel's PSS: a page's share is less where strangers map it too, as a bench under the same
    Python does. ``once`` counts every different page, as on a node where nobody else has any of them.
    """

    proportional: float
    once: float


def memory(host_pid: int) -> Memory:
    """What a process and its children take; those that have ended take nothing."""
    family = [host_pid, *children(host_pid)]
    return Memory(sum(map(pss, family)), len(set().union(*map(_frames, family))) * _PAGE / 2**20)


def pss(host_pid: int) -> float:
    """Proportional MiB of one process; 0 if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        rollup = Path(f"/proc/{host_pid}/smaps_rollup").read_text()
        return int(rollup.split("\nPss:")[1].split()[0]) / 1024
    return 0.0


def _frames(host_pid: int) -> set[int]:
    """The page frames that a process has (Documentation/admin-guide/mm/pagemap.rst), but the kernel's own."""
    found: set[int] = set()
    with (
        contextlib.suppress(FileNotFoundError, ProcessLookupError),
        open(f"/proc/{host_pid}/maps", encoding="ascii", errors="replace") as maps,
        open(f"/proc/{host_pid}/pagemap", "rb", buffering=0) as pagemap,
    ):
        for line in maps:
            if line.rstrip().endswith(("[vvar]", "[vvar_vclock]", "[vdso]", "[vsyscall]")):
                continue
            start, end = (int(text, 16) // _PAGE for text in line.split(maxsplit=1)[0].split("-"))
            for (entry,) in struct.iter_unpack(
                "=Q", os.pread(pagemap.fileno(), (end - start) * 8, start * 8)
            ):
                if entry >> 63:
                    found.add(entry & (1 << 55) - 1)
    return found


def _on_cpu(host_pid: int) -> float:
    total = 0
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{host_pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def _stat(host_pid: int) -> list[str]:
    """Fields of ``/proc/<pid>/stat`` from the third on."""
    return Path(f"/proc/{host_pid}/stat").read_text().rpartition(")")[2].split()
