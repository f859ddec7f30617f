"""The source in use, and state that survives its replacement: counters, the limit on refreshes, containers."""

import asyncio
import contextlib
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping

from resolver.base.budget import Slices
from resolver.pids.source import PidSource, close

#: Refreshes may take at most one part in this many of a CPU's time, whatever tenants do to cause them.
_REST_FACTOR = 5
_AT_ONCE = 64  # first processes between two steps
#: Containers of processes that may have ended, and the seconds they are kept: longer than samples live.
MOST_CONTAINERS, _KNOWN_SECONDS = 8192, 10.0


class PidMap:
    """Every process of the node, as of the last refresh; the caller verifies answers."""

    def __init__(self, source: PidSource) -> None:
        self.source = source
        self.refreshes = 0
        self._generation = 0
        self._past: Counter[str] = Counter()  # counted by sources that are closed
        self.next_refresh = 0.0
        self._catching_up = asyncio.Lock()
        self._inits: dict[int, tuple[int, int]] = {}
        self._containers: OrderedDict[int, tuple[float, str]] = OrderedDict()

    def use(self, source: PidSource) -> None:
        """Replace the source in use, ignoring its errors."""
        before, self.source = self.source, source
        self._generation += 1
        self.next_refresh = 0.0
        with contextlib.suppress(Exception):  # it has failed
            self._past.update(before.counters())
        close(before)

    async def catch_up(self, slices: Slices, *, rate_limited: bool = True) -> bool:
        """Refresh the source; False if ``rate_limited`` and the last refresh is recent."""
        # Refreshes take turns: one that began before this call may lack a process that has started since.
        async with self._catching_up:
            if rate_limited and time.monotonic() < self.next_refresh:
                return False
            source, spent = self.source, 0.0
            began = time.thread_time()  # CPU time, because a busy machine prolongs a refresh at no extra cost
            for _ in source.refreshing():
                if slices.over():
                    spent += time.thread_time() - began
                    await slices.yield_now()
                    began = time.thread_time()
                if self.source is not source:
                    self.source.refresh()
                    break
            spent += time.thread_time() - began
            self.refreshes += 1
            self.next_refresh = time.monotonic() + spent * (_REST_FACTOR - 1)
            for _ in self._list_inits():
                await slices.yield_if_due()
            return True

    def _list_inits(self) -> Iterator[None]:
        """Update `inits` in steps; it shows when complete."""
        generation, present = self._generation, {}
        for number, (host_pid, arrival) in enumerate(self.source.inits()):
            present[host_pid] = generation, arrival
            if number % _AT_ONCE == 0:
                yield
        if generation == self._generation and present != self._inits:
            self._inits = present

    def candidates_in(self, ns_pid: int, namespaces: frozenset[int]) -> list[int]:
        """Host PIDs in these namespaces, or in all if the source knows none."""
        if not self.source.namespaced:
            return self.source.candidates(ns_pid)
        return sorted(
            {candidate for pidns in namespaces for candidate in self.source.candidates(ns_pid, pidns)}
        )

    def inits(self) -> Mapping[int, tuple[int, int]]:
        """``{host_pid: arrival}`` of first processes; the same object until one comes or goes."""
        return self._inits

    def arrival(self, host_pid: int) -> tuple[int, int]:
        """Value unique among processes with that PID."""
        return self._generation, self.source.arrival(host_pid)

    def namespaces_of(self, host_pid: int, arrival: tuple[int, int]) -> tuple[int, ...]:
        generation, arrived = arrival
        return self.source.namespaces_of(host_pid, arrived) if generation == self._generation else ()

    def name_container(self, host_pid: int, container: str) -> None:
        """Remember the container of a process that runs now, for utilization samples taken before its end."""
        self._containers[host_pid] = time.monotonic(), container
        self._containers.move_to_end(host_pid)
        if len(self._containers) > MOST_CONTAINERS:
            self._containers.popitem(last=False)

    def container_of(self, host_pid: int) -> str | None:
        """Container of a process that has ended; None if it was not named in the last seconds."""
        named, container = self._containers.get(host_pid, (-math.inf, ""))
        return container if time.monotonic() - named < _KNOWN_SECONDS else None

    def counters(self) -> Mapping[str, int]:
        total = Counter(self.source.counters())
        total.update(self._past)  # `+` would drop counters at 0
        return total
