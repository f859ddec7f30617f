"""From a container and a PID inside it to the host PID, by asking the kernel now.

The container is found by its cgroup directory, or else by every process's ``/proc/<pid>/cgroup``. `resolve` reads each
candidate while it is held, so a candidate from the daemon's map (`cached`) can't make an answer wrong.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial

from resolver.base.errors import AccessDenied, CannotKnow, NotFound, ProcessGone, UsageError
from resolver.base.records import NamedTuple
from resolver.containers.find import FoundContainer, Wanted, find_container, name_of
from resolver.containers.namespaces import (
    HOST,
    Member,
    Namespace,
    has_number,
    members_of,
    nested_namespace,
    numbered,
    own_namespace,
)
from resolver.linux.cgroup import ContainerCgroup, cgroup_paths, parse_cgroup, pod_uid_of
from resolver.linux.cgroup_directories import processes_in
from resolver.linux.host_view import require_host_view
from resolver.linux.procfs import Procfs


class ContainerProcess(NamedTuple):
    """Process of a container: ``container_pid`` is its number in the PID namespace ``pidns``.

    ``start_time`` is in clock ticks since boot; ``source`` is ``cgroup``, ``scan`` or a source of PIDs. Hidden facts
    are None or empty.
    """

    container_id: str
    container_pid: int
    host_pid: int
    pidns: int
    pod_uid: str | None
    container_name: str | None
    start_time: int
    comm: str
    source: str


def lookup(procfs: Procfs, cid: str, ns_pid: int, *, pidns: int | None = None) -> ContainerProcess:
    """Return the process with the PID ``ns_pid`` in container ``cid``, or in its nested PID namespace ``pidns``.

    ``cid`` is an id or its first 6 or more characters, with or without a scheme such as ``containerd://``, or
    ``<podUID>/<containerName>``, or a complete name. Raises NotFound, ProcessGone, Ambiguous, UsageError, CannotKnow.
    """
    wanted = Wanted(cid)
    if ns_pid < 1:
        raise UsageError(f"{ns_pid} is not a PID: PIDs start at 1")
    container, source, members = _found(procfs, wanted)
    namespace = own_namespace(procfs, members) if pidns is None else nested_namespace(procfs, members, pidns)
    fitting = numbered(procfs, members, namespace, ns_pid)
    if not fitting:
        source = "scan"
        fitting = _late(procfs, wanted, container, namespace, ns_pid)
    if not fitting:
        why = f"container {container.container_id} has no process {ns_pid} in its PID namespace {namespace.pidns}"
        if ns_pid in container.host_pids:
            why += f": {ns_pid} is a host PID; resolver reverse {ns_pid} shows its PID there"
        raise NotFound(why)
    within = partial(_within, procfs, wanted, container)
    process = resolve(
        procfs, (candidate.host_pid for candidate in fitting), namespace, ns_pid, within, source
    )
    if process is not None:
        with suppress(CannotKnow):
            return process._replace(container_name=name_of(procfs, members, process.pod_uid))
        return process
    raise ProcessGone(
        f"process {ns_pid} of container {container.container_id} ended while it was looked up "
        "(or has ended, and its parent has not waited for it)"
    )


def lookup_many(procfs: Procfs, cid: str, ns_pids: Iterable[int]) -> dict[int, ContainerProcess | None]:
    """Look several PIDs of one container up, without names; a missing process is None. Raises as `lookup`."""
    wanted = Wanted(cid)
    container, source, members = _found(procfs, wanted)
    within = partial(_within, procfs, wanted, container)
    candidates = _by_number(members, namespace := own_namespace(procfs, members))
    return {
        ns_pid: resolve(procfs, candidates[ns_pid], namespace, ns_pid, within, source, brief=True)
        for ns_pid in ns_pids
    }


def walk_own(procfs: Procfs, own: Namespace, ns_pids: Iterable[int]) -> dict[int, ContainerProcess | None]:
    """Look PIDs up in the namespace of a process that the caller holds, by reading every process of the node."""
    candidates = _by_number(members_of(procfs, procfs.entries()), own)
    return {
        ns_pid: resolve(procfs, candidates[ns_pid], own, ns_pid, procfs.container, "scan", lenient=True)
        for ns_pid in ns_pids
    }


def _by_number(members: Iterable[Member], namespace: Namespace) -> Mapping[int, list[int]]:
    """Return host PIDs by their number at the namespace's level, also those in sibling namespaces."""
    by_number = defaultdict[int, list[int]](list)
    for member in members:
        if len(member.ns_pids) > namespace.level:
            by_number[member.ns_pids[namespace.level]].append(member.host_pid)
    return by_number


