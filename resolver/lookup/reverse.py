"""From a host PID back to the container: the same question the other way round, by what the kernel says now.

Everything about the process is read while a handle holds it; the container's own facts (its name, its PID namespace)
come from all of its processes, since a single one may have changed what it sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from resolver.containers.find import Wanted, find_container, in_private_cgroupns, name_of
from resolver.containers.namespaces import goes_through, members_of, own_namespace
from resolver.errors import AccessDenied, Ambiguous, CannotKnow, NotFound, ProcessGone, UsageError
from resolver.linux.cgroup import cgroup_paths, parse_cgroup
from resolver.linux.procfs import HOST_PIDNS
from resolver.lookup.verify import verify

if TYPE_CHECKING:
    from resolver.containers.pod_names import PodNames
    from resolver.linux.procfs import ProcessIdentity, Procfs


class NamespacePid(NamedTuple):
    """The process's number in one PID namespace, whose inode is None where the kernel does not show it."""

    ns_pid: int
    pidns: int | None


class Reversed(NamedTuple):
    """A process of the host and the container it is in. Unknown fields are None.

    ``levels`` has a number for each PID namespace, the host's first. ``tid`` is the thread id that was asked for, None
    if it was the process's own. ``container_pid`` is the number in the container's own PID namespace: not the last one
    if the container made others. ``start_time`` is in clock ticks since boot. Without a ``container_id``,
    ``no_container`` says what is known instead.
    """

    host_pid: int
    tid: int | None
    levels: tuple[NamespacePid, ...]
    container_id: str | None
    container_pid: int | None
    pod_uid: str | None
    container_name: str | None
    namespace: str | None
    pod: str | None
    runtime: str | None
    comm: str
    start_time: int
    no_container: str | None

    def document(self) -> dict[str, Any]:
        """As JSON has it: the same names, each level an object."""
        return {**self._asdict(), "levels": [level._asdict() for level in self.levels]}


class _Inside(NamedTuple):
    """What the container's processes together show."""

    name: str | None = None
    container_pid: int | None = None


def reverse(procfs: Procfs, host_pid: int, pods: PodNames | None = None) -> Reversed:
    """Who ``host_pid`` is; a thread's id is taken for its process. ``pods`` gives names, if they are wanted.

    Raises NotFound, ProcessGone, UsageError, and CannotKnow if the answer is out of sight.
    """
    if host_pid < 1:
        raise UsageError(f"{host_pid} is no PID: they start at 1")
    procfs.require_host_view()
    tgid = _process_of(procfs, host_pid)
    try:
        with verify(procfs, tgid) as handle:
            found = _read(procfs, handle.process, pods)
            same = tgid == host_pid or procfs.status(host_pid).tgid == tgid
        if same:
            return found if tgid == host_pid else found._replace(tid=host_pid)
    except ProcessGone:
        pass
    raise ProcessGone(
        f"process {host_pid} ended while it was checked (or has ended, and its parent has not waited for it)"
    )


def _process_of(procfs: Procfs, host_pid: int) -> int:
    """The process that the number belongs to, be it a thread's."""
    try:
        return procfs.status(host_pid).tgid
    except ProcessGone:
        procfs.require_all_processes(procfs.mounts("self"))
        raise NotFound(f"no process or thread of this host has the number {host_pid}") from None


def _read(procfs: Procfs, process: ProcessIdentity, pods: PodNames | None) -> Reversed:
    host_pid, start_time, ns_pids = process
    if not ns_pids:
        raise CannotKnow(
            "this kernel does not show PIDs in containers: Linux 4.1 or later is required (NSpid)"
        )
    levels = _levels(procfs, host_pid, ns_pids)
    cgroup = procfs.cgroup(host_pid)
    container = parse_cgroup(cgroup)
    if container is None and in_private_cgroupns(procfs):
        raise CannotKnow(
            f"the cgroup of process {host_pid} shows no container, but this process runs in a private cgroup "
            "namespace, where its own container's id is hidden, and that might be the one: run it on the host, "
            "or with --cgroupns=host (Docker)"
        )
    inside, names = _Inside(), ("", "")
    if container is not None:
        inside = _inside(procfs, process, container.container_id, container.pod_uid)
        if pods is not None and container.pod_uid is not None:
            pods.refresh()
            names = pods.of(container.pod_uid)
    return Reversed(
        host_pid=host_pid,
        tid=None,
        levels=levels,
        container_id=container.container_id if container else None,
        container_pid=inside.container_pid,
        pod_uid=container.pod_uid if container else None,
        container_name=inside.name,
        namespace=names[0] or None,
        pod=names[1] or None,
        runtime=container.runtime if container else None,
        comm=procfs.comm(host_pid),
        start_time=start_time,
        no_container=None if container else _no_container(cgroup, levels),
    )


def _levels(procfs: Procfs, host_pid: int, ns_pids: tuple[int, ...]) -> tuple[NamespacePid, ...]:
    if len(ns_pids) == 1:
        return (NamespacePid(ns_pids[0], HOST_PIDNS),)
    try:
        chain: tuple[int | None, ...] = procfs.pidns_chain(host_pid)
    except AccessDenied:
        chain = (HOST_PIDNS, *[None] * (len(ns_pids) - 1))
    except CannotKnow:  # before Linux 4.9 only the ends are known
        chain = (HOST_PIDNS, *[None] * (len(ns_pids) - 2), procfs.pidns(host_pid))
    return tuple(NamespacePid(ns_pid, pidns) for ns_pid, pidns in zip(ns_pids, chain, strict=True))


def _inside(procfs: Procfs, process: ProcessIdentity, container_id: str, pod_uid: str | None) -> _Inside:
    """Asked of the whole container; what cannot be determined, or ends meanwhile, stays unknown."""
    try:
        container, _ = find_container(procfs, Wanted(container_id), procfs.mounts("self"), None)
        members = members_of(procfs, container.host_pids)
        name = name_of(procfs, members, pod_uid)
    except (CannotKnow, NotFound, ProcessGone, Ambiguous):
        return _Inside()
    try:
        own = own_namespace(procfs, members)
        is_in = len(process.ns_pids) > own.level and goes_through(procfs, process, own)
    except (CannotKnow, ProcessGone, Ambiguous, ValueError):
        return _Inside(name)
    return _Inside(name, process.ns_pids[own.level] if is_in else None)


def _no_container(cgroup: str, levels: tuple[NamespacePid, ...]) -> str:
    """No id is not always no container: a runtime may have given a name that no pattern knows."""
    path = max(cgroup_paths(cgroup), key=len, default="/")
    if len(levels) == 1:
        return f"no container: its cgroup is {path}"
    return f"no container in its cgroup path ({path}), but a PID namespace of its own"
