"""The ``/proc`` scan: works everywhere, costs most.

The first refresh reads the ``NSpid:`` line of every process. Later ones list ``/proc`` once and read only
the processes that are new, distinguished by the inode of their directory (see `Procfs.entries`), so a PID that
was used again is noticed too.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from resolver.errors import AccessDenied, ProcessGone
from resolver.pids.source import ProcessChanges

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from resolver.linux.procfs import Procfs

_AT_ONCE = 64  # entries of a listing between two steps


class ScanSource:
    """A `resolver.pids.source.Lister` over a `Procfs`."""

    name = "scan"

    def __init__(self, procfs: Procfs) -> None:
        self._procfs = procfs
        self._inodes: dict[int, int] = {}
        self._ns_pids: dict[int, tuple[int, ...]] = {}
        self._listing: dict[int, int] | None = None  # that `ahead` is at, with what was read meanwhile
        self._listed: dict[int, int] | None = None  # the same, complete, for a refresh that comes right after

    def ahead(self) -> Iterator[int]:
        """List ``/proc``, to read what is new: with 10,000 processes that takes some 0.3 s."""
        listed: dict[int, int] = {}
        self._listing = listed
        for number, (host_pid, inode) in enumerate(self._procfs.each_entry()):
            listed[host_pid] = inode
            if self._inodes.get(host_pid) != inode:
                yield host_pid
            elif number % _AT_ONCE == 0:
                yield 0
        if self._listing is listed:  # else there was a refresh that is younger
            self._listed = listed

    def refresh(self) -> ProcessChanges:
        """List ``/proc``, read what is new, forget what is gone."""
        known, read = self._inodes, self._procfs.ns_pids
        now = self._listed if self._listed is not None else self._procfs.entries()
        self._listing = self._listed = None
        came: list[int] = []
        went = [host_pid for host_pid, inode in known.items() if now.get(host_pid) != inode]
        unreadable = 0
        for host_pid in went:
            del known[host_pid]
            self._ns_pids.pop(host_pid, None)
        for host_pid in now.keys() - known.keys():
            try:
                self._ns_pids[host_pid] = read(host_pid)
            except ProcessGone:
                continue
            except AccessDenied:
                unreadable += 1
                continue
            known[host_pid] = now[host_pid]
            came.append(host_pid)
        return ProcessChanges(came, went, unreadable)

    def look(self, host_pid: int) -> ProcessChanges:
        """Read one process, if it is not known yet, without listing ``/proc``."""
        known = self._inodes.get(host_pid)
        try:
            inode = os.stat(f"{self._procfs.root}/{host_pid}").st_ino
            if inode == known:
                return ProcessChanges([], [], 0)
            numbers = self._procfs.ns_pids(host_pid)
        except (FileNotFoundError, ProcessLookupError, ProcessGone, AccessDenied):
            return ProcessChanges([], [], 0)  # the next listing finds out
        self._inodes[host_pid], self._ns_pids[host_pid] = inode, numbers
        if self._listing is not None:
            self._listing[host_pid] = inode
        return ProcessChanges([host_pid], [host_pid] if known is not None else [], 0)

    def ns_pids(self) -> Mapping[int, tuple[int, ...]]:
        """``{host_pid: NSpid numbers}`` as of the last refresh."""
        return self._ns_pids

    @property
    def tend_at(self) -> float:
        """Never: nothing waits between two refreshes."""
        return math.inf

    def tend(self) -> None:
        """Nothing waits between two refreshes."""

    def trouble(self) -> str:
        """None: ``/proc`` is always there."""
        return ""

    def counters(self) -> Mapping[str, int]:
        """Nothing is lost, so nothing is counted."""
        return {}

    def close(self) -> None:
        """Nothing is open."""
