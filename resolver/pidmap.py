"""The map of a node's processes: by host PID, and by the PID that a process knows itself by.

It holds what its source said at the last refresh; every answer is verified by whoever uses it. A process
that ended stays for a while as a tombstone, so that a utilization sample taken before the end still has an owner.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resolver.sources import Source

_TOMBSTONES = 8192
_TOMBSTONE_SECONDS = 60.0
#: A refresh may take at most one part in this many of the time, whatever tenants do to cause them.
_REST_FACTOR = 5


class PidMap:
    """Every process of the node, as of the last refresh.

    ``unreadable`` processes were there but could not be read: while there are any, an absence proves nothing.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.refreshes = 0
        self.unreadable = 0
        self.last_seconds = 0.0
        self._by_inner: dict[int, set[int]] = {}
        self._inner_of: dict[int, int] = {}
        self._arrivals: dict[int, int] = {}
        self._arrived = 0
        self._tombstones: OrderedDict[int, float] = OrderedDict()
        self._next_refresh = 0.0

    def __len__(self) -> int:
        return len(self._inner_of)

    def __contains__(self, host_pid: int) -> bool:
        return host_pid in self._inner_of

    def refresh(self, *, unhurried: bool = True) -> bool:
        """Ask the source for what changed; False if it was asked too recently and nothing was done.

        ``unhurried=False`` asks at any cost, for a single pass that nobody can repeat.
        """
        began = time.monotonic()
        if unhurried and began < self._next_refresh:
            return False
        changes = self.source.refresh()
        for host_pid in changes.went:
            self._forget(host_pid, began)
        ns_pids = self.source.ns_pids()
        for host_pid in changes.came:
            numbers = ns_pids[host_pid]
            inner = numbers[-1] if numbers else host_pid
            self._arrived += 1
            self._inner_of[host_pid], self._arrivals[host_pid] = inner, self._arrived
            self._by_inner.setdefault(inner, set()).add(host_pid)
            self._tombstones.pop(host_pid, None)
        self._bury(began)
        self.refreshes += 1
        self.unreadable = changes.unreadable
        self.last_seconds = time.monotonic() - began
        self._next_refresh = began + self.last_seconds * _REST_FACTOR
        return True

    def candidates(self, ns_pid: int) -> list[int]:
        """Host PIDs of every process, in whatever namespace, whose own number is ``ns_pid``."""
        return sorted(self._by_inner.get(ns_pid, ()))

    def arrival(self, host_pid: int) -> int:
        """A number that is never used again for another process with that host PID; 0 if it is not known."""
        return self._arrivals.get(host_pid, 0)

    def ended_recently(self, host_pid: int) -> bool:
        """Whether a process with that host PID ended within the last minute."""
        return host_pid in self._tombstones

    def _forget(self, host_pid: int, now: float) -> None:
        inner = self._inner_of.pop(host_pid, None)
        if inner is None:
            return
        del self._arrivals[host_pid]
        same = self._by_inner[inner]
        same.discard(host_pid)
        if not same:
            del self._by_inner[inner]
        self._tombstones[host_pid] = now
        self._tombstones.move_to_end(host_pid)

    def _bury(self, now: float) -> None:
        stones = self._tombstones
        while stones and (
            len(stones) > _TOMBSTONES or next(iter(stones.values())) < now - _TOMBSTONE_SECONDS
        ):
            stones.popitem(last=False)
