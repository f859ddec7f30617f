"""From a container and a PID inside it to the host PID, by what the kernel says at this very moment.

The container is found by its cgroup directory, or, where no mounted hierarchy shows it, by every process's
``/proc/<pid>/cgroup``. The PID is one of the container's own PID namespace. The answer is checked once more
with the process held fast by a pidfd, so a PID that is used again in between is never given out.
"""

from __future__ import annotations

import os

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
from resolver.errors import CannotKnow, NotFound, ProcessGone, UsageError
from resolver.linux.cgroup import cgroup_paths, parse_cgroup, pod_uid_of
from resolver.linux.cgroup_directories import processes_in
from resolver.lookup.verify import ContainerProcess, verify

TYPE_CHECKING = False  # as typing's, which a look-up does without
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from resolver.linux.procfs import Procfs

#: Threads that are looked through for a number that is no process's, only to say so.
_MOST_THREADS = 20_000


def lookup(
    procfs: Procfs,
    cid: str,
    ns_pid: int,
    *,
    pidns: int | None = None,
    cgroup_roots: Sequence[str] | None = None,
) -> ContainerProcess:
    """The host PID of the process that container ``cid`` knows as ``ns_pid``.

    ``cid`` is an id, the first 6 or more characters of one, either with or without a scheme such as
    ``containerd://``, ``<podUID>/<containerName>``, or the complete name of a container that has no id.
    ``pidns`` is the inode of another PID namespace in the container. ``cgroup_roots`` are looked through in
    the place of the mounted hierarchies.

    Raises NotFound, ProcessGone, Ambiguous, UsageError, and CannotKnow if the answer is out of sight.
    """
    wanted = Wanted(cid)
    if ns_pid < 1:
        raise UsageError(f"{ns_pid} is no PID: they start at 1")
    container, source, members = _found(procfs, wanted, cgroup_roots)
    namespace = own_namespace(procfs, members) if pidns is None else nested_namespace(procfs, members, pidns)
    fitting = numbered(procfs, members, namespace, ns_pid)
    if not fitting:
        source = "scan"
        fitting = _late(procfs, wanted, container, namespace, ns_pid)
    if not fitting:
        raise NotFound(_explain(procfs, container, members, namespace, ns_pid))
    for member in fitting:
        found = _verified(procfs, wanted, container, namespace, ns_pid, member, source)
        if found is not None:
            return found._replace(container_name=_name(procfs, members, found.pod_uid))
    raise ProcessGone(
        f"process {ns_pid} of container {container.container_id} ended while it was looked up "
        "(or has ended, and its parent has not waited for it)"
    )


def lookup_many(procfs: Procfs, cid: str, ns_pids: Iterable[int]) -> dict[int, ContainerProcess | None]:
    """The same for several PIDs of one container, which is searched once. None: no process has that number.

    Nothing is said of the container but its id. Raises as `lookup` does, but for a single process that is not there.
    """
    wanted = Wanted(cid)
    container, source, members = _found(procfs, wanted, None)
    namespace = own_namespace(procfs, members)
    by_number: dict[int, list[Member]] = {}
    for member in members:
        if len(member.ns_pids) > namespace.level:
            by_number.setdefault(member.ns_pids[namespace.level], []).append(member)
    answers: dict[int, ContainerProcess | None] = {}
    for ns_pid in ns_pids:
        fitting = numbered(procfs, by_number.get(ns_pid, ()), namespace, ns_pid)
        tried = (_verified(procfs, wanted, container, namespace, ns_pid, each, source) for each in fitting)
        answers[ns_pid] = next(filter(None, tried), None)
    return answers


def _found(
    procfs: Procfs, wanted: Wanted, cgroup_roots: Sequence[str] | None
) -> tuple[FoundContainer, str, list[Member]]:
    """The container, what showed it, and its processes; raises if the answer would be out of sight."""
    procfs.require_host_view()
    mounts = procfs.mounts("self")
    procfs.require_all_processes(mounts)
    container, source = find_container(procfs, wanted, mounts, cgroup_roots)
    members = members_of(procfs, container.host_pids)
    if not members:
        raise ProcessGone(f"container {container.container_id} ended while it was checked")
    return container, source, members


