"""The proc connector: the kernel names starting and ending processes, and only those are read in ``/proc``.

Attached before the first scan, to leave no gap. An event is a reason to read, never an answer. Events wait in the
socket until the next refresh.
"""

import time
from collections.abc import Iterator, Mapping

from resolver.base.errors import AccessDenied, ProcessGone
from resolver.linux.procfs import Procfs
from resolver.pids.proc_events import EventStream
from resolver.pids.scan import ScanSource

#: Receive buffer. An event takes 768 bytes of it, so it holds some 40,000: 2.7 s of 5,000 processes a second.
BUFFER_BYTES = 16 << 20
#: Reading one process costs as much as listing three.
_LOOK_IN_LISTINGS = 3
#: More named processes than this between two refreshes are not remembered but scanned for.
_MOST_NAMED = 1 << 16
#: Most drains of one refresh, if events come faster than they are read.
_MOST_DRAINS = 8
#: Seconds between listings that find processes without an event.
_RECONCILE_SECONDS = 60.0
#: A source that overran in so many refreshes in a row costs more than the scan it saves.
_OVERRUNS_UNHEALTHY = 5


class NetlinkSource(ScanSource):
    """Scan that reads only the processes named by a proc connector socket.

    ``rescans`` counts full scans after lost events.
    """

    name = "netlink"

    def __init__(self, procfs: Procfs, stream: EventStream) -> None:
        super().__init__(procfs)
        self.stream = stream
        self._seeded = False
        self._next_reconcile = time.monotonic() + _RECONCILE_SECONDS
        self._overruns_before = self._overruns_in_a_row = 0
        self._broken = ""
        self.rescans = self.listings = 0

    def trouble(self) -> str:
        if self._broken:
            return self._broken
        if self._overruns_in_a_row >= _OVERRUNS_UNHEALTHY:
            return f"the buffer for process events was full {self._overruns_in_a_row} refreshes in a row"
        return ""

    def counters(self) -> Mapping[str, int]:
        return {
            "events": self.stream.events,
            "lost": self.stream.gaps,
            "overruns": self.stream.overruns,
            "rescans": self.rescans,
            "listings": self.listings,
        }

    def close(self) -> None:
        self.stream.close()

    @property
    def tend_at(self) -> float:
        """Always 0: the buffer fills by itself."""
        return 0.0

    def tend(self) -> None:
        """Take in up to 16,384 events, 1.5 us each, before the buffer overflows."""
        stream = self.stream
        try:
            stream.drain()
        except OSError as error:
            self._broken = f"the proc connector socket failed: {error.strerror}"
            stream.incomplete = True
        if len(stream.touched) + len(stream.ended) > _MOST_NAMED:
            stream.incomplete = True
            stream.touched.clear()
            stream.ended.clear()

    def refreshing(self) -> Iterator[None]:
        """Take in events, read the processes they name; scan after a loss."""
        self.tend()
        stream = self.stream
        for _ in range(_MOST_DRAINS):
            if stream.emptied or self._broken:
                break
            yield
            self.tend()
        named, stream.touched = stream.touched | stream.ended, set()
        try:
            yield from self._read_named(named)
        except BaseException:
            self._seeded = False  # an abandoned refresh lost the rest: only a scan finds it
            raise
        overruns, self._overruns_before = stream.overruns - self._overruns_before, stream.overruns
        self._overruns_in_a_row = self._overruns_in_a_row + 1 if overruns else 0

    def _read_named(self, named: set[int]) -> Iterator[None]:
        stream = self.stream
        if stream.incomplete or not self._seeded:
            self.rescans += self._seeded
            # The kernel drops all events until the socket is empty: later ones could be missed.
            stream.incomplete = not stream.emptied
            stream.ended.clear()
            yield from self._watch_zombies()
            yield from self._list()
            self._seeded = True
            return
        due = time.monotonic() >= self._next_reconcile
        if due or self._unreadable or len(named) * _LOOK_IN_LISTINGS > len(self.known):
            yield from self._list()
            return
        for host_pid in named:
            self.read(host_pid)
            yield

    def read(self, host_pid: int) -> None:
        super().read(host_pid)
        if host_pid not in self.known:
            self.stream.ended.discard(host_pid)

    def _list(self) -> Iterator[None]:
        self.listings += 1
        self._next_reconcile = time.monotonic() + _RECONCILE_SECONDS
        yield from super().refreshing()
        self.stream.ended &= self.known.keys()

    def _read(self, host_pid: int) -> tuple[int, ...]:
        """Read a process's PIDs, and watch it if it is a zombie. Raises `ProcessGone` for a thread."""
        with self._procfs.hold(host_pid) as held:
            if not held.alive():
                self.stream.ended.add(host_pid)
            return self._procfs.ns_pids_of(held, host_pid)

    def _forget(self, host_pid: int) -> None:
        if host_pid in self.known:
            self.stream.ended.discard(host_pid)
        super()._forget(host_pid)

    def _watch_zombies(self) -> Iterator[None]:
        """Find processes that ended without an exit event."""
        for host_pid in list(self.known):
            try:
                self._read(host_pid)
            except (ProcessGone, AccessDenied):
                self.stream.ended.add(host_pid)
            yield


def open_source(procfs: Procfs, _room: int = 0, _run_dir: str = "") -> NetlinkSource:
    """Attach in some 0.2 s. Raises `CannotKnow` with the fix."""
    from resolver.pids.proc_events import attach

    return NetlinkSource(procfs, attach(procfs, BUFFER_BYTES))
