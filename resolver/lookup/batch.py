"""Thousands of look-ups at once, each verified as a single one, at a fraction of its price.

With the kernel's map, a container's first process is held and its cgroup listed once. A process that the map has before
and after that, with the same start time, is the listed one. Without that map each process is held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from resolver.base.budget import Slices
from resolver.base.errors import AccessDenied, ProcessGone
from resolver.base.retry import in_a_thread
from resolver.containers.find import Wanted
from resolver.linux.cgroup import cgroup_paths, parse_cgroup_path
from resolver.linux.cgroup_directories import find_directories, processes_in
from resolver.lookup.resolve import verify
from resolver.pids.bpf_map import TICK

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from resolver.containers.known_namespaces import FirstProcess
    from resolver.linux.procfs import Procfs
    from resolver.lookup.cached import LiveLookup
    from resolver.pids.bpf_map import KernelMap

#: Longest time that a step takes before others get their turn, in seconds.
_SLICE_SECONDS = 0.002
#: For fewer processes of a container than this, holding each is cheaper than listing all.
_WORTH_LISTING = 6

NO_SUCH_PROCESS = "no_such_process"


class Hit(NamedTuple):
    """A process: start time in clock ticks since boot."""

    host_pid: int
    start_time: int


#: By PID of a container: its process, or the reason for none.
Answers = dict[int, Hit | str]


class Batch:
    """One batch. `run` answers from the map; ``left`` (shared namespaces, short ids) is for `forward.lookup_many`."""

    def __init__(self, procfs: Procfs, live: LiveLookup) -> None:
        self.answers: dict[str, Answers] = {}
        self.left: dict[str, list[int]] = {}
        self._procfs, self._live = procfs, live
        self._slices = Slices(_SLICE_SECONDS)

    async def run(self, wanted: Mapping[str, Iterable[int]]) -> None:
        """Answer for the PIDs of each container. Raises OSError."""
        await self._live.look_for(wanted)
        kernel = self._live.pidmap.source.exact()
        for container_id, ns_pids in wanted.items():
            init = self._live.namespaces.first_process_of(container_id)
            answers: Answers = {}
            rest = list(ns_pids)
            if init is not None:
                if kernel is not None:
                    rest = await self._by_listing(kernel, init, rest, answers)
                rest = await self._one_by_one(init, rest, answers)
            self.answers[container_id] = answers
            if rest:
                self.left[container_id] = rest

    async def _by_listing(
        self, kernel: KernelMap, init: FirstProcess, ns_pids: list[int], answers: Answers
    ) -> list[int]:
        """Return the PIDs without an answer."""
        pidns = init.pidns
        first = {}
        for ns_pid in ns_pids:
            first[ns_pid] = kernel.identity(pidns, ns_pid)
            if self._slices.over():
                await self._slices.yield_now()
        count = sum(identity is not None for identity in first.values())
        rest = []
        try:
            # The namespace lasts as long as its first process: only at the end is it known to have been this one.
            with verify(self._procfs, init.host_pid) as handle:
                if handle.process.start_time != init.arrival[1] // TICK:
                    return ns_pids  # its number is another's by now
                listed = await self._members(init) if count >= _WORTH_LISTING else ()
                for ns_pid, identity in first.items():
                    if identity is None:
                        answers[ns_pid] = NO_SUCH_PROCESS
                    elif identity[1] in listed and kernel.identity(pidns, ns_pid) == identity:
                        answers[ns_pid] = Hit(identity[1], identity[0] // TICK)
                    else:
                        rest.append(ns_pid)
                    if self._slices.over():
                        await self._slices.yield_now()
        except (ProcessGone, AccessDenied):
            answers.clear()
            return ns_pids
        return rest

    async def _one_by_one(self, init: FirstProcess, ns_pids: list[int], answers: Answers) -> list[int]:
        rest = []
        among = await self._members(init) if len(ns_pids) >= _WORTH_LISTING else ()
        for ns_pid in ns_pids:
            process = self._live.process_in(init, ns_pid, among, brief=True)
            if process is None:
                rest.append(ns_pid)
            else:
                answers[ns_pid] = Hit(process.host_pid, process.start_time)
            await self._slices.yield_if_due()
        return rest

    async def _members(self, init: FirstProcess) -> Collection[int]:
        """List the container's processes in a thread: it may make and fill cgroups. Empty if they can't be read."""
        try:
            return await in_a_thread(lambda: self._list(init), name="list of a cgroup")
        except RuntimeError:  # no more threads
            return ()

    def _list(self, init: FirstProcess) -> Collection[int]:
        """Host PIDs of the processes in the container's cgroup and below it."""
        try:
            cgroup = self._procfs.cgroup(init.host_pid)
        except (ProcessGone, AccessDenied):
            return ()
        wanted = Wanted(init.container_id)
        for path in cgroup_paths(cgroup):
            container = parse_cgroup_path(path)
            if container is None or container.container_id != init.container_id:
                continue
            end = path.index("/", start) if "/" in path[(start := path.rindex(init.container_id)) :] else None
            for root in self._live.cgroup_roots:
                directories = find_directories(root, wanted.match, path[:end])
                listed = processes_in(directories.get(init.container_id, ()))
                if init.host_pid in listed:
                    return listed
        return ()
