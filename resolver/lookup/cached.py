"""Look-ups in the daemon's map, for full container ids and unshared PID namespaces; the rest is `forward.lookup`'s."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from resolver.base.budget import Slices
from resolver.base.errors import AccessDenied, ProcessGone
from resolver.containers.known_namespaces import KnownNamespaces
from resolver.containers.namespaces import Namespace
from resolver.linux.cgroup import strip_scheme
from resolver.linux.cgroup_directories import cgroup_roots
from resolver.lookup.resolve import resolve

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from resolver.containers.known_namespaces import FirstProcess
    from resolver.linux.cgroup import ContainerCgroup
    from resolver.linux.procfs import Procfs
    from resolver.lookup.resolve import ContainerProcess
    from resolver.pids.pidmap import PidMap

_FULL_ID = 64
#: Seconds of search for an unknown container before the walk.
LOOK_SECONDS = 0.02


class LiveLookup:
    """Look-ups in the daemon's map. Its memory of containers only narrows the choice."""

    def __init__(self, procfs: Procfs, pidmap: PidMap, namespaces: KnownNamespaces | None = None) -> None:
        self._procfs, self.pidmap = procfs, pidmap
        self.namespaces = namespaces or KnownNamespaces(procfs, pidmap)
        #: Read once: a tenant that copies mount namespaces makes every reader of a mount table wait.
        self.cgroup_roots = cgroup_roots(procfs.mounts("self"))

    def find(self, cid: str, ns_pid: int) -> ContainerProcess | None:
        """Return a container's process, verified; None if only `forward.lookup` can tell."""
        wanted = strip_scheme(cid.strip())
        if len(wanted) != _FULL_ID or ns_pid < 1:
            return None
        first = self.namespaces.first_process_of(wanted)
        return self.process_in(first, ns_pid) if first else None

    async def look_for(self, cids: Iterable[str]) -> None:
        """Update the map, and if needed these containers, except those that can't be read in `LOOK_SECONDS`."""
        wanted, slices = [strip_scheme(cid.strip()) for cid in cids], Slices()
        if self.pidmap.source.exact() is not None and self._knows(wanted):
            return  # to find one the kernel's map needs no refresh
        await self.pidmap.catch_up(slices)
        if self._knows(wanted):
            return
        for _ in self.namespaces.steps(LOOK_SECONDS, LOOK_SECONDS):
            await slices.yield_if_due()

    def _knows(self, container_ids: list[str]) -> bool:
        """Check if all are known: a known id stays the container's that had it first."""
        return all(
            len(container_id) != _FULL_ID or self.namespaces.first_process_of(container_id)
            for container_id in container_ids
        )

    def process_in(
        self, first: FirstProcess, ns_pid: int, among: Container[int] = (), *, brief: bool = False
    ) -> ContainerProcess | None:
        """Find a process in the container of this first process; without its command (``brief``) it is cheaper.

        ``among`` are likely host PIDs, the only ones that are read if the source doesn't know namespaces.
        """
        candidates = self.pidmap.source.candidates(ns_pid, first.pidns)
        if among and len(candidates) > 1:
            candidates = [process for process in candidates if process in among]
        within = partial(self._within, first)
        namespace, source = Namespace(first.pidns, first.level), self.pidmap.source.name
        if len(candidates) > 1:  # to check their namespaces is cheaper than to hold each
            candidates = [process for process in candidates if self._is_in(process, first)]
        try:
            return resolve(self._procfs, candidates, namespace, ns_pid, within, source, brief=brief)
        except AccessDenied:
            return None  # the walk names the missing right

    def _is_in(self, host_pid: int, first: FirstProcess) -> bool:
        try:
            return self._procfs.pidns(host_pid) == first.pidns
        except (ProcessGone, AccessDenied):
            return False

    def _within(self, first: FirstProcess, host_pid: int) -> ContainerCgroup | None:
        container = self._procfs.container(host_pid)
        return container if container.container_id == first.container_id else None


def find_own(procfs: Procfs, pidmap: PidMap, own: Namespace, ns_pid: int) -> ContainerProcess | None:
    """Return the process with this PID in a namespace of which the caller holds a process, in any container.

    None is conclusive only if the kernel keeps the map.
    """
    source = pidmap.source
    if (kernel := source.exact()) is None:
        candidates = source.candidates(ns_pid, own.pidns)
    else:
        record = kernel.lookup(own.pidns, ns_pid)
        candidates = [record.host_pid] if record else []
    try:
        return resolve(procfs, candidates, own, ns_pid, procfs.container, source.name)
    except AccessDenied:
        return None
