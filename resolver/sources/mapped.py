"""The kernel's own map as a source: exact at any moment, nothing to refresh.

The map can be too small for the node, and says so. Then the processes that found no room are found by a scan
beside it; nothing is wrong, it only costs more.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from resolver.sources.listing import Listing
from resolver.sources.scan import ScanSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resolver.procfs import Procfs
    from resolver.sources.bpf import BpfPidMap

_RECONCILE_EVERY = 60.0
_TOMBSTONE_NS = 60 * 10**9


class Mapped:
    """A `resolver.sources.Source` over a `BpfPidMap`."""

    name = "bpf"

    def __init__(self, bpf: BpfPidMap, procfs: Procfs) -> None:
        self.bpf = bpf
        self._procfs = procfs
        self._scan: Listing | None = None
        self._trouble = ""
        self._drift: dict[str, int] = {"drift_missing": 0, "drift_stale": 0}
        self._size = len(bpf.dump())
        self._next_reconcile = time.monotonic() + _RECONCILE_EVERY

    def __len__(self) -> int:
        return self._size

    def __contains__(self, host_pid: object) -> bool:
        return isinstance(host_pid, int) and self.bpf.by_host(host_pid) is not None

    def refresh(self) -> None:
        """Nothing, while the map is complete: the kernel has put every process into it before it first ran."""
        self._check_gaps()
        if self._scan is not None:
            self._scan.refresh()

    def tend(self) -> None:
        """Compare with the kernel's own list of tasks once a minute, and mend what drifted."""
        if time.monotonic() < self._next_reconcile:
            return
        self._next_reconcile = time.monotonic() + _RECONCILE_EVERY
        try:
            drift = self.bpf.reconcile()
            self._size = len(self.bpf.dump())
        except OSError as error:
            self._trouble = f"the map cannot be compared with the kernel's tasks: {error.strerror}"
            return
        self._drift["drift_missing"] += drift.missing
        self._drift["drift_stale"] += drift.stale
        self._check_gaps()

    def candidates(self, ns_pid: int) -> list[int]:
        """By the map, in every namespace that it knows; by a scan as well while it is incomplete."""
        try:
            found = self.bpf.candidates(ns_pid)
        except OSError as error:
            self._trouble = f"the map cannot be read: {error.strerror}"
            found = []
        if self._scan is None:
            return sorted(found)
        return sorted({*found, *self._scan.candidates(ns_pid)})

    def arrival(self, host_pid: int) -> int:
        """Its start time in nanoseconds since boot."""
        record = self.bpf.by_host(host_pid)
        if record is not None:
            return record.start_ns
        return self._scan.arrival(host_pid) if self._scan is not None else 0

    def ended_recently(self, host_pid: int) -> bool:
        """By the map's tombstones."""
        stone = self.bpf.tombstone(host_pid)
        return (
            stone is not None and time.clock_gettime_ns(time.CLOCK_BOOTTIME) - stone.exit_ns < _TOMBSTONE_NS
        )

    def incomplete(self) -> str:
        """Why an absence proves nothing, if the scan beside the map does not help either."""
        return self._trouble or (self._scan.incomplete() if self._scan is not None else "")

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

    def _check_gaps(self) -> None:
        """A scan stands beside the map for as long as something found no room: what is missing has no name."""
        try:
            complete = self.bpf.complete()
        except OSError as error:
            self._trouble = f"the map's counters cannot be read: {error.strerror}"
            return
        if complete:
            self._scan = None
        elif self._scan is None:
            self._scan = Listing(ScanSource(self._procfs))
