"""The node's PID namespaces by what is mounted in them: where the owner of a slot is searched for.

To be asked with each slot, without a walk; what one container's namespaces are, seen from its processes, is in
`resolver.containers.namespaces`.

Each PID namespace lives exactly as long as its first process. The mount tables of those processes tell whose
namespace it is; what is below such a namespace, or above it (but for the host's), belongs to the container, too. A
process that was found to own a slot adds its own namespace, which is then known for certain.

Of each new first process the mount table is read once, and again ever more rarely: a process is there before
its runtime has made the mounts. All of that is bounded in time for each refresh of the map.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from resolver.errors import AccessDenied, CannotKnow, ProcessGone
from resolver.linux.procfs import HOST_PIDNS
from resolver.retry import longer

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Hashable, Iterator

    from resolver.budget import Slices
    from resolver.linux.procfs import Procfs
    from resolver.pids.pidmap import PidMap

#: CPU seconds of one refresh: some 15 us to place a namespace, some 60 us to read a mount table.
SLICE_SECONDS = 0.02
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 60.0
#: More namespaces than these in one container are not searched.
MAX_NAMESPACES = 1024


class _Init:
    """The first process of a PID namespace."""

    __slots__ = (
        "arrival",
        "container_id",
        "directories",
        "host_pid",
        "parents",
        "pause",
        "pidns",
        "retry_at",
    )

    def __init__(self, host_pid: int, arrival: tuple[int, int]) -> None:
        self.host_pid, self.arrival = host_pid, arrival
        self.pidns = 0  # not known yet
        self.parents: tuple[int, ...] = ()  # the host's first
        self.directories: frozenset[Hashable] = frozenset()
        self.container_id = ""
        self.retry_at, self.pause = 0.0, 0.0


class Learned(NamedTuple):
    """A namespace that a verified owner was in. ``init`` is None if its first process is not known."""

    init: tuple[int, tuple[int, int]] | None
    container_id: str


class NamespaceIndex:
    """The index. ``directories(host_pid)`` gives the container directories in a process's mount table."""

    def __init__(
        self,
        procfs: Procfs,
        pidmap: PidMap,
        directories: Callable[[int], frozenset[Hashable]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._procfs, self._pidmap, self._clock = procfs, pidmap, clock
        self._directories = directories
        self._inits: dict[int, _Init] = {}  # by host PID
        self._by_pidns: dict[int, _Init] = {}
        self._with: dict[Hashable, set[int]] = {}  # namespaces whose first process has that directory mounted
        self._below: dict[int, set[int]] = {}  # namespaces by the one right above them
        self._learned: dict[Hashable, dict[int, Learned]] = {}
        self._proven: set[Hashable] = set()  # those of which any was ever learned
        self._of: dict[Hashable, frozenset[int]] = {}  # answers since the last refresh
        self._epoch = -1
        self._asked_for = False  # whether somebody calls `catch_up`
        self._left = 0.0  # CPU seconds of one refresh
        #: Whether there was no time yet to place every namespace: one below another may be missing.
        self.behind = False

    def update(self, *, bounded: bool = True) -> None:
        """Take in what came and went with the last refresh of the map, in a limited time if ``bounded``."""
        for _ in self._steps(bounded=bounded):
            pass

    async def catch_up(self, slices: Slices, *, bounded: bool = True) -> None:
        """The same, but the loop's other tasks go on meanwhile. From now on no question does it by itself."""
        self._asked_for = True
        for _ in self._steps(bounded=bounded):
            await slices.breathe()

    def _steps(self, *, bounded: bool) -> Iterator[None]:
        if self._epoch == self._pidmap.refreshes:
            return
        self._epoch = self._pidmap.refreshes
        self._of.clear()
        now, inits = self._clock(), self._pidmap.inits()
        yield
        for host_pid in [pid for pid, init in self._inits.items() if inits.get(pid) != init.arrival]:
            self._forget(self._inits.pop(host_pid))
            yield
        for host_pid in inits.keys() - self._inits.keys():
            self._inits[host_pid] = _Init(host_pid, inits[host_pid])
        yield
        self._left = SLICE_SECONDS if bounded else math.inf
        unplaced = [init for init in self._inits.values() if not init.pidns]
        self.behind = True
        self.behind = not (yield from self._go_through(unplaced, self._place))
        due = [init for init in self._inits.values() if init.pidns and now >= init.retry_at]
        yield
        due.sort(key=lambda init: (init.retry_at, init.arrival))  # those that were never read first
        yield from self._go_through(due, lambda init: self._read(init, now))

    def _go_through(self, inits: list[_Init], do: Callable[[_Init], None]) -> Generator[None, None, bool]:
        """Whether there was time for all of them: our own, and not others' while we gave way."""
        for init in inits:
            if self._left < 0:
                return False
            began = time.thread_time()
            with suppress(ProcessGone, AccessDenied, CannotKnow):
                do(init)
            self._left -= time.thread_time() - began
            yield
        return True

    def of(self, place: Hashable) -> frozenset[int]:
        """The PID namespaces of the container, that of the host only where it was seen to be one; empty: not known."""
        if not self._asked_for:
            self.update()
        known = self._of.get(place)
        if known is None:
            learned = (pidns for pidns, each in self._learned.get(place, {}).items() if self._lives(each))
            seeds = {*self._with.get(place, ()), *learned}
            for pidns in tuple(seeds):
                init = self._by_pidns.get(pidns)
                if init is not None and pidns != HOST_PIDNS:
                    seeds.update(each for each in init.parents if each != HOST_PIDNS)
                    self._add_below(pidns, seeds)
            known = self._of[place] = frozenset(seeds)
        return known

    def container_ids(self, place: Hashable) -> set[str]:
        """Ids of the containers of processes that certainly have this place: seen with its mount, or learned."""
        ids = {each.container_id for each in self._learned.get(place, {}).values()}
        for pidns in self._with.get(place, ()):
            ids.add(self._by_pidns[pidns].container_id)
        return ids - {""}

    def learn(self, place: Hashable, pidns: int, container_id: str) -> None:
        """A verified owner of a slot of this place is in that namespace."""
        init = self._by_pidns.get(pidns)
        learned = Learned((init.host_pid, init.arrival) if init else None, container_id)
        self._proven.add(place)
        known = self._learned.setdefault(place, {})
        if known.get(pidns) != learned:
            if (
                len(known) >= 2 * MAX_NAMESPACES
            ):  # a container may make any number of them, one after the other
                known = {pidns: each for pidns, each in known.items() if self._lives(each)}
                self._learned[place] = known
            known[pidns] = learned
            self._of.pop(place, None)

    def first_processes(self, place: Hashable) -> list[int]:
        """Host PIDs of the first processes that have this place mounted."""
        return [self._by_pidns[pidns].host_pid for pidns in self._with.get(place, ())]

    def proven(self, place: Hashable) -> bool:
        """Whether any of its namespaces was learned: the numbers in its slots are those of this kernel's processes."""
        return place in self._proven

    def forget(self, place: Hashable) -> None:
        """The place is gone."""
        self._learned.pop(place, None)
        self._proven.discard(place)
        self._of.pop(place, None)

    def _lives(self, learned: Learned) -> bool:
        return learned.init is None or self._pidmap.arrival(learned.init[0]) == learned.init[1]

    def _add_below(self, pidns: int, found: set[int]) -> None:
        queue = [pidns]
        while queue and len(found) <= MAX_NAMESPACES:
            below = self._below.get(queue.pop(), set()) - found
            found |= below
            queue.extend(below)

    def _read(self, init: _Init, now: float) -> None:
        init.retry_at = now + init.pause
        init.pause = longer(init.pause, _FIRST_PAUSE, _LONGEST_PAUSE)
        directories = self._directories(init.host_pid)
        init.container_id = self._procfs.container(init.host_pid).container_id
        if directories != init.directories:
            self._take_out(init)
            init.directories = directories
            for directory in directories:
                self._with.setdefault(directory, set()).add(init.pidns)
            self._of.clear()

    def _place(self, init: _Init) -> None:
        """Its namespace and those above it. They never change."""
        depth = len(self._procfs.ns_pids(init.host_pid))
        own = self._procfs.pidns(init.host_pid)
        if depth > 2:
            try:
                init.parents = self._procfs.pidns_chain(init.host_pid)[:-1]
            except CannotKnow:
                init.parents = ()
        elif depth == 2:
            init.parents = (HOST_PIDNS,)
        init.pidns = own
        self._by_pidns[own] = init
        if init.parents:
            self._below.setdefault(init.parents[-1], set()).add(own)
        self._of.clear()

    def _take_out(self, init: _Init) -> None:
        for directory in init.directories:
            namespaces = self._with[directory]
            namespaces.discard(init.pidns)
            if not namespaces:
                del self._with[directory]

    def _forget(self, init: _Init) -> None:
        self._take_out(init)
        if self._by_pidns.get(init.pidns) is init:
            del self._by_pidns[init.pidns]
            if init.parents and (beside := self._below.get(init.parents[-1])):
                beside.discard(init.pidns)
                if not beside:
                    del self._below[init.parents[-1]]
