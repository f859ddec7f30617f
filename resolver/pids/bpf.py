"""The kernel's own map as a source: exact at any moment, nothing to refresh.

The map can be too small for the node, and says so. Then the processes that found no room are found by a scan
beside it; nothing is wrong, it only costs more. The scan also stands in for a map that cannot be read any more,
until the next source takes over.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING, TypeVar

from resolver.budget import SLICE_SECONDS
from resolver.pids.bpf_map import first_processes_in
from resolver.pids.listing import Listing
from resolver.pids.scan import ScanSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from resolver.linux.procfs import Procfs
    from resolver.pids.bpf_map import BpfPidMap, Drift, Ended, Record

_RECONCILE_EVERY = 60.0
_ASK_FOR_MISSED_EVERY = 5.0  # it costs 0.1 ms; and before it is relied on, with each refresh
_TOMBSTONE_NS = 60 * 10**9

_Found = TypeVar("_Found", "Record", "Ended")


class Mapped:
    """A `resolver.pids.source.PidSource` over a `BpfPidMap`."""

    name = "bpf"
    namespaced = True

    def __init__(self, bpf: BpfPidMap, procfs: Procfs) -> None:
        self.bpf = bpf
        self._procfs = procfs
        self._scan = Listing(ScanSource(procfs))  # costs nothing before its first refresh
        self._gaps = False
        self._unseen = False  # the probes were not shown an event since the map was last compared
        self._trouble = ""
        self._drift: dict[str, int] = {"drift_missing": 0, "drift_stale": 0, "missed": 0}
        self._next_ask = 0.0
        self._size = bpf.count()
        #: How many processes the map can hold.
        self.room = bpf.room
        self._comparing: Iterator[Drift | None] | None = None
        self._missed_before = 0  # events, when that was begun
        self._next_reconcile = time.monotonic() + _RECONCILE_EVERY
        self._check_gaps()

    def __len__(self) -> int:
        return max(self._size, len(self._scan)) if self._gaps else self._size

    def __contains__(self, host_pid: object) -> bool:
        return isinstance(host_pid, int) and self.arrival(host_pid) != 0

    def refresh(self) -> None:
        """Little, while the map is complete: the kernel has put every process into it before it first ran."""
        self._ask_for_missed()
        self._check_gaps()
        if self._gaps:
            self._scan.refresh()

    def ahead(self) -> Iterator[None]:
        """Of the scan beside it, while the map is incomplete."""
        return self._scan.ahead() if self._gaps else iter(())

    def look(self, host_pid: int) -> None:
        """Nothing either, while the map is complete."""
        if self._gaps:
            self._scan.look(host_pid)

    @property
    def tend_at(self) -> float:
        """Now while it is compared; when it is to be compared because the probes were not shown an event."""
        if self._comparing is not None:
            return 0.0
        return self._next_ask if self._unseen else math.inf

    def tend(self) -> None:
        """See whether the map still has room; once a minute compare it with the kernel's tasks, and repair it.

        At once when the kernel has not shown the probes an event, as Linux 7.3.4 was seen to do.
        """
        now = time.monotonic()
        repair = False
        if now >= self._next_ask:
            self._next_ask = now + _ASK_FOR_MISSED_EVERY
            self._ask_for_missed()
            repair = self._unseen  # not more often: the scan answers meanwhile
        if self._comparing is None and (repair or now >= self._next_reconcile):
            self._next_reconcile = time.monotonic() + _RECONCILE_EVERY
            self._ask_for_missed()
            self._missed_before = self._drift["missed"]
            self._comparing = self.bpf.reconciling()
        if self._comparing is not None:
            try:
                self._compare(self._comparing)
            except OSError as error:
                self._comparing = None
                self._failed("be compared with the kernel's tasks", error)
                return
        self._check_gaps()

    def _compare(self, steps: Iterator[Drift | None]) -> None:
        """Go on for some milliseconds: with 10,000 processes it takes a tenth of a second in all."""
        until = time.thread_time() + SLICE_SECONDS
        drift = next(steps)
        while drift is None and time.thread_time() < until:
            drift = next(steps)
        if drift is None:
            return
        self._comparing = None
        self._size = self.bpf.count()
        self._unseen = self._drift["missed"] > self._missed_before
        self._drift["drift_missing"] += drift.missing
        self._drift["drift_stale"] += drift.stale

    def candidates(self, ns_pid: int, pidns: int | None = None) -> list[int]:
        """By the map, in one namespace or every one that it knows; by a scan as well while it is incomplete."""
        if pidns is None:
            return sorted({*self.everywhere(ns_pid)} - {0})
        try:
            found = self._in_namespace(pidns, ns_pid)
        except OSError as error:
            self._failed("be read", error)
            self._scan.refresh()
            found = []
        if not self._gaps:
            return found
        return sorted({*found, *self._scan.candidates(ns_pid)})

    def everywhere(self, ns_pid: int) -> Iterator[int]:
        """By the map's own list of namespaces, two system calls for most of them."""
        try:
            yield from self.bpf.everywhere(ns_pid)
        except OSError as error:
            self._failed("be read", error)
            self._scan.refresh()
        if self._gaps:
            yield from self._scan.candidates(ns_pid)

    def namespaces_of(self, host_pid: int, arrival: int) -> tuple[int, ...]:
        """By the map; none of a process that only the scan knows."""
        record = self._asked(self.bpf.by_host, host_pid)
        known = record is not None and record.start_ns == arrival
        return tuple(pidns for pidns, _ in record.levels) if record is not None and known else ()

    def inits_mark(self) -> object:
        """What the map's own list of them is, byte by byte."""
        return self._first_processes(), self._scan.inits_mark() if self._gaps else None

    def inits(self) -> Iterator[tuple[int, int]]:
        """By the map's own list of them, in one call."""
        found = self._first_processes()
        if self._gaps:
            yield from self._scan.inits()
        yield from first_processes_in(found)

    def _first_processes(self) -> bytes:
        try:
            return self.bpf.first_processes()
        except OSError as error:
            self._failed("be read", error)
            self._scan.refresh()
            return b""

    def arrival(self, host_pid: int) -> int:
        """Its start time in nanoseconds since boot; of one that only the scan knows, when that first saw it."""
        record = self._asked(self.bpf.by_host, host_pid)
        if record is not None:
            return record.start_ns
        return self._scan.arrival(host_pid) if self._gaps else 0

    def ended(self, host_pid: int) -> int:
        """By the map's tombstones."""
        stone = self._asked(self.bpf.tombstone, host_pid)
        if stone is not None and time.clock_gettime_ns(time.CLOCK_BOOTTIME) - stone.exit_ns < _TOMBSTONE_NS:
            return stone.start_ns
        return self._scan.ended(host_pid) if self._gaps else 0

    def exact(self) -> BpfPidMap | None:
        """The map itself, while it has room for every process."""
        self._check_gaps()
        return None if self._gaps else self.bpf

    def shortage(self) -> str:
        """The map is too small, or the kernel's programs failed; the scan makes up for it."""
        if self._trouble or self._unseen or not self._gaps:
            return ""
        return (
            "the kernel's map does not hold every process, so /proc is scanned beside it, which costs more: if the "
            "counter `full` grows, raise --map-size, or leave it out, and the map grows by itself within minutes; "
            "report it if another one grows"
        )

    def incomplete(self) -> str:
        """Why an absence proves nothing: what the scan beside the map could not read either."""
        return self._scan.incomplete() if self._gaps else ""

    def trouble(self) -> str:
        """A map that cannot be read any more."""
        return self._trouble

    def counters(self) -> Mapping[str, int]:
        """What the programs count in the kernel, and the drift."""
        try:
            return {**self.bpf.counters(), **self._drift}
        except OSError:
            return dict(self._drift)

    def close(self) -> None:
        """Let go of programs and maps; the kernel removes them."""
        self.bpf.close()

    def _ask_for_missed(self) -> None:
        """See whether the kernel has kept an event from the probes: until the map is compared it proves no absence."""
        with contextlib.suppress(
            OSError
        ):  # without the descriptors the map cannot be read either, which is said
            missed = self.bpf.missed_events()
            if missed > self._drift["missed"]:
                self._drift["missed"] = missed
                self._unseen = True

    def _in_namespace(self, pidns: int, ns_pid: int) -> list[int]:
        record = self.bpf.lookup(pidns, ns_pid)
        return [record.host_pid] if record and record.levels[-1] == (pidns, ns_pid) else []

    def _asked(self, ask: Callable[[int], _Found | None], host_pid: int) -> _Found | None:
        try:
            return ask(host_pid)
        except OSError as error:
            self._failed("be read", error)
            return None

    def _failed(self, what: str, error: OSError) -> None:
        self._trouble = f"the map cannot {what}: {error.strerror}"
        self._gaps = True

    def _check_gaps(self) -> None:
        """The scan stands beside the map for as long as something found no room: what is missing has no name."""
        before = self._gaps
        try:
            self._gaps = bool(self._trouble) or self._unseen or not self.bpf.complete()
        except OSError as error:
            self._failed("be read", error)
        if before and not self._gaps:
            self._scan = Listing(ScanSource(self._procfs))  # it may have known of very many processes
