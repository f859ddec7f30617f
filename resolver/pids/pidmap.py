"""The source in use, and what stays right when it is exchanged while the daemon runs.

Questions about processes go to ``pidmap.source`` (`resolver.pids.source.PidSource`); the caller verifies an answer.
Here is what no source can answer alone: values that name a process across sources, how often it may be asked to
refresh, what all of them counted, and whose a process was that has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from resolver.pids.source import close

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from resolver.budget import Slices
    from resolver.pids.source import PidSource

#: Refreshes may take at most one part in this many of the time, whatever tenants do to cause them.
_REST_FACTOR = 5
_AT_ONCE = 64  # first processes between two steps
#: As many as a scan has tombstones.
_MOST_CONTAINERS = 8192


class PidMap:
    """Every process of the node, as of the last refresh of its ``source``, which is closed by who has the map."""

    def __init__(self, source: PidSource) -> None:
        self.source = source
        self.refreshes = 0
        self.last_seconds = 0.0
        self._generation = 0
        self._past: Counter[str] = Counter()  # counted by sources that are closed
        self._next_refresh = 0.0
        self._catching_up = asyncio.Lock()
        self._inits: dict[int, tuple[int, int]] = {}
        self._inits_mark: object = None
        self._containers: OrderedDict[int, tuple[tuple[int, int], str]] = OrderedDict()

    def use(self, source: PidSource) -> None:
        """Go over to another source, whatever the present one does that is closed then."""
        before, self.source = self.source, source
        self._generation += 1
        self._next_refresh = 0.0
        with contextlib.suppress(Exception):  # it may have failed in a way that nobody foresaw
            self._past.update(before.counters())
        close(before)

    async def catch_up(self, slices: Slices, *, unhurried: bool = True) -> bool:
        """As `refresh`, but the loop's other tasks go on meanwhile."""
        # One after the other: what somebody has begun before this call may lack what has come since.
        async with self._catching_up:
            if unhurried and time.monotonic() < self._next_refresh:
                return False
            source, spent = self.source, 0.0
            began = time.monotonic()
            for _ in source.ahead():
                if slices.over():
                    spent += time.monotonic() - began
                    await slices.give_way()
                    began = time.monotonic()
                if self.source is not source:
                    break
            self._refresh(spent + time.monotonic() - began)
            for _ in self._list_inits():
                await slices.breathe()
            return True

    def refresh(self, *, unhurried: bool = True) -> bool:
        """Know of every process that exists now; False if that was asked too recently and nothing was done.

        ``unhurried=False`` asks at any cost, for a single pass that nobody can repeat.
        """
        if unhurried and time.monotonic() < self._next_refresh:
            return False
        self._refresh(0.0)
        for _ in self._list_inits():
            pass
        return True

    def _refresh(self, spent: float) -> None:
        """``spent`` is what was done for it before, in seconds."""
        began = time.monotonic()
        self.source.refresh()
        self.refreshes += 1
        self.last_seconds = spent + time.monotonic() - began
        self._next_refresh = time.monotonic() + self.last_seconds * (_REST_FACTOR - 1)

    def _list_inits(self) -> Iterator[None]:
        """Bring `inits` up to date; nothing of it shows before it is complete."""
        mark = self._generation, self.source.inits_mark()
        before = self._inits_mark
        if mark == before:
            return
        generation, known = self._generation, self._inits
        present = {}
        for number, (host_pid, arrival) in enumerate(self.source.inits()):
            was = known.get(host_pid)
            present[host_pid] = was if was == (generation, arrival) else (generation, arrival)
            if number % _AT_ONCE == 0:
                yield
        # If there is another mark now, somebody began after this and is through: that is younger.
        if self._inits_mark is before and generation == self._generation:
            self._inits, self._inits_mark = present, mark

    def candidates_in(self, ns_pid: int, namespaces: frozenset[int]) -> list[int]:
        """Processes with that number in these namespaces, and in others where the source doesn't know namespaces."""
        if not self.source.namespaced:
            return self.source.candidates(ns_pid)
        return sorted({each for pidns in namespaces for each in self.source.candidates(ns_pid, pidns)})

    def inits(self) -> Mapping[int, tuple[int, int]]:
        """``{host_pid: arrival}`` of the first process of every PID namespace; that of the host may be left out.

        As of the last refresh, and the same object as long as none came or went.
        """
        return self._inits

    def arrival(self, host_pid: int) -> tuple[int, int]:
        """A value that is never used again for another process with that host PID."""
        return self._generation, self.source.arrival(host_pid)

    def namespaces_of(self, host_pid: int, arrival: tuple[int, int]) -> tuple[int, ...]:
        """As of the source, of the process with that `arrival`."""
        generation, arrived = arrival
        return self.source.namespaces_of(host_pid, arrived) if generation == self._generation else ()

    def name_container(self, host_pid: int, container: str) -> None:
        """Remember whose a process is, so that it is known after its end."""
        arrival = self.arrival(host_pid)
        if arrival[1]:
            self._containers[host_pid] = arrival, container
            self._containers.move_to_end(host_pid)
            if len(self._containers) > _MOST_CONTAINERS:
                self._containers.popitem(last=False)

    def container_of(self, host_pid: int) -> str:
        """What `name_container` was given for the last process with this PID that ended, or of the one that is known.

        Empty if that was another process, or if it ended more than a minute ago.
        """
        arrival, container = self._containers.get(host_pid, ((0, 0), ""))
        last = self.source.ended(host_pid) or self.source.arrival(host_pid)
        return container if arrival == (self._generation, last) else ""

    def counters(self) -> Mapping[str, int]:
        """What was lost, missed and repaired by this source and those before it."""
        total = Counter(self.source.counters())
        total.update(self._past)  # not `+`, which would leave out what is still 0
        return total
