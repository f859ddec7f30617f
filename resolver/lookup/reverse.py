"""From a host PID back to the container, by asking the kernel now.

The container's name and PID namespace come from all of its processes, as a single one may have changed its view.
"""

from msgspec import Struct
from msgspec.structs import replace

from resolver.base.errors import AccessDenied, Ambiguous, CannotKnow, NotFound, ProcessGone, UsageError
from resolver.base.text import printable
from resolver.containers.find import Wanted, find_container, name_of, require_host_cgroupns
from resolver.containers.log_names import PodNames
from resolver.containers.namespaces import goes_through, members_of, own_namespace
from resolver.linux.cgroup import NO_CONTAINER, cgroup_paths, parse_cgroup
from resolver.linux.host_view import require_host_view
from resolver.linux.procfs import HOST_PIDNS, ProcessIdentity, Procfs


class Level(Struct, frozen=True):
    """A process's number in one PID namespace; the inode is null if the kernel hides it."""

    ns_pid: int
    pidns: int | None


class ReversedProcess(Struct, frozen=True):
    """Process of the host, with its container.

    ``levels`` has a number for each PID namespace, the host's first; ``container_pid`` is the one of the container's.
    ``tid`` is the requested thread. ``start_time`` is in clock ticks. ``no_container`` explains a missing id.
    """

    host_pid: int
    tid: int | None
    levels: tuple[Level, ...]
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


def reverse(procfs: Procfs, host_pid: int, pods: PodNames | None = None) -> ReversedProcess:
    """Describe a process, or that of a thread. Raises NotFound, ProcessGone, UsageError, CannotKnow."""
    if host_pid < 1:
        raise UsageError(f"{host_pid} is not a PID: PIDs start at 1")
    require_host_view(procfs)
    try:
        tgid = procfs.tgid(host_pid)
    except ProcessGone:
        raise NotFound(f"no process or thread of this host has the number {host_pid}") from None
    try:
        with procfs.verify(tgid) as handle:
            answer = _read(procfs, handle.process, pods)
            same = tgid == host_pid or procfs.tgid(host_pid) == tgid
        if same:
            return answer if tgid == host_pid else replace(answer, tid=host_pid)
    except ProcessGone:
        pass
    raise ProcessGone(
        f"process {host_pid} ended while it was checked (or has ended, and its parent has not waited for it)"
    )


def _read(procfs: Procfs, process: ProcessIdentity, pods: PodNames | None) -> ReversedProcess:
    host_pid, start_time, ns_pids = process
    levels = _levels(procfs, host_pid, ns_pids)
    cgroup = procfs.cgroup(host_pid)
    container = parse_cgroup(cgroup) or NO_CONTAINER
    name, container_pid, names = None, None, ("", "")
    if not container.container_id:
        require_host_cgroupns(procfs, f"the cgroup of process {host_pid} shows no container")
    else:
        name, container_pid = _inside(procfs, process, container.container_id, container.pod_uid)
        if pods is not None and container.pod_uid is not None:
            pods.refresh()
            names = pods.of(container.pod_uid)
    return ReversedProcess(
        host_pid=host_pid,
        tid=None,
        levels=levels,
        container_id=container.container_id or None,
        container_pid=container_pid,
        pod_uid=container.pod_uid,
        container_name=name,
        namespace=names[0] or None,
        pod=names[1] or None,
        runtime=container.runtime,
        comm=procfs.comm(host_pid),
        start_time=start_time,
        no_container=None if container.container_id else _no_container(cgroup, levels),
    )


def _levels(procfs: Procfs, host_pid: int, ns_pids: tuple[int, ...]) -> tuple[Level, ...]:
    if len(ns_pids) == 1:
        return (Level(ns_pids[0], HOST_PIDNS),)
    try:
        chain: tuple[int | None, ...] = procfs.pidns_chain(host_pid)
    except AccessDenied:
        chain = (HOST_PIDNS, *[None] * (len(ns_pids) - 1))
    except CannotKnow:  # before Linux 4.9 only the ends are known
        chain = (HOST_PIDNS, *[None] * (len(ns_pids) - 2), procfs.pidns(host_pid))
    return tuple(Level(ns_pid, pidns) for ns_pid, pidns in zip(ns_pids, chain, strict=True))


def _inside(
    procfs: Procfs, process: ProcessIdentity, container_id: str, pod_uid: str | None
) -> tuple[str | None, int | None]:
    """Return the container's name and the process's number in it, each None if unknown."""
    try:
        container, _ = find_container(procfs, Wanted(container_id), procfs.mounts("self"))
        members = members_of(procfs, container.host_pids)
        name = name_of(procfs, members, pod_uid)
    except (CannotKnow, NotFound, ProcessGone, Ambiguous):
        return None, None
    try:
        own = own_namespace(procfs, members)
        is_in = len(process.ns_pids) > own.level and goes_through(procfs, process, own)
    except (CannotKnow, ProcessGone, Ambiguous, ValueError):
        return name, None
    return name, process.ns_pids[own.level] if is_in else None


def _no_container(cgroup: str, levels: tuple[Level, ...]) -> str:
    """Explain a missing id: a runtime may give names that no pattern knows."""
    path = printable(max(cgroup_paths(cgroup), key=len, default="/"))
    if len(levels) == 1:
        return f"no container: its cgroup is {path}"
    return f"no container in its cgroup path ({path}), but a PID namespace of its own"