def resolve(
    procfs: Procfs,
    host_pids: Iterable[int],
    namespace: Namespace,
    ns_pid: int,
    within: Callable[[int], ContainerCgroup | None],
    source: str,
    *,
    brief: bool = False,
    lenient: bool = False,
) -> ContainerProcess | None:
    """Return the first of these processes with number ``ns_pid`` in the namespace, or None.

    ``within`` returns the container of a held process, None for an unwanted one. The caller adds the container's
    name. ``brief`` leaves out the command name. Raises AccessDenied if nothing else is found, unless ``lenient``.
    """
    refused: AccessDenied | None = None
    for host_pid in host_pids:
        try:
            with procfs.verify(host_pid) as handle:
                matches = has_number(procfs, handle.process, namespace, ns_pid) and within(host_pid)
                comm = procfs.comm(host_pid) if matches and not brief else ""
        except ProcessGone:
            continue
        except AccessDenied as error:
            refused = error
            continue
        if matches:
            return ContainerProcess(
                container_id=matches.container_id,
                container_pid=ns_pid,
                host_pid=host_pid,
                pidns=namespace.pidns,
                pod_uid=matches.pod_uid,
                container_name=None,
                start_time=handle.process.start_time,
                comm=comm,
                source=source,
            )
    if refused is not None and not lenient:
        raise refused
    return None


def _found(procfs: Procfs, wanted: Wanted) -> tuple[FoundContainer, str, list[Member]]:
    """Return the container, the source, and its processes. Raises CannotKnow if some may be hidden."""
    require_host_view(procfs)
    container, source = find_container(procfs, wanted, procfs.mounts("self"))
    members = members_of(procfs, container.host_pids)
    if not members:
        raise ProcessGone(f"container {container.container_id} ended while it was checked")
    return container, source, members


def _within(
    procfs: Procfs, wanted: Wanted, container: FoundContainer, host_pid: int
) -> ContainerCgroup | None:
    cgroup = procfs.cgroup(host_pid)
    if not _is_inside(wanted, container, host_pid, cgroup):
        return None
    return ContainerCgroup(container.container_id, _pod_uid(cgroup, container.container_id), None)


def _is_inside(wanted: Wanted, container: FoundContainer, host_pid: int, cgroup: str) -> bool:
    """Check that the process is in the container; in a private cgroup namespace paths may be cut short."""
    return not container.keys.isdisjoint(wanted.keys_in(cgroup)) or host_pid in processes_in(
        container.directories
    )


def _pod_uid(cgroup: str, container_id: str) -> str | None:
    """Return the container's pod, ignoring pods nested in it."""
    for path in cgroup_paths(cgroup):
        before, separator, _ = path.rpartition(container_id)
        if separator and (pod_uid := pod_uid_of(before)) is not None:
            return pod_uid
    return None


def _late(
    procfs: Procfs, wanted: Wanted, container: FoundContainer, namespace: Namespace, ns_pid: int
) -> list[Member]:
    """Search all of the node's processes, as cgroups may have changed. Raises NotFound with another owner's name."""
    others = procfs.entries().keys() - container.host_pids.keys()
    if namespace == HOST:
        others &= {ns_pid}
    for member in numbered(procfs, members_of(procfs, others), namespace, ns_pid):
        try:
            cgroup = procfs.cgroup(member.host_pid)
        except ProcessGone:
            continue
        if _is_inside(wanted, container, member.host_pid, cgroup):
            return [member]
        owner = parse_cgroup(cgroup)
        raise NotFound(
            f"PID {ns_pid} of that PID namespace is host PID {member.host_pid}, which is in "
            + (f"container {owner.container_id}" if owner else "no container")
            + f" and not in {container.container_id}"
        )
    return []
