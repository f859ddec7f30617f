"""The kernel's map as a source: exact at any moment. A scan supplements a full map and replaces a broken one."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from resolver.base.budget import SLICE_SECONDS
from resolver.linux.procfs import Procfs
from resolver.pids.bpf_map import KernelMap, start
from resolver.pids.scan import ScanSource
from resolver.pids.source import PidSource

#: Seconds between two walks over the kernel's tasks (1 us each).
_WALK_EVERY = 8.0

_Found = TypeVar("_Found")


class BpfSource(PidSource):
    """Kernel's map, and a scan while it has gaps."""

    name = "bpf"
    namespaced = True

    def __init__(self, bpf: KernelMap, procfs: Procfs) -> None:
        self.bpf, self.room = bpf, bpf.room
        self._procfs = procfs
        self.scan = ScanSource(procfs)  # costs nothing before its first refresh
        self._gaps = False
        self._unseen = False  # the probes missed an event since the last walk
        self._trouble = ""
        self._drift: dict[str, int] = {"drift_missing": 0, "missed": 0}
        self.comparing: Iterator[int | None] | None = None
        self._missed_before = 0  # missed events when the last walk began
        self.next_walk = time.monotonic() + _WALK_EVERY
        self._check_gaps()

    def __len__(self) -> int:
        return max(self.bpf.living, len(self.scan)) if self._gaps else self.bpf.living

    def refreshing(self) -> Iterator[None]:
        """Scan too, while incomplete."""
        self._ask_for_missed()
        self._check_gaps()
        return self.scan.refreshing() if self._gaps else iter(())

    def read(self, host_pid: int) -> None:
        if self._gaps:
            self.scan.read(host_pid)

    @property
    def tend_at(self) -> float:
        """Return when the next walk is due; during a walk, now."""
        if self._trouble:
            return math.inf
        return self.next_walk if self.comparing is None else 0.0

    def tend(self) -> None:
        """Walk over the kernel's tasks, some milliseconds in each call, and put back missing ones.

        Probes can miss an event (seen on Linux 7.3.4), and others can change the map.
        """
        now = time.monotonic()
        if self.comparing is None and now >= self.next_walk:
            self.next_walk = now + _WALK_EVERY
            self._ask_for_missed()
            self._missed_before = self._drift["missed"]
            self.comparing = self.bpf.reconciling()
        if self.comparing is not None:
            until = time.thread_time() + SLICE_SECONDS
            try:
                missing = next(self.comparing)
                while missing is None and time.thread_time() < until:
                    missing = next(self.comparing)
            except OSError as error:
                self.comparing = None
                self._failed(error)
            else:
                if missing is not None:
                    self.comparing = None
                    self._unseen = self._drift["missed"] > self._missed_before
                    self._drift["drift_missing"] += missing
        self._check_gaps()

    def candidates(self, ns_pid: int, pidns: int | None = None) -> list[int]:
        if pidns is None:
            return sorted({*self.everywhere(ns_pid)} - {0})
        record = self._read(self.bpf.lookup, pidns, ns_pid)
        host_pids = {record.host_pid} if record and record.levels[-1] == (pidns, ns_pid) else set()
        return sorted(host_pids.union(self.scan.candidates(ns_pid)) if self._gaps else host_pids)

    def everywhere(self, ns_pid: int) -> Iterator[int]:
        try:
            yield from self.bpf.everywhere(ns_pid)
        except OSError as error:
            self._failed(error)
        if self._gaps:
            yield from self.scan.candidates(ns_pid)

    def namespaces_of(self, host_pid: int, arrival: int) -> tuple[int, ...]:
        record = self._read(self.bpf.by_host, host_pid)
        if record is None or record.start_ns != arrival:
            return ()
        return tuple(pidns for pidns, _ in record.levels)

    def inits(self) -> Iterator[tuple[int, int]]:
        processes = self._read(self.bpf.first_processes)
        if self._gaps:
            yield from self.scan.inits()
        yield from processes or ()

    def arrival(self, host_pid: int) -> int:
        """Start in nanoseconds since boot, or the scan's arrival."""
        record = self._read(self.bpf.by_host, host_pid)
        if record is not None:
            return record.start_ns
        return self.scan.arrival(host_pid) if self._gaps else 0

    def exact(self) -> KernelMap | None:
        self._check_gaps()
        return None if self._gaps else self.bpf

    def shortage(self) -> str:
        if self._trouble or self._unseen or not self._gaps:
            return ""
        return (
            "the kernel's map does not hold every process, so /proc is scanned too, which costs more: if the "
            "counter `full` grows, raise --map-size, or leave it out, and the map grows by itself within minutes; "
            "report it if another one grows"
        )

    def incomplete(self) -> str:
        return self.scan.incomplete() if self._gaps else ""

    def trouble(self) -> str:
        return self._trouble

    def counters(self) -> Mapping[str, int]:
        try:
            return {**self.bpf.counters(), **self._drift}
        except OSError:
            return dict(self._drift)

    def close(self) -> None:
        self.bpf.close()

    def _ask_for_missed(self) -> None:
        """Distrust absences after a missed event until the next walk."""
        missed = self._read(self.bpf.missed_events) or 0
        if missed > self._drift["missed"]:
            self._drift["missed"] = missed
            self._unseen = True

    def _read(self, read: Callable[..., _Found], *question: int) -> _Found | None:
        """Query the map; None if no longer readable."""
        try:
            return read(*question)
        except OSError as error:
            self._failed(error)
            return None

    def _failed(self, error: OSError) -> None:
        if not self._trouble:
            self.scan.refresh()
        self._trouble = f"the map cannot be read: {error.strerror}"
        self._gaps = True

    def _check_gaps(self) -> None:
        """Scan while the map has no room for some processes."""
        before, complete = self._gaps, self._read(self.bpf.complete)
        self._gaps = bool(self._trouble) or self._unseen or not complete
        if before and not self._gaps:
            self.scan = ScanSource(self._procfs)  # frees the memory of the other one


def open_source(procfs: Procfs, room: int, run_dir: str) -> BpfSource:
    """Load a map for ``room`` processes."""
    return BpfSource(start(room, kept_in=run_dir), procfs)
