"""An index over a lister: by host PID, and by the PID that a process knows itself by.

A process that ended stays for a minute as a tombstone, so that a utilization sample taken before the end still has an
owner.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from resolver.pids.source import Lister, ProcessChanges

_TOMBSTONES = 8192
_TOMBSTONE_SECONDS = 60.0


class Listing:
    """A `resolver.pids.source.PidSource` made of a `resolver.pids.source.Lister`."""

    namespaced = False

    def __init__(self, lister: Lister) -> None:
        self.name = lister.name
        self.lister = lister
        self._unreadable = 0
        self._by_inner: dict[int, set[int]] = {}
        self._inner_of: dict[int, int] = {}
        self._arrivals: dict[int, int] = {}
        self._arrived = 0
        self._changed_firsts = 0  # how often a first process came or went
        self._tombstones: OrderedDict[int, tuple[float, int]] = OrderedDict()  # when, and its arrival

    def __len__(self) -> int:
        return len(self._inner_of)

    def __contains__(self, host_pid: object) -> bool:
        return host_pid in self._inner_of

    def refresh(self) -> None:
        """Ask the lister what changed, and bring the index up to date."""
        now = time.monotonic()
        changes = self.lister.refresh()
        self._take(changes, now)
        self._unreadable = changes.unreadable
        stones = self._tombstones
        while stones and (
            len(stones) > _TOMBSTONES or next(iter(stones.values()))[0] < now - _TOMBSTONE_SECONDS
        ):
            stones.popitem(last=False)

    def ahead(self) -> Iterator[None]:
        """Let the lister do the long part of the next refresh; what it meets that is new is indexed at once."""
        for host_pid in self.lister.ahead():
            if host_pid:
                self.look(host_pid)
            yield

    def look(self, host_pid: int) -> None:
        """Let the lister read this one process, and index it."""
        self._take(self.lister.look(host_pid), time.monotonic())

    def _take(self, changes: ProcessChanges, now: float) -> None:
        for host_pid in changes.went:
            self._forget(host_pid, now)
        ns_pids = self.lister.ns_pids()
        for host_pid in changes.came:
            numbers = ns_pids.get(host_pid)
            if numbers is None:
                continue  # came and went
            inner = numbers[-1] if numbers else host_pid
            self._forget(host_pid, now)
            self._arrived += 1
            self._inner_of[host_pid], self._arrivals[host_pid] = inner, self._arrived
            self._by_inner.setdefault(inner, set()).add(host_pid)
            self._changed_firsts += inner == 1
            self._tombstones.pop(host_pid, None)

    @property
    def tend_at(self) -> float:
        """As of the lister."""
        return self.lister.tend_at

    def tend(self) -> None:
        """The lister's own upkeep."""
        self.lister.tend()

    def candidates(self, ns_pid: int, _pidns: int | None = None) -> list[int]:
        """Host PIDs of every process whose own number is ``ns_pid``; of namespaces it knows nothing."""
        return sorted(self._by_inner.get(ns_pid, ()))

    def everywhere(self, ns_pid: int) -> Iterator[int]:
        """As `candidates`."""
        return iter(self.candidates(ns_pid))

    def namespaces_of(self, _host_pid: int, _arrival: int) -> tuple[int, ...]:
        """None: the numbers of a process don't give its namespaces."""
        return ()

    def inits_mark(self) -> object:
        """How often one came or went."""
        return self._changed_firsts

    def inits(self) -> Iterator[tuple[int, int]]:
        """Every process whose own number is 1."""
        # What comes and goes meanwhile changes the mark, so whoever asks asks again.
        return (
            (pid, self._arrivals[pid]) for pid in list(self._by_inner.get(1, ())) if pid in self._arrivals
        )

    def arrival(self, host_pid: int) -> int:
        """When it was first listed, in order of arrival; 0 if it is not known."""
        return self._arrivals.get(host_pid, 0)

    def ended(self, host_pid: int) -> int:
        """The arrival of one that was listed and is gone since less than a minute; 0 if there is none."""
        return self._tombstones.get(host_pid, (0.0, 0))[1]

    def shortage(self) -> str:
        """None: what cannot be read is in `incomplete`."""
        return ""

    def incomplete(self) -> str:
        """Processes that could not be read."""
        return f"{self._unreadable} processes could not be read" if self._unreadable else ""

    def exact(self) -> None:
        """None: processes come and go between two refreshes."""

    def trouble(self) -> str:
        """What the lister says of its health."""
        return self.lister.trouble()

    def counters(self) -> Mapping[str, int]:
        """What the lister counts."""
        return self.lister.counters()

    def close(self) -> None:
        """Close the lister."""
        self.lister.close()

    def _forget(self, host_pid: int, now: float) -> None:
        inner = self._inner_of.pop(host_pid, None)
        if inner is None:
            return
        self._changed_firsts += inner == 1
        arrival = self._arrivals.pop(host_pid)
        same = self._by_inner[inner]
        same.discard(host_pid)
        if not same:
            del self._by_inner[inner]
        self._tombstones[host_pid] = now, arrival
        self._tombstones.move_to_end(host_pid)
