"""The ``/proc`` scan: works everywhere, costs most.

A refresh lists ``/proc`` and reads the ``NSpid:`` line of new processes. The directory's inode shows that a PID belongs
to another process (see `Procfs.entries`).
"""

from collections.abc import Iterator
from typing import NamedTuple

from resolver.base.errors import AccessDenied, ProcessGone
from resolver.linux.procfs import Procfs
from resolver.pids.source import PidSource

_AT_ONCE = 64  # entries of a listing between two steps


class Known(NamedTuple):
    """Listed process; ``inode`` is its directory's."""

    inode: int
    ns_pids: tuple[int, ...]


class ScanSource(PidSource):
    """Listed processes, by host PID and by innermost PID."""

    name = "scan"

    def __init__(self, procfs: Procfs) -> None:
        self._procfs = procfs
        self.known: dict[int, Known] = {}
        self.by_inner: dict[int, set[int]] = {}
        self._unreadable: set[int] = set()
        self._listing: dict[int, int] | None = None  # of the youngest refresh in progress

    def __len__(self) -> int:
        return len(self.known)

    def refreshing(self) -> Iterator[None]:
        """List ``/proc`` and read new processes: 10,000 take 0.3 s."""
        listed: dict[int, int] = {}
        self._listing = listed
        for number, (host_pid, inode) in enumerate(self._procfs.each_entry()):
            listed[host_pid] = inode
            if host_pid not in self.known or self.known[host_pid].inode != inode:
                self.read(host_pid)
                yield
            elif number % _AT_ONCE == 0:
                yield
        if self._listing is listed:  # else a younger refresh has begun
            self._listing = None
            self._forget_others(listed)

    def read(self, host_pid: int) -> None:
        inode = self._procfs.inode(host_pid)  # before the status: a reuse in between shows as another inode
        if host_pid in self.known and self.known[host_pid].inode == inode:
            return
        self._forget(host_pid)
        if inode is not None:
            self._learn(host_pid, inode)
        if self._listing is not None and host_pid in self.known:
            self._listing[host_pid] = self.known[host_pid].inode

    def _forget_others(self, listed: dict[int, int]) -> None:
        for host_pid in [
            host_pid for host_pid, read in self.known.items() if listed.get(host_pid) != read.inode
        ]:
            self._forget(host_pid)
        self._unreadable &= listed.keys()

    def _read(self, host_pid: int) -> tuple[int, ...]:
        return self._procfs.ns_pids(host_pid)

    def _learn(self, host_pid: int, inode: int) -> None:
        try:
            ns_pids = self._read(host_pid)
        except ProcessGone:
            return
        except AccessDenied:
            self._unreadable.add(host_pid)
            return
        self._unreadable.discard(host_pid)
        self.known[host_pid] = Known(inode, ns_pids)
        self.by_inner.setdefault(ns_pids[-1], set()).add(host_pid)

    def _forget(self, host_pid: int) -> None:
        process = self.known.pop(host_pid, None)
        if process is None:
            return
        same = self.by_inner[process.ns_pids[-1]]
        same.discard(host_pid)
        if not same:
            del self.by_inner[process.ns_pids[-1]]

    def candidates(self, ns_pid: int, _pidns: int | None = None) -> list[int]:
        return sorted(self.by_inner.get(ns_pid, ()))

    def inits(self) -> Iterator[tuple[int, int]]:
        """Yield processes with the innermost number 1."""
        return ((pid, self.arrival(pid)) for pid in self.candidates(1) if pid in self.known)

    def arrival(self, host_pid: int) -> int:
        process = self.known.get(host_pid)
        return process.inode if process else 0

    def incomplete(self) -> str:
        return f"{len(self._unreadable)} processes could not be read" if self._unreadable else ""


def open_source(procfs: Procfs, _room: int, _run_dir: str) -> ScanSource:
    """Scan ``/proc``."""
    return ScanSource(procfs)
