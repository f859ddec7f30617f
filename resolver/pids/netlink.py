"""The proc connector: the kernel names the processes that began and ended, and only those are read in ``/proc``.

Attached before the first scan, so that there is no gap. An event is a reason to look, never an answer: lost,
late and doubled events cost a look or a scan, and nothing is believed that ``/proc`` does not say. User space is
not woken by events; they wait in the socket until the next refresh.

What it cannot see: nothing outside the initial PID and user namespaces, and nothing without a socket in the
host's network namespace. `open_netlink` says which of them is missing.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, NamedTuple

from resolver.errors import AccessDenied, ProcessGone
from resolver.pids.source import ProcessChanges

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from resolver.linux.procfs import Procfs
    from resolver.pids.proc_events import EventStream

#: Receive buffer. An event takes 768 bytes of it, so it holds some 40,000: 2.7 s of 5,000 processes a second.
BUFFER_BYTES = 16 << 20
#: A listing of ``/proc`` costs a third of a look per process.
_LOOK_IN_LISTINGS = 3
#: More named processes than this between two refreshes are not remembered but scanned for.
_MOST_NAMED = 1 << 16
#: How often events are held against a listing, in seconds.
_RECONCILE_SECONDS = 60.0
#: A source that overran in so many refreshes in a row costs more than the scan it saves.
_OVERRUNS_UNHEALTHY = 5


class _Seen(NamedTuple):
    ns_pids: tuple[int, ...]
    zombie: bool


class NetlinkSource:
    """A `resolver.pids.source.Lister` over a `Procfs` and a proc connector socket.

    Counters: ``rescans`` (full scans because events were lost, the first one not among them), ``listings``,
    ``drift`` (differences to a listing that no event explained), and those of the stream: ``events``, ``overruns``,
    ``lost_by_cpu``, ``lost``. ``why`` says what is wrong while `healthy` is False.
    """

    name = "netlink"

    def __init__(self, procfs: Procfs, stream: EventStream) -> None:
        self._procfs = procfs
        self._stream = stream
        self._inodes: dict[int, int] = {}
        self._ns_pids: dict[int, tuple[int, ...]] = {}
        self._seeded = False
        self._list_again = False
        self._suspects: set[int] = set()
        self._next_reconcile = time.monotonic() + _RECONCILE_SECONDS
        self._overruns_before = 0
        self._overruns_in_a_row = 0
        self._broken = ""
        self.rescans = 0
        self.listings = 0
        self.drift = 0
        self.why = ""

    # -- what it says about itself ------------------------------------------------------------------

    @property
    def events(self) -> int:
        """Events received so far, those of threads among them."""
        return self._stream.events

    @property
    def overruns(self) -> int:
        """How often the receive buffer was full (ENOBUFS)."""
        return self._stream.overruns

    @property
    def lost_by_cpu(self) -> Mapping[int, int]:
        """``{cpu: events lost}``, exact up to the last event of each CPU."""
        return self._stream.lost

    @property
    def lost(self) -> int:
        """Events lost on all CPUs."""
        return sum(self._stream.lost.values())

    def healthy(self) -> bool:
        """Whether events could be relied on at the last refresh; if not, ``why`` says the reason.

        Answers are right either way. Full buffers pass; drift and a broken socket stay until it is opened anew.
        """
        return not self.why

    def trouble(self) -> str:
        """Why it must not be used any more; empty while it works."""
        return self.why

    def counters(self) -> Mapping[str, int]:
        """What it counted so far, for people and metrics."""
        names = ("events", "lost", "overruns", "rescans", "listings", "drift")
        return {name: getattr(self, name) for name in names}

    def fileno(self) -> int:
        """The socket, readable when there are events. Nobody needs to wait for it."""
        return self._stream.fileno()

    def close(self) -> None:
        """Unsubscribe and close the socket; may be called twice."""
        self._stream.close()

    # -- the protocol -------------------------------------------------------------------------------

    def ns_pids(self) -> Mapping[int, tuple[int, ...]]:
        """``{host_pid: NSpid numbers}`` as of the last refresh."""
        return self._ns_pids

    @property
    def tend_at(self) -> float:
        """Always: events come in by themselves, and the buffer has its limits."""
        return 0.0

    def tend(self) -> None:
        """Take in events between refreshes, so that the buffer does not overflow; some 1.5 us for each.

        Bounded in time (131,072 events) and in memory.
        """
        stream = self._stream
        try:
            stream.drain()
        except OSError as error:
            self.why = self._broken = f"the proc connector socket failed: {error.strerror}"
            stream.incomplete = True
        if len(stream.touched) + len(stream.ended) > _MOST_NAMED:
            stream.incomplete = True
            stream.touched.clear()
            stream.ended.clear()

    def ahead(self) -> Iterator[int]:
        """Nothing: the events have said which PIDs to read."""
        return iter(())

    def refresh(self) -> ProcessChanges:
        """Take in the events and read the processes they name; scan after a loss."""
        self.tend()
        stream = self._stream
        named = stream.touched | stream.ended
        changes = ProcessChanges([], [], 0)
        if stream.incomplete or not self._seeded:
            self.rescans += self._seeded
            # While the socket is not empty the kernel drops everything: what happens from now on could be missed.
            stream.incomplete = not stream.emptied
            stream.ended.clear()
            self._suspects.clear()
            self._list(changes, reread=True)
            self._seeded = True
        else:
            self.drift += len(self._suspects - named)
            self._suspects.clear()
            self._follow(named, changes)
        stream.touched.clear()
        self._list_again = changes.unreadable > 0
        self._judge()
        return changes

    def look(self, host_pid: int) -> ProcessChanges:
        """Read one process, whether or not an event has named it yet."""
        changes = ProcessChanges([], [], 0)
        self._look(host_pid, self._inode(host_pid), changes)
        return changes

    def _follow(self, named: set[int], changes: ProcessChanges) -> None:
        """Read the processes that events named, or list all where that is cheaper, or due."""
        due = time.monotonic() >= self._next_reconcile
        if not (due or self._list_again or len(named) * _LOOK_IN_LISTINGS > len(self._inodes)):
            for host_pid in named:
                self._look(host_pid, self._inode(host_pid), changes)
            return
        self._list(changes)
        if not self._list_again:
            # Their events may be on the way: they have until the next refresh. A new inode alone proves nothing.
            self._suspects = (set(changes.came) ^ set(changes.went)) - named

    def _judge(self) -> None:
        overruns, self._overruns_before = self._stream.overruns - self._overruns_before, self._stream.overruns
        self._overruns_in_a_row = self._overruns_in_a_row + 1 if overruns else 0
        if self._broken:
            self.why = self._broken
        elif self.drift:
            self.why = f"{self.drift} processes came or went without an event from the proc connector"
        elif self._overruns_in_a_row >= _OVERRUNS_UNHEALTHY:
            self.why = f"the buffer for process events was full {self._overruns_in_a_row} refreshes in a row"
        else:
            self.why = ""

    # -- looking into /proc -------------------------------------------------------------------------

    def _inode(self, host_pid: int) -> int | None:
        """Inode of the process's directory, the one that `Procfs.entries` gives; None if there is none."""
        try:
            return os.stat(f"{self._procfs.root}/{host_pid}").st_ino
        except (FileNotFoundError, ProcessLookupError):
            return None

    def _look(self, host_pid: int, inode: int | None, changes: ProcessChanges) -> None:
        """Bring what is known of one PID up to date.

        The inode was read before the status is: a process that takes the PID in between has an event of its own.
        """
        known = self._inodes.get(host_pid)
        if known != inode:
            if known is not None:
                self._forget(host_pid, changes)
            if inode is not None:
                self._learn(host_pid, inode, changes)
        if inode is None:
            self._stream.ended.discard(host_pid)

    def _forget(self, host_pid: int, changes: ProcessChanges) -> None:
        del self._inodes[host_pid], self._ns_pids[host_pid]
        self._stream.ended.discard(host_pid)
        changes.went.append(host_pid)

    def _learn(self, host_pid: int, inode: int, changes: ProcessChanges) -> None:
        try:
            seen = self._read(host_pid)
        except ProcessGone:
            return
        except AccessDenied:
            changes.unreadable += 1
            return
        self._inodes[host_pid], self._ns_pids[host_pid] = inode, seen.ns_pids
        if seen.zombie:
            self._stream.ended.add(host_pid)
        changes.came.append(host_pid)

    def _read(self, host_pid: int) -> _Seen:
        """One status file. `ProcessGone`, too, if the PID is now a thread's: not listed, but found when asked for."""
        status = self._procfs.status(host_pid)
        if status.tgid != host_pid:
            raise ProcessGone(f"{self._procfs.root}/{host_pid} is a thread")
        return _Seen(status.ns_pids, status.state in "ZX")

    def _list(self, changes: ProcessChanges, *, reread: bool = False) -> None:
        """Compare everything with a listing. ``reread``: events are missing, so find out who is a zombie, too."""
        self.listings += 1
        self._next_reconcile = time.monotonic() + _RECONCILE_SECONDS
        now = self._procfs.entries()
        for host_pid in [host_pid for host_pid, inode in self._inodes.items() if now.get(host_pid) != inode]:
            self._forget(host_pid, changes)
        self._stream.ended.intersection_update(now)
        if reread:
            self._find_zombies()
        for host_pid in now.keys() - self._inodes.keys():
            self._learn(host_pid, now[host_pid], changes)

    def _find_zombies(self) -> None:
        """No event will come of those that have exited already; keep an eye on them."""
        for host_pid in self._inodes:
            with contextlib.suppress(ProcessGone, AccessDenied):
                if not self._read(host_pid).zombie:
                    continue
            self._stream.ended.add(host_pid)


def open_netlink(procfs: Procfs, *, buffer_bytes: int = BUFFER_BYTES) -> NetlinkSource:
    """A source that is attached and has passed its self-test; its first refresh scans. Takes some 0.2 s.

    `CannotKnow`, with the reason and the fix, where it cannot work: not in the initial PID or user namespace, no
    connector in this kernel, no way to the host's network namespace, no capability, no acknowledgement.
    """
    from resolver.pids.netlink_attach import attach

    return NetlinkSource(procfs, attach(procfs, buffer_bytes))
