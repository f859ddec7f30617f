"""The same question, answered from the daemon's map: no walk through cgroups, one process looked at.

It answers the plain case, a container's full id and a PID namespace of its own, and is silent in every other: then
`resolver.lookup.lookup` is to be asked, which knows them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resolver.cgroup import parse_cgroup, strip_scheme
from resolver.errors import AccessDenied, ProcessGone
from resolver.lookup import Found
from resolver.lookup.containers import container_name

if TYPE_CHECKING:
    from resolver.pidmap import PidMap
    from resolver.procfs import Procfs


_FULL_ID = 64


class LiveLookup:
    """Look-ups through the daemon's map. What it remembers of containers only narrows the choice."""

    def __init__(self, procfs: Procfs, pidmap: PidMap) -> None:
        self._procfs = procfs
        self._pidmap = pidmap
        self._inits: dict[int, tuple[tuple[int, int], str]] = {}  # host PID -> arrival, container id

    def find(self, cid: str, ns_pid: int) -> Found | None:
        """The process that a container knows as ``ns_pid``, verified; None if this is not a plain case."""
        wanted = strip_scheme(cid.strip())
        if len(wanted) != _FULL_ID or ns_pid < 1:
            return None
        self._pidmap.refresh()
        inits = self._inits_of(wanted)
        if len(inits) != 1:
            return None
        init, container_id = inits[0]
        try:
            pidns = self._procfs.pidns(init)
            level = len(self._procfs.ns_pids(init)) - 1
            for host_pid in self._pidmap.candidates(ns_pid):
                found = self._verified(host_pid, container_id, pidns, level, ns_pid)
                if found is not None:
                    return found
        except (ProcessGone, AccessDenied):
            pass
        return None

    def _inits_of(self, wanted: str) -> list[tuple[int, str]]:
        """The first process of the container's PID namespace, if its runtime made one for it."""
        found: list[tuple[int, str]] = []
        inits: dict[int, tuple[tuple[int, int], str]] = {}
        for host_pid in self._pidmap.candidates(1):
            arrival = self._pidmap.arrival(host_pid)
            known = self._inits.get(host_pid)
            inits[host_pid] = (
                known if known and known[0] == arrival and known[1] else (arrival, self._id(host_pid))
            )
            container_id = inits[host_pid][1]
            if container_id == wanted and self._made_by_runtime(host_pid, container_id):
                found.append((host_pid, container_id))
        self._inits = inits
        return found

    def _id(self, host_pid: int) -> str:
        try:
            container = parse_cgroup(self._procfs.cgroup(host_pid))
        except (ProcessGone, AccessDenied):
            return ""
        return container.container_id if container else ""

    def _made_by_runtime(self, host_pid: int, container_id: str) -> bool:
        """Not by a process of the same container: that would be a namespace inside of it."""
        try:
            return self._id(self._procfs.status(host_pid).ppid) != container_id
        except (ProcessGone, AccessDenied):
            return False

    def _verified(
        self, host_pid: int, container_id: str, pidns: int, level: int, ns_pid: int
    ) -> Found | None:
        procfs = self._procfs
        try:
            if procfs.pidns(host_pid) != pidns:
                return None
            with procfs.open_handle(host_pid) as handle:
                container = parse_cgroup(procfs.cgroup(host_pid))
                if container is None or container.container_id != container_id:
                    return None
                numbers = handle.process.ns_pids
                if numbers[level:] != (ns_pid,) or procfs.pidns(host_pid) != pidns:
                    return None
                found = Found(
                    container_id,
                    ns_pid,
                    host_pid,
                    pidns,
                    container.pod_uid,
                    container_name(procfs.mounts(host_pid), container.pod_uid),
                    handle.process.start_time,
                    procfs.comm(host_pid),
                    self._pidmap.source.name,
                )
                return found if handle.alive() else None
        except ProcessGone:
            return None
