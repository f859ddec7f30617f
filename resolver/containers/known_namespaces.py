"""The node's PID namespaces by their first processes: whose they are, and what is mounted in them.

To be asked with each slot and each look-up, without a walk; what one container's namespaces are, seen from its
processes, is in `resolver.containers.namespaces`.

Each PID namespace lives exactly as long as its first process. The cgroups of those processes show whose namespace it
is, and their mount tables which directories are that container's; what is below such a namespace, or above it (but for
the host's), belongs to the container, too. A process that was found to own a slot adds its own namespace, which is then
known for certain.

Each new first process is read once, and again ever more rarely: a process is there before its runtime has put it into
its cgroup and made the mounts. A tenant can make thousands of them at once, so all of that goes in small steps, and any
number of tasks may take them side by side: a step leaves everything in order, and while some are still to be placed,
`KnownNamespaces.behind` says so.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from resolver.containers.namespaces import is_gvisor
from resolver.errors import AccessDenied, CannotKnow, ProcessGone
from resolver.linux.procfs import HOST_PIDNS

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

    from resolver.budget import Slices
    from resolver.linux.procfs import Procfs
    from resolver.pids.pidmap import PidMap

_K = TypeVar("_K", bound="Hashable")

#: CPU seconds of one refresh to place namespaces, some 5 us each by the kernel's map, 15 us without: everybody's search
#: waits for that.
SLICE_SECONDS = 0.02
#: And to read what their first processes have, some 120 us each. Who is new would wait for thousands of them, and for
#: the rest that a long pass is followed by.
YOUNG_SECONDS = 0.005
#: And of those in the last of the queues, where little is new: on a node with hundreds of containers all of them are
#: due when nobody asked for a minute, and who attaches then would wait for it.
SETTLED_SECONDS, _SETTLED = 0.002, 7
#: Seconds from each look to the next, the last one from then on: a container that runs is given no mounts by a runtime.
_PAUSES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 120.0, 300.0, 600.0)
#: More namespaces than these in one container are not searched.
MAX_NAMESPACES = 1024
#: So often one that no runtime made is read again at every occasion: it may just be moved into its container.
_EAGER_LOOKS = 8
#: Where most namespaces are: one tuple for all of them.
_ON_THE_HOST = (HOST_PIDNS,)
#: One for all that have none: each empty set would take 216 bytes.
_NO_DIRECTORIES: frozenset[Hashable] = frozenset()
_AT_ONCE = 64  # processes between two steps


class FirstProcess:
    """The first process of a PID namespace.

    ``made_by_runtime`` is False until it was seen to be: its parent is not in its container. From then on
    ``container_id`` stays what it is. ``name`` is the container's for people; that and what is beside it is
    `resolver.lookup.cached`'s own.
    """

    __slots__ = (
        "arrival",
        "container_id",
        "directories",
        "due",
        "host_pid",
        "level",
        "looks",
        "made_by_runtime",
        "name",
        "name_looks",
        "next_name_look",
        "parents",
        "pidns",
    )

    def __init__(self, host_pid: int, arrival: tuple[int, int]) -> None:
        self.host_pid, self.arrival = host_pid, arrival
        self.pidns = 0  # not known yet
        self.level = 0
        self.parents: tuple[int, ...] = ()  # the host's first
        self.directories = _NO_DIRECTORIES
        self.container_id = ""
        self.made_by_runtime = False
        self.looks, self.due = 0, 0.0
        self.name, self.name_looks, self.next_name_look = "", 0, 0.0


class Learned(NamedTuple):
    """A namespace that a verified owner was in. ``init`` is None if its first process is not known."""

    init: tuple[int, tuple[int, int]] | None
    container_id: str


class KnownNamespaces:
    """The index."""

    def __init__(self, procfs: Procfs, pidmap: PidMap, clock: Callable[[], float] = time.monotonic) -> None:
        self._procfs, self._pidmap, self._clock = procfs, pidmap, clock
        self._directories: Callable[[int], frozenset[Hashable]] | None = None
        self._known: dict[int, FirstProcess] = {}  # by host PID
        self._seen: object = None  # what of `PidMap.inits` they are
        self._unplaced: deque[FirstProcess] = deque()
        self._not_placed: list[FirstProcess] = []  # it was tried, and is again with the next refresh
        #: When each is read: first those that never were, then those that wait for the next of `_PAUSES`.
        self._due: tuple[deque[FirstProcess], ...] = tuple(deque() for _ in range(len(_PAUSES) + 1))
        self._young: dict[int, FirstProcess] = {}  # by host PID; see `_EAGER_LOOKS`
        self._by_pidns: dict[int, FirstProcess] = {}
        self._by_id: dict[str, set[int]] = {}  # host PIDs of those that a runtime made, by container id
        self._with: dict[Hashable, set[int]] = {}  # namespaces whose first process has that directory mounted
        self._below: dict[int, set[int]] = {}  # namespaces by the one right above them
        self._learned: dict[Hashable, dict[int, Learned]] = {}
        self._proven: set[Hashable] = set()  # those of which any was ever learned
        self._of: dict[Hashable, frozenset[int]] = {}  # answers since the last refresh
        self._epoch = -1
        self._asked_for = False  # whether somebody calls `catch_up`
        self._gone = 0

    def read_mounts(self, directories: Callable[[int], frozenset[Hashable]]) -> None:
        """``directories(host_pid)`` gives the container directories in a process's mount table; without it, none."""
        self._directories = directories

    # -- keeping up ---------------------------------------------------------------------------------

    @property
    def behind(self) -> bool:
        """Whether there was no time yet to place every namespace: one below another may be missing."""
        return bool(self._unplaced)

    def update(self, *, bounded: bool = True) -> None:
        """Take in what came and went with the last refresh of the map, in a limited time if ``bounded``."""
        for _ in self._refreshed(bounded=bounded):
            pass

    async def catch_up(self, slices: Slices, *, bounded: bool = True) -> None:
        """The same, but the loop's other tasks go on meanwhile. From now on no question does it by itself."""
        self._asked_for = True
        for _ in self._refreshed(bounded=bounded):
            await slices.breathe()

    def _refreshed(self, *, bounded: bool) -> Iterator[None]:
        if self._epoch != self._pidmap.refreshes:
            self._epoch = self._pidmap.refreshes
            self._of.clear()
            yield from self.steps(SLICE_SECONDS if bounded else math.inf)

    def steps(self, seconds: float = math.inf, *, eager: bool = False) -> Iterator[None]:
        """Bring it up to date with the map, in steps; may be left at any point, and others may work between them.

        What is new is placed, then what is due is read, for so many CPU seconds: our own, and not others' while we gave
        way. ``eager``: before all that, those that no runtime made are read, the newest first, as long as they are new.
        """
        while (inits := self._pidmap.inits()) is not self._seen:
            yield from self._follow(inits)
        self._unplaced.extend(self._not_placed)
        self._not_placed.clear()
        watching = self._watching() if eager else ()
        yield from _work_off(itertools.chain(watching, self._placing()), seconds)
        for first, end, most in ((0, _SETTLED, YOUNG_SECONDS), (_SETTLED, len(self._due), SETTLED_SECONDS)):
            yield from _work_off(self._reading(first, end), seconds if seconds == math.inf else most)

    def take_gone(self) -> int:
        """How many have ended since the last call."""
        gone, self._gone = self._gone, 0
        return gone

    def _follow(self, inits: Mapping[int, tuple[int, int]]) -> Iterator[None]:
        """Know of these first processes and no others; left as it is as soon as there are newer ones to follow."""
        gone = 0
        for number, known in enumerate(list(self._known.values())):
            if inits.get(known.host_pid) != known.arrival and self._lives(known):
                self._forget(known)
                gone += 1
            if number % _AT_ONCE == 0:
                yield
                if self._pidmap.inits() is not inits:
                    return
        for number, (host_pid, arrival) in enumerate(inits.items()):
            if host_pid not in self._known:
                new = self._known[host_pid] = self._young[host_pid] = FirstProcess(host_pid, arrival)
                self._unplaced.append(new)
            if number % _AT_ONCE == 0:
                yield
                if self._pidmap.inits() is not inits:
                    return
        self._seen = inits
        if gone > len(self._known):
            self._let_go()

    def _let_go(self) -> None:
        """Most have ended: a table that was large once stays so until it is made anew."""
        for queue in self._due:
            left = [each for each in queue if self._lives(each)]
            queue.clear()
            queue.extend(left)
        self._below = {pidns: set(below) for pidns, below in self._below.items()}
        self._known, self._young, self._by_pidns = dict(self._known), dict(self._young), dict(self._by_pidns)

    def _lives(self, known: FirstProcess) -> bool:
        """As far as this index knows."""
        return self._known.get(known.host_pid) is known

    def _placing(self) -> Iterator[Callable[[], None]]:
        while self._unplaced:
            yield self._place_next

    def _reading(self, first: int, end: int) -> Iterator[Callable[[], None]]:
        """Those that are due, who was never read first; none twice."""
        now = self._clock()
        for number, count in [(number, len(queue)) for number, queue in enumerate(self._due)][first:end]:
            queue = self._due[number]
            for _ in range(count):
                if not queue or queue[0].due > now:
                    break
                yield partial(self._read_next, number, now)

    def _watching(self) -> Iterator[Callable[[], None]]:
        """The newest first: it is the one that is asked for."""
        for known in reversed(list(self._young.values())):
            if known.host_pid in self._young:
                yield partial(self._watch, known)

    # -- one of them --------------------------------------------------------------------------------

    def _watch(self, known: FirstProcess) -> None:
        if known.pidns or self._place(known):
            self._identify(known)

    def _place_next(self) -> None:
        known = self._unplaced.popleft()
        if self._lives(known) and not known.pidns and not self._place(known):
            self._not_placed.append(known)

    def _place(self, known: FirstProcess) -> bool:
        """Its namespace and those above it, which never change; whether they are known.

        To read them from ``/proc`` takes several times as long as to ask the kernel's map.
        """
        chain = self._pidmap.namespaces_of(known.host_pid, known.arrival)
        try:
            depth = len(chain or self._procfs.ns_pids(known.host_pid))
            own = chain[-1] if chain else self._procfs.pidns(known.host_pid)
            if chain:
                known.parents = _ON_THE_HOST if depth == 2 else chain[:-1]
            elif depth > 2:
                with suppress(CannotKnow):
                    known.parents = self._procfs.pidns_chain(known.host_pid)[:-1]
            elif depth == 2:
                known.parents = _ON_THE_HOST
        except (ProcessGone, AccessDenied, CannotKnow):
            return False
        known.pidns, known.level = own, depth - 1
        self._by_pidns[own] = known
        if known.parents:
            self._below.setdefault(known.parents[-1], set()).add(own)
        self._of.clear()
        self._due[0].append(known)
        return True

    def _read_next(self, number: int, now: float) -> None:
        """Whose it is, and what it has mounted."""
        known = self._due[number].popleft()
        if not self._lives(known):
            return
        known.due = now + _PAUSES[min(number, len(_PAUSES) - 1)]
        self._due[min(number + 1, len(_PAUSES))].append(known)
        self._identify(known)
        if self._directories is None:
            return
        with suppress(ProcessGone, AccessDenied, CannotKnow):
            directories = self._directories(known.host_pid)
            if directories != known.directories:
                self._take_out(known)
                known.directories = directories
                for directory in directories:
                    self._with.setdefault(directory, set()).add(known.pidns)
                self._of.clear()

    def _identify(self, known: FirstProcess) -> None:
        """Its container. One made by a process of the same container is a namespace inside of it."""
        if known.made_by_runtime or not self._lives(known):
            return
        procfs, host_pid = self._procfs, known.host_pid
        known.looks += 1
        if known.looks >= _EAGER_LOOKS:
            self._young.pop(host_pid, None)
        with suppress(ProcessGone, AccessDenied):
            known.container_id = procfs.container(host_pid).container_id
            if not known.container_id:
                return
            status = procfs.status(host_pid)
            # The numbers in the namespace of gVisor's gofer are not those that the container knows.
            if is_gvisor(procfs, host_pid, status.name):
                return
            if procfs.container(status.ppid).container_id != known.container_id:
                known.made_by_runtime = True
                self._by_id.setdefault(known.container_id, set()).add(host_pid)
                self._young.pop(host_pid, None)

    def _forget(self, known: FirstProcess) -> None:
        self._gone += 1
        del self._known[known.host_pid]
        self._young.pop(known.host_pid, None)
        _discard(self._by_id, known.container_id, known.host_pid)
        self._take_out(known)
        if self._by_pidns.get(known.pidns) is known:
            del self._by_pidns[known.pidns]
            if known.parents:
                _discard(self._below, known.parents[-1], known.pidns)

    def _take_out(self, known: FirstProcess) -> None:
        for directory in known.directories:
            _discard(self._with, directory, known.pidns)

    # -- by container id ----------------------------------------------------------------------------

    def rightful(self, container_id: str) -> FirstProcess | None:
        """The first process that a runtime made of this container; None also where two of them claim its id.

        It takes a full search to decide then.
        """
        claims = self._by_id.get(container_id, ())
        if len(claims) != 1:
            return None
        (host_pid,) = claims
        known = self._known[host_pid]
        return known if self._pidmap.arrival(host_pid) == known.arrival else None

    def made_by_runtime(self) -> Iterator[FirstProcess]:
        """All that a runtime made."""
        return (self._known[host_pid] for claims in self._by_id.values() for host_pid in claims)

    # -- by what is mounted -------------------------------------------------------------------------

    def of(self, place: Hashable) -> frozenset[int]:
        """The PID namespaces of the container, that of the host only where it was seen to be one; empty: not known."""
        if not self._asked_for:
            self.update()
        known = self._of.get(place)
        if known is None:
            learned = (
                pidns for pidns, each in self._learned.get(place, {}).items() if self._still_there(each)
            )
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
                known = {pidns: each for pidns, each in known.items() if self._still_there(each)}
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

    def _still_there(self, learned: Learned) -> bool:
        return learned.init is None or self._pidmap.arrival(learned.init[0]) == learned.init[1]

    def _add_below(self, pidns: int, found: set[int]) -> None:
        queue = [pidns]
        while queue and len(found) <= MAX_NAMESPACES:
            below = self._below.get(queue.pop(), set()) - found
            found |= below
            queue.extend(below)


def _discard(sets: dict[_K, set[int]], key: _K, number: int) -> None:
    """Take a number out of one of the sets, and the set with its last one."""
    numbers = sets.get(key)
    if numbers is not None:
        numbers.discard(number)
        if not numbers:
            del sets[key]


def _work_off(works: Iterable[Callable[[], None]], seconds: float) -> Iterator[None]:
    """Do them for so many CPU seconds, giving way after each."""
    for work in works:
        if seconds < 0:
            return
        began = time.thread_time()
        work()
        seconds -= time.thread_time() - began
        yield
