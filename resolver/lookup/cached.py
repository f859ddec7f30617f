"""Look-ups in the daemon's map, for full container ids and unshared PID namespaces; the rest is `forward`'s."""

from collections.abc import Collection, Container, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from resolver.base.budget import Slices
from resolver.base.errors import AccessDenied, ProcessGone
from resolver.base.retry import in_a_thread
from resolver.containers.find import FULL_ID, Wanted
from resolver.containers.known_namespaces import FirstProcess, KnownNamespaces
from resolver.containers.namespaces import Namespace
from resolver.linux.cgroup import ContainerCgroup, cgroup_paths, parse_cgroup_path, strip_scheme
from resolver.linux.cgroup_directories import cgroup_roots, find_directories, processes_in
from resolver.linux.procfs import Procfs
from resolver.lookup.forward import ContainerProcess, resolve
from resolver.pids.bpf_map import TICK, KernelMap
from resolver.pids.pidmap import PidMap

#: Seconds of search for an unknown container before the walk.
LOOK_SECONDS = 0.02
#: Longest time that a step takes before others get their turn, in seconds.
_SLICE_SECONDS = 0.002
#: For fewer processes of a container than this, holding each is cheaper than listing all.
_WORTH_LISTING = 6

NO_SUCH_PROCESS = "no_such_process"


class LiveLookup:
    """Look-ups in the daemon's map. Remembered containers only narrow the choice."""

    def __init__(self, procfs: Procfs, pidmap: PidMap, namespaces: KnownNamespaces | None = None) -> None:
        self._procfs, self.pidmap = procfs, pidmap
        self.namespaces = namespaces or KnownNamespaces(procfs, pidmap)
        #: Read once: a tenant that copies mount namespaces makes every reader of a mount table wait.
        self.cgroup_roots = cgroup_roots(procfs.mounts("self"))

    def find(self, cid: str, ns_pid: int) -> ContainerProcess | None:
        """Return a container's process, verified; None if only `forward.lookup` can tell."""
        wanted = strip_scheme(cid.strip())
        if len(wanted) != FULL_ID or ns_pid < 1:
            return None
        first = self.namespaces.first_process_of(wanted)
        return self.process_in(first, ns_pid) if first else None

    async def look_for(self, cids: Iterable[str]) -> None:
        """Update the map, and if needed these containers, except those that can't be read in `LOOK_SECONDS`."""
        wanted, slices = [strip_scheme(cid.strip()) for cid in cids], Slices()
        if self.pidmap.source.exact() is not None and self._knows(wanted):
            return  # the kernel's map finds it without a refresh
        await self.pidmap.catch_up(slices)
        if self._knows(wanted):
            return
        for _ in self.namespaces.steps(LOOK_SECONDS, LOOK_SECONDS):
            await slices.yield_if_due()

    def _knows(self, container_ids: list[str]) -> bool:
        """Check if all ids are known: an id belongs to the first container that had it."""
        return all(
            len(container_id) != FULL_ID or self.namespaces.first_process_of(container_id)
            for container_id in container_ids
        )

    def process_in(
        self, first: FirstProcess, ns_pid: int, among: Container[int] = (), *, brief: bool = False
    ) -> ContainerProcess | None:
        """Find a process in the container of this first process; without its command (``brief``) it is cheaper.

        ``among``, the container's host PIDs if known, narrows the choice where the source doesn't know namespaces.
        """
        candidates = self.pidmap.source.candidates(ns_pid, first.pidns)
        if among and len(candidates) > 1:
            candidates = [process for process in candidates if process in among]
        within = partial(self._within, first)
        namespace, source = Namespace(first.pidns, first.level), self.pidmap.source.name
        if len(candidates) > 1:  # checking namespaces is cheaper than holding each
            candidates = [process for process in candidates if self._is_in(process, first)]
        # The walk reports a missing right.
        return resolve(self._procfs, candidates, namespace, ns_pid, within, source, brief=brief, lenient=True)

    def _is_in(self, host_pid: int, first: FirstProcess) -> bool:
        try:
            return self._procfs.pidns(host_pid) == first.pidns
        except (ProcessGone, AccessDenied):
            return False

    def _within(self, first: FirstProcess, host_pid: int) -> ContainerCgroup | None:
        container = self._procfs.container(host_pid)
        return container if container.container_id == first.container_id else None


def find_own(procfs: Procfs, pidmap: PidMap, own: Namespace, ns_pid: int) -> ContainerProcess | None:
    """Return the process with this PID in the namespace of a process that the caller holds, in any container.

    None is conclusive only if the kernel keeps the map.
    """
    source = pidmap.source
    if (kernel := source.exact()) is None:
        candidates = source.candidates(ns_pid, own.pidns)
    else:
        record = kernel.lookup(own.pidns, ns_pid)
        candidates = [record.host_pid] if record else []
    return resolve(procfs, candidates, own, ns_pid, procfs.container, source.name, lenient=True)


class Hit(NamedTuple):
    """A process: start time in clock ticks since boot."""

    host_pid: int
    start_time: int


#: By PID of a container: its process, or the reason for none.
Answers = dict[int, Hit | str]


class Batch:
    """Thousands of look-ups at once, each verified as a single one, at a fraction of its price.

    With the kernel's map, a container's first process is held and its cgroup listed once. A process that the map has
    before and after that, with the same start time, is the listed one. Without that map each process is held.
    ``left`` (shared namespaces, short ids) is for `forward.lookup_many`.
    """

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
        pidns = init.pidns
        first = {}
        for ns_pid in ns_pids:
            first[ns_pid] = kernel.identity(pidns, ns_pid)
            if self._slices.over():
                await self._slices.yield_now()
        count = sum(identity is not None for identity in first.values())
        rest = []
        try:
            # A namespace lives as long as its first process: `verify` proves at the end that it was this one.
            with self._procfs.verify(init.host_pid) as handle:
                if handle.process.start_time != init.arrival[1] // TICK:
                    return ns_pids  # another process has its number by now
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
