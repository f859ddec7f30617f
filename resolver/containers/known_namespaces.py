"""Index of the node's PID namespaces by their first processes, with container and mounts.

A PID namespace lives as long as its first process: its cgroup shows the container, its mounts show the directories.
Namespaces below and above it (except the host's) belong to the container, too. A first process exists before its cgroup
and mounts, so it is read again, ever more rarely. A tenant can make thousands: the work goes in small steps that
several tasks may share.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from resolver.base.budget import Slices
from resolver.base.errors import AccessDenied, CannotKnow, ProcessGone, WorkerFailed
from resolver.containers.namespaces import is_gvisor
from resolver.linux.procfs import HOST_PIDNS, Procfs
from resolver.pids.pidmap import PidMap

_K = TypeVar("_K", bound="Hashable")

#: Seconds of one refresh to place namespaces, some 5 us each by the kernel's map, 15 us without.
SLICE_SECONDS = 0.02
#: Seconds of one refresh to read the cgroups of first processes; a lane reads their mounts.
READ_SECONDS = 0.005
#: Seconds between two readings of a process; the last pause repeats: a runtime adds no mounts to a running container.
_PAUSES = (0.001, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 120.0, 300.0, 600.0)
#: Seconds of one refresh spent waiting for due mounts.
_MOUNTS_SECONDS = 0.02
#: More namespaces than these in one container are not searched.
MAX_NAMESPACES = 1024
_AT_ONCE = 64  # processes between two steps
_BELOW_HOST = (HOST_PIDNS,)  # shared, because almost all are equal


class FirstProcess:
    """First process of a PID namespace. ``made_by_runtime``: its parent was seen outside the container."""

    __slots__ = (
        *("host_pid", "arrival", "pidns", "level", "parents", "directories", "container_id"),
        *("made_by_runtime", "reads", "due"),
    )

    def __init__(self, host_pid: int, arrival: tuple[int, int]) -> None:
        self.host_pid, self.arrival = host_pid, arrival
        self.pidns = 0  # not known yet
        self.level = 0
        self.parents: tuple[int, ...] = ()  # the host's first
        self.directories = frozenset[Hashable]()
        self.container_id = ""
        self.made_by_runtime = False
        self.reads, self.due = 0, 0.0  # number of reads of its mounts, time of the next

    def __lt__(self, other: FirstProcess) -> bool:
        # The newest of the never-read ones first.
        return (self.due, other.arrival) < (other.due, self.arrival)


class _Readings:
    """First processes with unread mounts, by host PID, and the task that reads them."""

    def __init__(self) -> None:
        self.waiting: dict[int, FirstProcess] = {}
        self.task: asyncio.Task[None] | None = None


class Learned(NamedTuple):
    """Namespace of a verified owner. ``init`` is None if unknown."""

    init: FirstProcess | None
    container_id: str


class KnownNamespaces:
    """The index."""

    def __init__(self, procfs: Procfs, pidmap: PidMap, clock: Callable[[], float] = time.monotonic) -> None:
        self._procfs, self._pidmap, self._clock = procfs, pidmap, clock
        self._directories: Callable[[int], Coroutine[Any, Any, frozenset[Hashable]]] | None = None
        self._first, self._again = _Readings(), _Readings()  # of those never read before, and of all others
        self.firsts: dict[int, FirstProcess] = {}  # by host PID
        self._seen: object = None  # the `PidMap.inits` that they are from
        #: The newest last, which is placed first: requests are mostly about it.
        self._unplaced: list[FirstProcess] = []
        self.not_placed: list[FirstProcess] = []  # failed; tried again with the next refresh
        self._due: list[FirstProcess] = []  # a heap by time
        self._by_pidns: dict[int, FirstProcess] = {}
        self._by_id: dict[str, set[int]] = {}  # host PIDs of runtimes' first processes, by container id
        self._with: dict[Hashable, set[int]] = {}  # namespaces by a mount of their first process
        self._below: dict[int, set[int]] = {}  # namespaces by their parent namespace
        self._learned: dict[Hashable, dict[int, Learned]] = {}
        self._of: dict[Hashable, frozenset[int]] = {}  # answers since the last refresh
        self._epoch = -1

    def on_mounts_needed(
        self, directories: Callable[[int], Coroutine[Any, Any, frozenset[Hashable]]]
    ) -> None:
        """Identify containers by ``directories(host_pid)``, those in a process's mount table."""
        self._directories = directories

    @property
    def behind(self) -> bool:
        return bool(self._unplaced)

    async def catch_up(self, slices: Slices, *, bounded: bool = True) -> None:
        """Apply the map's last refresh, in limited time if ``bounded``: then only first readings are awaited."""
        if self._epoch != self._pidmap.refreshes:
            self._epoch = self._pidmap.refreshes
            self._of.clear()
            for _ in self.steps(*((SLICE_SECONDS, READ_SECONDS) if bounded else ())):
                await slices.yield_if_due()
        for reads in (self._first, *(() if bounded else (self._again,))):
            if reads.task is not None and not reads.task.done():
                await asyncio.wait({reads.task}, timeout=_MOUNTS_SECONDS if bounded else None)

    def steps(self, placing: float = math.inf, reading: float = math.inf) -> Iterator[None]:
        """Place new namespaces, then read due ones, for so many seconds; consistent after each step."""
        while (inits := self._pidmap.inits()) is not self._seen:
            yield from self._follow(inits)
        self._unplaced.extend(self.not_placed)
        self.not_placed.clear()
        yield from _repeat(self._place_next, placing)
        yield from _repeat(partial(self._read_next, self._clock()), reading)

    def _follow(self, inits: Mapping[int, tuple[int, int]]) -> Iterator[None]:
        """Keep exactly these first processes; end if there are newer ones."""
        for number, first in enumerate(list(self.firsts.values())):
            if inits.get(first.host_pid) != first.arrival and self._lives(first):
                self._forget(first)
            if number % _AT_ONCE == 0:
                yield
                if self._pidmap.inits() is not inits:
                    return
        for number, (host_pid, arrival) in enumerate(inits.items()):
            if host_pid not in self.firsts:
                new = self.firsts[host_pid] = FirstProcess(host_pid, arrival)
                self._unplaced.append(new)
            if number % _AT_ONCE == 0:
                yield
                if self._pidmap.inits() is not inits:
                    return
        self._seen = inits
        if len(self._due) > 2 * len(self.firsts):  # thousands have ended: emptied tables keep their memory
            self._due = list(filter(self._lives, self._due))
            heapq.heapify(self._due)
            self.firsts, self._by_pidns = dict(self.firsts), dict(self._by_pidns)
            self._with = {directory: set(namespaces) for directory, namespaces in self._with.items()}
            self._below = {above: set(namespaces) for above, namespaces in self._below.items()}

    def _lives(self, first: FirstProcess) -> bool:
        return self.firsts.get(first.host_pid) is first

    def _place_next(self) -> bool:
        if not self._unplaced:
            return False
        first = self._unplaced.pop()
        if self._lives(first) and not self._place(first):
            self.not_placed.append(first)
        return True

    def _place(self, first: FirstProcess) -> bool:
        """Determine a first process's namespace and those above it, which never change; False if unknown."""
        chain = self._pidmap.namespaces_of(first.host_pid, first.arrival)
        try:
            depth = len(chain or self._procfs.ns_pids(first.host_pid))
            own = chain[-1] if chain else self._procfs.pidns(first.host_pid)
            if depth == 2:
                first.parents = _BELOW_HOST
            elif chain:
                first.parents = chain[:-1]
            elif depth > 2:
                with suppress(CannotKnow):
                    first.parents = self._procfs.pidns_chain(first.host_pid)[:-1]
        except (ProcessGone, AccessDenied, CannotKnow):
            return False
        first.pidns, first.level = own, depth - 1
        self._by_pidns[own] = first
        if first.parents:
            self._below.setdefault(first.parents[-1], set()).add(own)
        self._of.clear()
        heapq.heappush(self._due, first)
        return True

    def _read_next(self, now: float) -> bool:
        """Read the container and mounts of a due first process, never-read ones first; False if none is due."""
        if not self._due or self._due[0].due > now:
            return False
        first = heapq.heappop(self._due)
        if not self._lives(first):
            return True
        first.due = now + _PAUSES[min(first.reads, len(_PAUSES) - 1)]
        first.reads += 1
        heapq.heappush(self._due, first)
        self._identify(first)
        if self._directories is not None:
            reads = self._first if first.reads == 1 else self._again
            reads.waiting[first.host_pid] = first
            if reads.task is None or reads.task.done():
                reads.task = asyncio.create_task(self._read_mounts(reads.waiting))
        return True

    async def _read_mounts(self, waiting: dict[int, FirstProcess]) -> None:
        while waiting:
            _, first = waiting.popitem()
            if self._directories is not None and self._lives(first):
                with suppress(ProcessGone, CannotKnow, WorkerFailed, OSError):
                    directories = await self._directories(first.host_pid)
                    if directories != first.directories and self._lives(first):
                        self._remove(first)
                        first.directories = directories
                        for directory in directories:
                            self._with.setdefault(directory, set()).add(first.pidns)
                        self._of.clear()

    def _identify(self, first: FirstProcess) -> None:
        """Determine a first process's container; its parent in the same container marks a nested namespace."""
        if first.made_by_runtime:
            return
        procfs, host_pid = self._procfs, first.host_pid
        with suppress(ProcessGone, AccessDenied):
            first.container_id = procfs.container(host_pid).container_id
            if not first.container_id:
                return
            # The numbers in the namespace of gVisor's gofer are not those that the container knows.
            if is_gvisor(procfs, host_pid):
                return
            if procfs.container(procfs.parent(host_pid)).container_id != first.container_id:
                first.made_by_runtime = True
                self._by_id.setdefault(first.container_id, set()).add(host_pid)

    def _forget(self, first: FirstProcess) -> None:
        del self.firsts[first.host_pid]
        _discard(self._by_id, first.container_id, first.host_pid)
        self._remove(first)
        if self._by_pidns.get(first.pidns) is first:
            del self._by_pidns[first.pidns]
            if first.parents:
                _discard(self._below, first.parents[-1], first.pidns)

    def _remove(self, first: FirstProcess) -> None:
        for directory in first.directories:
            _discard(self._with, directory, first.pidns)

    def first_process_of(self, container_id: str) -> FirstProcess | None:
        """Return the container's first process made by a runtime; None if two claim the id."""
        claims = self._by_id.get(container_id, ())
        if len(claims) != 1:
            return None
        (host_pid,) = claims
        first = self.firsts[host_pid]
        return first if self._pidmap.arrival(host_pid) == first.arrival else None

    def made_by_runtime(self) -> Iterator[FirstProcess]:
        return (self.firsts[host_pid] for claims in self._by_id.values() for host_pid in claims)

    def of(self, key: Hashable) -> frozenset[int]:
        """PID namespaces; empty if unknown."""
        namespaces = self._of.get(key)
        if namespaces is None:
            learned = self._learned.get(key, {}).items()
            seeds = {
                *self._with.get(key, ()),
                *(pidns for pidns, entry in learned if self._still_there(entry)),
            }
            for pidns in tuple(seeds):
                init = self._by_pidns.get(pidns)
                if init is not None and pidns != HOST_PIDNS:
                    seeds.update(parent for parent in init.parents if parent != HOST_PIDNS)
                    self._add_below(pidns, seeds)
            namespaces = self._of[key] = frozenset(seeds)
        return namespaces

    def container_ids(self, key: Hashable) -> set[str]:
        ids = {learned.container_id for learned in self._learned.get(key, {}).values()}
        for pidns in self._with.get(key, ()):
            ids.add(self._by_pidns[pidns].container_id)
        return ids - {""}

    def learn(self, key: Hashable, pidns: int, container_id: str) -> None:
        """Note that a slot's verified owner is in that namespace."""
        learned = Learned(self._by_pidns.get(pidns), container_id)
        before = self._learned.setdefault(key, {})
        if before.get(pidns) != learned:
            if len(before) >= 2 * MAX_NAMESPACES:  # a container may make namespaces one after the other
                before = {pidns: entry for pidns, entry in before.items() if self._still_there(entry)}
                self._learned[key] = before
            before[pidns] = learned
            self._of.pop(key, None)

    def proven(self, key: Hashable) -> bool:
        """Check if a namespace was learned: PIDs in its slots are this kernel's."""
        return key in self._learned

    def forget(self, key: Hashable) -> None:
        self._learned.pop(key, None)
        self._of.pop(key, None)

    def _still_there(self, learned: Learned) -> bool:
        return learned.init is None or self._lives(learned.init)

    def _add_below(self, pidns: int, namespaces: set[int]) -> None:
        queue = [pidns]
        while queue and len(namespaces) <= MAX_NAMESPACES:
            below = self._below.get(queue.pop(), set()) - namespaces
            namespaces |= below
            queue.extend(below)


def _discard(sets: dict[_K, set[int]], key: _K, number: int) -> None:
    numbers = sets.get(key)
    if numbers is not None:
        numbers.discard(number)
        if not numbers:
            del sets[key]


def _repeat(work: Callable[[], bool], seconds: float) -> Iterator[None]:
    """Repeat the work for so many seconds, once in each step, until none is left."""
    while seconds >= 0:
        began = time.monotonic()
        if not work():
            return
        seconds -= time.monotonic() - began
        yield