def _verified(
    procfs: Procfs,
    wanted: Wanted,
    container: FoundContainer,
    namespace: Namespace,
    ns_pid: int,
    member: Member,
    source: str,
) -> ContainerProcess | None:
    """The answer, read while the process is held; None if it ended or is another one by now."""
    host_pid = member.host_pid
    try:
        with verify(procfs, host_pid) as handle:
            if not has_number(procfs, handle.process, namespace, ns_pid):
                return None
            cgroup = procfs.cgroup(host_pid)
            if not _is_inside(wanted, container, host_pid, cgroup):
                return None
            return ContainerProcess(
                container_id=container.container_id,
                container_pid=ns_pid,
                host_pid=host_pid,
                pidns=namespace.pidns,
                pod_uid=_pod_uid(cgroup, container.container_id),
                container_name=None,  # the container's, not the process's: read from its main process
                start_time=handle.process.start_time,
                comm=procfs.comm(host_pid),
                source=source,
            )
    except ProcessGone:
        return None


def _is_inside(wanted: Wanted, container: FoundContainer, host_pid: int, cgroup: str) -> bool:
    """Whether the process is in the container now. In a private cgroup namespace paths may be cut short."""
    return not container.keys.isdisjoint(wanted.keys_in(cgroup)) or host_pid in processes_in(
        container.directories
    )


def _pod_uid(cgroup: str, container_id: str) -> str | None:
    """The pod that the container is in, and not one that runs inside of it."""
    for path in cgroup_paths(cgroup):
        before, found, _ = path.rpartition(container_id)
        if found and (pod_uid := pod_uid_of(before)) is not None:
            return pod_uid
    return None


def _late(
    procfs: Procfs, wanted: Wanted, container: FoundContainer, namespace: Namespace, ns_pid: int
) -> list[Member]:
    """The process among all of the node's: it may have changed its cgroup while the directories were read.

    Raises NotFound that names the owner if that is another container, as in pods that share a namespace.
    """
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


def _name(procfs: Procfs, members: list[Member], pod_uid: str | None) -> str | None:
    """The container's name for people; None as well where its mount table may not be read."""
    try:
        return name_of(procfs, members, pod_uid)
    except CannotKnow:
        return None


def _explain(
    procfs: Procfs, container: FoundContainer, members: list[Member], namespace: Namespace, ns_pid: int
) -> str:
    """Why no process has that number, with the nearest thing that has it."""
    where = f"container {container.container_id}"
    process = _process_of_thread(procfs, members, namespace, ns_pid)
    if process is not None:
        return (
            f"{ns_pid} is no process of {where} but a thread of its process "
            f"{process.ns_pids[namespace.level]}: ask for that one"
        )
    text = f"{where} has no process {ns_pid} in its PID namespace {namespace.pidns}"
    for member in members:
        if ns_pid in member.ns_pids[namespace.level + 1 :]:
            try:
                chain = procfs.pidns_chain(member.host_pid)
            except ProcessGone:
                continue
            nested = chain[member.ns_pids.index(ns_pid, namespace.level + 1)]
            return f"{text}; one has that number in a nested namespace: ask for it with --pidns {nested}"
    return text


def _process_of_thread(
    procfs: Procfs, members: Iterable[Member], namespace: Namespace, ns_pid: int
) -> Member | None:
    """The process of the container that has a thread with this number."""
    budget = _MOST_THREADS
    for member in members:
        tasks = f"{procfs.root}/{member.host_pid}/task"
        try:
            # Number of links of a task directory: two and one for each thread.
            budget -= (threads := os.stat(tasks).st_nlink - 2)
            if threads == 1 or budget < 0:
                continue
            threads_of = members_of(procfs, (int(name) for name in os.listdir(tasks)))
        except OSError:
            continue
        if numbered(procfs, threads_of, namespace, ns_pid):
            return member
    return None
