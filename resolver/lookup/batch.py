"""Thousands of look-ups at once, each verified as a single one, at a fraction of its price.

With the kernel's map a container's first process is held, and its cgroup listed, once. A process that the map has
before and after that, with the same start time, is the listed one. Without that map each process is verified by itself.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from resolver.base.errors import AccessDenied, ProcessGone, ResolverError
from resolver.containers.find import Wanted
from resolver.linux.cgroup import cgroup_paths, parse_cgroup_path
from resolver.linux.cgroup_directories import cgroup_roots, find_directories, processes_in
from resolver.lookup.verify import verify
from resolver.pids.bpf_map import TICK

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

    from resolver.containers.known_namespaces import FirstProcess
    from resolver.linux.procfs import Procfs
    from resolver.lookup.cached import LiveLookup
    from resolver.pids.bpf_map import BpfPidMap
    from resolver.pids.pidmap import PidMap

#: Longest time that a step takes before others get their turn, in seconds, and how often that is checked.
_SLICE = 0.002
_LOOK_EVERY = 32
#: For fewer processes of a container than this, holding each is cheaper than listing all.
_WORTH_LISTING = 6

GONE, NO_SUCH_PROCESS = "gone", "no_such_process"


class Hit(NamedTuple):
    """A process: start time in clock ticks since boot."""

    host_pid: int
    start_time: int


#: What is known of each PID of a container: the process, or why there is none.
Answers = dict[int, Hit | str]


class Batch:
    """One batch. `steps` yields to give others their turn; unanswered pairs are in ``left`` then.

    ``left`` is for `resolver.lookup.forward.lookup_many`: containers that share a PID namespace, and incomplete ids.
    """

    def __init__(
        self, procfs: Procfs, pidmap: PidMap, live: LiveLookup, wanted: Mapping[str, Iterable[int]]
    ) -> None:
        """``wanted``: PIDs by container id; an id that is not complete, or another name, is for ``left``."""
        self.answers: dict[str, Answers] = {}
        self.left: dict[str, list[int]] = {}
        self._procfs = procfs
        self._pidmap = pidmap
        self._live = live
        self._wanted = wanted
        self._roots: Sequence[str] | None = None
        self._slice_ends = 0.0

    def steps(self) -> Generator[None]:
        """Answer from the map, after `LiveLookup.look_for`. Raises OSError."""
        self._slice_ends = time.perf_counter() + _SLICE
        kernel = self._pidmap.source.exact()
        for container_id, ns_pids in self._wanted.items():
            init = self._live.namespaces.rightful(container_id)
            answers: Answers = {}
            rest: Iterable[int] = ns_pids
            if init is not None:
                if kernel is not None:
                    rest = yield from self._by_listing(kernel, init, list(ns_pids), answers)
                rest = yield from self._one_by_one(init, list(rest), answers)
            self.answers[container_id] = answers
            left = list(rest)
            if left:
                self.left[container_id] = left

    def _turn(self) -> Generator[None]:
        if time.perf_counter() >= self._slice_ends:
            yield
            self._slice_ends = time.perf_counter() + _SLICE

    def _by_listing(
        self, kernel: BpfPidMap, init: FirstProcess, ns_pids: list[int], answers: Answers
    ) -> Generator[None, None, list[int]]:
        """Returns those that it cannot answer."""
        pidns = init.pidns
        first = {}
        for number, ns_pid in enumerate(ns_pids):
            first[ns_pid] = kernel.identity(pidns, ns_pid)
            if number % _LOOK_EVERY == 0:
                yield from self._turn()
        listed: dict[int, None] = {}
        known = sum(identity is not None for identity in first.values())
        try:
            # The namespace lasts as long as its first process: only at the end is it known to have been this one.
            with verify(self._procfs, init.host_pid) as handle:
                if handle.process.start_time != init.arrival[1] // TICK:
                    return ns_pids  # its number is another's by now
                if known >= _WORTH_LISTING:
                    listed = self._members(init)
                rest = []
                for number, (ns_pid, identity) in enumerate(first.items()):
                    if identity is None:
                        answers[ns_pid] = NO_SUCH_PROCESS
                    elif identity[1] in listed and kernel.identity(pidns, ns_pid) == identity:
                        answers[ns_pid] = Hit(identity[1], identity[0] // TICK)
                    else:
                        rest.append(ns_pid)
                    if number % _LOOK_EVERY == 0:
                        yield from self._turn()
        except (ProcessGone, AccessDenied):
            answers.clear()
            return ns_pids
        return rest

    def _listed(self, init: FirstProcess) -> dict[int, None]:
        try:
            return self._members(init)
        except (ProcessGone, AccessDenied):
            return {}

    def _members(self, init: FirstProcess) -> dict[int, None]:
        """Host PIDs of the processes in the container's cgroup and below it; empty if that cannot be seen."""
        procfs = self._procfs
        if self._roots is None:
            self._roots = cgroup_roots(procfs.mounts("self"))
        wanted = Wanted(init.container_id)
        for path in cgroup_paths(procfs.cgroup(init.host_pid)):
            container = parse_cgroup_path(path)
            if container is None or container.container_id != init.container_id:
                continue
            end = path.index("/", start) if "/" in path[(start := path.rindex(init.container_id)) :] else None
            for root in self._roots:
                directories = find_directories(root, wanted.match, path[:end])
                listed = processes_in(directories.get(init.container_id, ()))
                if init.host_pid in listed:
                    return listed
        return {}

    def _one_by_one(
        self, init: FirstProcess, ns_pids: list[int], answers: Answers
    ) -> Generator[None, None, list[int]]:
        rest = []
        among = self._listed(init) if len(ns_pids) >= _WORTH_LISTING else ()
        for ns_pid in ns_pids:
            process = self._live.process_in(init, ns_pid, among, brief=True)
            if process is None:
                rest.append(ns_pid)
            else:
                answers[ns_pid] = Hit(process.host_pid, process.start_time)
            yield from self._turn()
        return rest


def walk(
    ask: Callable[[str, list[int]], Answers],
    left: dict[str, list[int]],
    refused: Callable[[ResolverError], str],
    seconds: float,
) -> dict[str, Answers]:
    """Answer the rest of a batch, container by container, until the time is up.

    ``refused`` translates an error into its word. Run it in a thread.
    """
    deadline = time.monotonic() + seconds
    found: dict[str, Answers] = {}
    for cid, ns_pids in left.items():
        if time.monotonic() > deadline:
            break
        try:
            found[cid] = ask(cid, ns_pids)
        except ResolverError as error:
            found[cid] = dict.fromkeys(ns_pids, refused(error))
    return found
