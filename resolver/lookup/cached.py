"""The same question, answered from the daemon's map: no walk through cgroups, one process read.

It answers the plain case, a container's full id and a PID namespace of its own, and is silent in every other: then
`resolver.lookup.forward.lookup` is to be asked, which knows them all.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from resolver.budget import Slices
from resolver.containers.find import container_name
from resolver.containers.namespaces import is_gvisor
from resolver.errors import AccessDenied, ProcessGone
from resolver.linux.cgroup import strip_scheme
from resolver.lookup.verify import Found, verify
from resolver.retry import doubled

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from resolver.linux.cgroup import ContainerCgroup
    from resolver.linux.procfs import Procfs
    from resolver.pids.pidmap import PidMap
    from resolver.reasons import Process


_FULL_ID = 64
_EAGER_LOOKS, _LONGEST_LOOK = 8, 30.0  # seconds
_LOOK_SECONDS = 0.02


class Init(NamedTuple):
    """The first process of a PID namespace. ``made_by_runtime`` is False where it was not told.

    ``name`` is the container's for people, empty until one of its processes was read. ``looks`` counts those in
    vain, for a container id where it has none, else for a name.
    """

    host_pid: int
    arrival: tuple[int, int]
    container_id: str
    made_by_runtime: bool
    pidns: int
    level: int
    name: str = ""
    looks: int = 0  # in vain
    next_look: float = 0.0


class LiveLookup:
    """Look-ups through the daemon's map. What it remembers of containers only narrows the choice."""

    def __init__(self, procfs: Procfs, pidmap: PidMap) -> None:
        self._procfs = procfs
        self.pidmap = pidmap
        self._inits: dict[int, Init] = {}  # by host PID
        self._by_id: dict[str, set[int]] = {}  # their host PIDs, by container id

    def find(self, cid: str, ns_pid: int) -> Found | None:
        """The process that a container knows as ``ns_pid``, verified; None if this is not a plain case."""
        wanted = strip_scheme(cid.strip())
        if len(wanted) != _FULL_ID or ns_pid < 1:
            return None
        self.pidmap.refresh()
        init = self._known(wanted) or self.rightful().get(wanted)
        return self.find_in(init, ns_pid) if init else None

    def _known(self, container_id: str) -> Init | None:
        """Its first process, if that is known already and still lives; a walk over thousands of others tells no more.

        Whoever claims the same id since the last walk is no rival: the container is the one that had it first.
        """
        known = [
            init
            for host_pid in self._by_id.get(container_id, ())
            if (init := self._inits[host_pid]).made_by_runtime
        ]
        if len(known) != 1 or self.pidmap.arrival(known[0].host_pid) != known[0].arrival:
            return None
        return known[0]

    def rightful(self) -> dict[str, Init]:
        """The first process of every container that has a PID namespace of its own, by id.

        An id that two of them claim is left out: it takes a full search to decide.
        """
        found: dict[str, Init] = {}
        twice: set[str] = set()
        for init in self.inits():
            if init.made_by_runtime:
                if init.container_id in found:
                    twice.add(init.container_id)
                found[init.container_id] = init
        for container_id in twice:
            del found[container_id]
        return found

    def find_in(self, init: Init, ns_pid: int) -> Found | None:
        """As `find`, in the container of this first process."""
        for host_pid in self._worth(init, self.pidmap.source.candidates(ns_pid, init.pidns)):
            found = self._verified(host_pid, init, ns_pid)
            if found is not None:
                return found
        return None

    def inits(self) -> Iterable[Init]:
        """The first process of each PID namespace.

        A tenant may make thousands of them at once. What can't be read within `_LOOK_SECONDS` of CPU is left out
        until it was; `look_around` leaves none out.
        """
        until = time.thread_time() + _LOOK_SECONDS
        for _ in self._looks():
            if time.thread_time() >= until:
                break
        return list(self._inits.values())

    async def look_around(self) -> None:
        """Read every first process that is new, or is due again; the loop's other tasks go on meanwhile."""
        slices = Slices()
        for _ in self._looks():
            await slices.breathe()

    def _looks(self) -> Iterator[None]:
        """Bring the list up to date, one process at a time; may be left at any point.

        One that no runtime made is read again, as it may be moved, but ever more rarely.
        """
        now, present = time.monotonic(), self.pidmap.inits()
        for host_pid, known in list(self._inits.items()):
            if present.get(host_pid) != known.arrival:
                self._forget(host_pid)
        for host_pid, arrival in present.items():
            if host_pid not in self._inits:
                self._keep(self._look_at_init(host_pid, arrival))
                yield
        for host_pid, arrival in present.items():
            init = self._inits.get(host_pid)
            if init is None or init.made_by_runtime or now < init.next_look:
                continue
            looks = init.looks + 1
            wait = 0.0 if looks <= _EAGER_LOOKS else doubled(1.0, _LONGEST_LOOK, looks - _EAGER_LOOKS)
            again = self._look_at_init(host_pid, arrival)
            self._keep(again if again.made_by_runtime else again._replace(looks=looks, next_look=now + wait))
            yield

    def _keep(self, init: Init) -> None:
        self._forget(init.host_pid)
        self._inits[init.host_pid] = init
        self._by_id.setdefault(init.container_id, set()).add(init.host_pid)

    def _forget(self, host_pid: int) -> None:
        known = self._inits.pop(host_pid, None)
        if known is not None:
            others = self._by_id[known.container_id]
            others.discard(host_pid)
            if not others:
                del self._by_id[known.container_id]

    def _look_at_init(self, host_pid: int, arrival: tuple[int, int]) -> Init:
        """Its namespace never changes. One made by a process of the same container is a namespace inside of it."""
        procfs = self._procfs
        try:
            container_id = self._id(host_pid)
            if container_id:
                status = procfs.status(host_pid)
                # The numbers in the namespace of gVisor's gofer are not those that the container knows.
                ours = not is_gvisor(procfs, host_pid, status.name)
                return Init(
                    host_pid,
                    arrival,
                    container_id=container_id,
                    made_by_runtime=ours and self._id(status.ppid) != container_id,
                    pidns=procfs.pidns(host_pid),
                    level=len(status.ns_pids) - 1,
                )
        except (ProcessGone, AccessDenied):
            pass
        return Init(host_pid, arrival, container_id="", made_by_runtime=False, pidns=0, level=0)

    def _id(self, host_pid: int) -> str:
        return self._procfs.container(host_pid).container_id

    def process_in(self, init: Init, ns_pid: int, among: Container[int] = ()) -> Process | None:
        """As `find_in`, with nothing said about the process but who it is: a third cheaper.

        ``among`` are host PIDs that are thought to be in the container: where many processes have that number, as
        every container's do for a source that knows no namespaces, only those are read.
        """
        candidates = self.pidmap.source.candidates(ns_pid, init.pidns)
        if among and len(candidates) > 1:
            candidates = [each for each in candidates if each in among]
        for host_pid in self._worth(init, candidates):
            try:
                with verify(self._procfs, host_pid) as handle:
                    inside = self._inside(handle.process, init, ns_pid)
            except (ProcessGone, AccessDenied):
                continue
            if inside:
                return handle.process
        return None

    def _worth(self, init: Init, candidates: list[int]) -> list[int]:
        """Those worth taking hold of: looking at the namespace first is cheaper, but for a single one."""
        return candidates if len(candidates) < 2 else [each for each in candidates if self._is_in(each, init)]

    def _is_in(self, host_pid: int, init: Init) -> bool:
        try:
            return self._procfs.pidns(host_pid) == init.pidns
        except (ProcessGone, AccessDenied):
            return False

    def _inside(self, process: Process, init: Init, ns_pid: int) -> ContainerCgroup | None:
        """Its cgroup, if the process, which is held, is the one with that number in the container."""
        container = self._procfs.container(process.host_pid)
        if container.container_id != init.container_id:
            return None
        if process.ns_pids[init.level :] != (ns_pid,) or self._procfs.pidns(process.host_pid) != init.pidns:
            return None
        return container

    def _named(self, init: Init, pod_uid: str | None) -> Init:
        """With the container's name for people, if there is one.

        The runtime makes the mounts that show it after the first process, so one without a name is read again,
        but not with every question: its mount table is the longest thing to read here.
        """
        now = time.monotonic()
        if init.name or (init.looks >= _EAGER_LOOKS and now < init.next_look):
            return init
        name = container_name(self._procfs.first_mounts(init.host_pid), pod_uid) or ""
        return init._replace(name=name, looks=init.looks + 1, next_look=now + 1.0)

    def _verified(self, host_pid: int, init: Init, ns_pid: int) -> Found | None:
        """None also for one that may not be read: a number is only one process's in its namespace."""
        procfs = self._procfs
        try:
            with verify(procfs, host_pid) as handle:
                container = self._inside(handle.process, init, ns_pid)
                if container is None:
                    return None
                named = self._named(init, container.pod_uid)
                found = Found(
                    container_id=init.container_id,
                    container_pid=ns_pid,
                    host_pid=host_pid,
                    pidns=init.pidns,
                    pod_uid=container.pod_uid,
                    container_name=named.name or None,
                    start_time=handle.process.start_time,
                    comm=procfs.comm(host_pid),
                    source=self.pidmap.source.name,
                )
        except (ProcessGone, AccessDenied):
            return None
        # While a process of it runs, so does the first one: that was who was asked for the name.
        self._keep(named)
        return found
