"""The same question, answered from the daemon's map: no walk through cgroups, one process read.

It answers the plain case, a container's full id and a PID namespace of its own, and is silent in every other: then
`resolver.lookup.forward.lookup` is to be asked, which knows them all.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from resolver.budget import Slices
from resolver.containers.find import container_name
from resolver.containers.known_namespaces import KnownNamespaces
from resolver.errors import AccessDenied, ProcessGone
from resolver.linux.cgroup import strip_scheme
from resolver.lookup.verify import ContainerProcess, verify

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from resolver.containers.known_namespaces import FirstProcess
    from resolver.linux.cgroup import ContainerCgroup
    from resolver.linux.procfs import ProcessIdentity, Procfs
    from resolver.pids.pidmap import PidMap


_FULL_ID = 64
_EAGER_LOOKS = 8
#: CPU seconds in which a container that is not known is searched for, before it is left to the walk.
_LOOK_SECONDS = 0.02


class LiveLookup:
    """Look-ups through the daemon's map. What it remembers of containers only narrows the choice."""

    def __init__(self, procfs: Procfs, pidmap: PidMap, namespaces: KnownNamespaces | None = None) -> None:
        """``namespaces`` are the node's, where somebody else keeps them, too."""
        self._procfs = procfs
        self.pidmap = pidmap
        self.namespaces = namespaces or KnownNamespaces(procfs, pidmap)

    def find(self, cid: str, ns_pid: int) -> ContainerProcess | None:
        """The process that a container knows as ``ns_pid``, verified; None if this is not a plain case.

        By the last refresh of the map, and as far as `look_for` got.
        """
        wanted = strip_scheme(cid.strip())
        if len(wanted) != _FULL_ID or ns_pid < 1:
            return None
        first = self.namespaces.rightful(wanted)
        return self.find_in(first, ns_pid) if first else None

    async def look_for(self, cids: Iterable[str]) -> None:
        """Bring the map up to date, and what is known of these containers if that is not enough; the loop goes on.

        A tenant may make thousands of namespaces at once. What can't be read within `_LOOK_SECONDS` of CPU is left out
        until it was; `look_around` leaves none out.
        """
        slices, wanted = Slices(), [strip_scheme(cid.strip()) for cid in cids]
        if self.pidmap.source.exact() is not None and self._knows(wanted):
            return  # to find one the kernel's map needs no refresh
        await self.pidmap.catch_up(slices)
        if self._knows(wanted):
            return
        for _ in self.namespaces.steps(_LOOK_SECONDS, eager=True):
            await slices.breathe()

    def _knows(self, container_ids: list[str]) -> bool:
        """Whoever claims a known container's id is no rival: the container is the one that had it first."""
        return all(len(each) != _FULL_ID or self.namespaces.rightful(each) for each in container_ids)

    async def look_around(self) -> None:
        """Read every first process that is new, or is due again; the loop's other tasks go on meanwhile."""
        slices = Slices()
        for _ in self.namespaces.steps(eager=True):
            await slices.breathe()

    def find_in(self, first: FirstProcess, ns_pid: int) -> ContainerProcess | None:
        """As `find`, in the container of this first process."""
        for host_pid in self._worth(first, self.pidmap.source.candidates(ns_pid, first.pidns)):
            found = self._verified(host_pid, first, ns_pid)
            if found is not None:
                return found
        return None

    def process_in(
        self, first: FirstProcess, ns_pid: int, among: Container[int] = ()
    ) -> ProcessIdentity | None:
        """As `find_in`, with nothing said about the process but who it is: a third cheaper.

        ``among`` are host PIDs that are thought to be in the container: where many processes have that number, as
        every container's do for a source that knows no namespaces, only those are read.
        """
        candidates = self.pidmap.source.candidates(ns_pid, first.pidns)
        if among and len(candidates) > 1:
            candidates = [each for each in candidates if each in among]
        for host_pid in self._worth(first, candidates):
            try:
                with verify(self._procfs, host_pid) as handle:
                    inside = self._inside(handle.process, first, ns_pid)
            except (ProcessGone, AccessDenied):
                continue
            if inside:
                return handle.process
        return None

    def _worth(self, first: FirstProcess, candidates: list[int]) -> list[int]:
        """Those worth taking hold of: looking at the namespace first is cheaper, but for a single one."""
        return (
            candidates if len(candidates) < 2 else [each for each in candidates if self._is_in(each, first)]
        )

    def _is_in(self, host_pid: int, first: FirstProcess) -> bool:
        try:
            return self._procfs.pidns(host_pid) == first.pidns
        except (ProcessGone, AccessDenied):
            return False

    def _inside(self, process: ProcessIdentity, first: FirstProcess, ns_pid: int) -> ContainerCgroup | None:
        """Its cgroup, if the process, which is held, is the one with that number in the container."""
        container = self._procfs.container(process.host_pid)
        if container.container_id != first.container_id:
            return None
        if process.ns_pids[first.level :] != (ns_pid,) or self._procfs.pidns(process.host_pid) != first.pidns:
            return None
        return container

    def _name(self, first: FirstProcess, pod_uid: str | None) -> str:
        """The container's name for people, if there is one.

        The runtime makes the mounts that show it after the first process, so one without a name is read again,
        but not with every question: its mount table is the longest thing to read here.
        """
        now = time.monotonic()
        if not first.name and (first.name_looks < _EAGER_LOOKS or now >= first.next_name_look):
            first.name = container_name(self._procfs.first_mounts(first.host_pid), pod_uid) or ""
            first.name_looks, first.next_name_look = first.name_looks + 1, now + 1.0
        return first.name

    def _verified(self, host_pid: int, first: FirstProcess, ns_pid: int) -> ContainerProcess | None:
        """None also for one that may not be read: a number is only one process's in its namespace."""
        procfs = self._procfs
        try:
            with verify(procfs, host_pid) as handle:
                container = self._inside(handle.process, first, ns_pid)
                if container is None:
                    return None
                # While a process of it runs, so does the first one: that is who is asked for the name.
                name = self._name(first, container.pod_uid)
                return ContainerProcess(
                    container_id=first.container_id,
                    container_pid=ns_pid,
                    host_pid=host_pid,
                    pidns=first.pidns,
                    pod_uid=container.pod_uid,
                    container_name=name or None,
                    start_time=handle.process.start_time,
                    comm=procfs.comm(host_pid),
                    source=self.pidmap.source.name,
                )
        except (ProcessGone, AccessDenied):
            return None
