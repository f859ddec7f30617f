"""Processes by PID namespace and number alone, for who may ask about its own namespace and no other.

The namespace is that of a living process which the caller holds, so its inode stays its own meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resolver.cgroup import parse_cgroup
from resolver.errors import AccessDenied, NotFound, ProcessGone
from resolver.lookup import Found
from resolver.lookup.namespaces import Member, Namespace, members_of, numbered

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resolver.pidmap import PidMap
    from resolver.procfs import Procfs


def find_own(procfs: Procfs, pidmap: PidMap, own: Namespace, ns_pid: int) -> Found | None:
    """By the map: the process that this namespace knows as ``ns_pid``, verified. None proves nothing."""
    pidmap.refresh()
    kernel = pidmap.kernel()
    if kernel is not None:
        record = kernel.lookup(own.pidns, ns_pid)
        candidates = [record.host_pid] if record else []
    else:
        candidates = pidmap.candidates(ns_pid, own.pidns)
    return _first(procfs, candidates, own, ns_pid, pidmap.source.name)


def walk_own(procfs: Procfs, own: Namespace, ns_pid: int) -> Found:
    """By a look at every process. Raises NotFound."""
    members = numbered(procfs, members_of(procfs, procfs.entries()), own, ns_pid)
    found = _first(procfs, [member.host_pid for member in members], own, ns_pid, "scan")
    if found is None:
        raise NotFound(f"no process of PID namespace {own.pidns} has the number {ns_pid} in there")
    return found


def _first(
    procfs: Procfs, host_pids: Iterable[int], own: Namespace, ns_pid: int, source: str
) -> Found | None:
    for host_pid in host_pids:
        try:
            found = _verified(procfs, host_pid, own, ns_pid, source)
        except (ProcessGone, AccessDenied):
            continue
        if found is not None:
            return found
    return None


def _verified(procfs: Procfs, host_pid: int, own: Namespace, ns_pid: int, source: str) -> Found | None:
    with procfs.open_handle(host_pid) as handle:
        if not numbered(procfs, [Member(host_pid, handle.process.ns_pids)], own, ns_pid):
            return None
        container = parse_cgroup(procfs.cgroup(host_pid))
        found = Found(
            container.container_id if container else "",
            ns_pid,
            host_pid,
            own.pidns,
            container.pod_uid if container else None,
            None,
            handle.process.start_time,
            procfs.comm(host_pid),
            source,
        )
        # Last of all: a process that runs now was there, under this PID, during every read above.
        return found if handle.alive() else None
