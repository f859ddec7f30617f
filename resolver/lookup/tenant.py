"""Processes by PID namespace and number alone, for who may ask about its own namespace and no other.

The namespace is that of a living process which the caller holds, so its inode stays its own meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resolver.containers.namespaces import Namespace, has_number, members_of
from resolver.errors import AccessDenied, ProcessGone
from resolver.lookup.verify import ContainerProcess, verify

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resolver.linux.procfs import Procfs
    from resolver.pids.pidmap import PidMap


def find_own(procfs: Procfs, pidmap: PidMap, own: Namespace, ns_pid: int) -> ContainerProcess | None:
    """By the map as of its last refresh: the process that this namespace knows as ``ns_pid``, verified.

    None is conclusive only if the kernel keeps the map, and the process was not about to end.
    """
    kernel = pidmap.source.exact()
    if kernel is None:
        return _first(procfs, pidmap.source.candidates(ns_pid, own.pidns), own, ns_pid, pidmap.source.name)
    record = kernel.lookup(own.pidns, ns_pid)
    return _first(procfs, [record.host_pid] if record else [], own, ns_pid, pidmap.source.name)


def walk_own(procfs: Procfs, own: Namespace, ns_pids: Iterable[int]) -> dict[int, ContainerProcess | None]:
    """By reading every process."""
    members = members_of(procfs, procfs.entries())
    answers: dict[int, ContainerProcess | None] = {}
    for ns_pid in ns_pids:
        fitting = [each.host_pid for each in members if each.ns_pids[own.level : own.level + 1] == (ns_pid,)]
        answers[ns_pid] = _first(procfs, fitting, own, ns_pid, "scan")
    return answers


def _first(
    procfs: Procfs, host_pids: Iterable[int], own: Namespace, ns_pid: int, source: str
) -> ContainerProcess | None:
    for host_pid in host_pids:
        try:
            found = _verified(procfs, host_pid, own, ns_pid, source)
        except (ProcessGone, AccessDenied):
            continue
        if found is not None:
            return found
    return None


def _verified(
    procfs: Procfs, host_pid: int, own: Namespace, ns_pid: int, source: str
) -> ContainerProcess | None:
    with verify(procfs, host_pid) as handle:
        if not has_number(procfs, handle.process, own, ns_pid):
            return None
        container = procfs.container(host_pid)
        return ContainerProcess(
            container_id=container.container_id,
            container_pid=ns_pid,
            host_pid=host_pid,
            pidns=own.pidns,
            pod_uid=container.pod_uid,
            container_name=None,
            start_time=handle.process.start_time,
            comm=procfs.comm(host_pid),
            source=source,
        )
