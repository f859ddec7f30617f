"""A container's PID namespaces, and the choice of its main one."""

from collections.abc import Iterable
from contextlib import suppress

from resolver.base.errors import Ambiguous, CannotKnow, NotFound, ProcessGone
from resolver.base.records import NamedTuple
from resolver.linux.procfs import HOST_PIDNS, ProcessIdentity, Procfs


class Member(NamedTuple):
    """Process of the container; ``ns_pids`` as in `resolver.linux.procfs.ProcessIdentity`."""

    host_pid: int
    ns_pids: tuple[int, ...]


class Namespace(NamedTuple):
    """PID namespace by inode, and the place of its numbers in ``ns_pids``."""

    pidns: int
    level: int


HOST = Namespace(HOST_PIDNS, 0)


def members_of(procfs: Procfs, host_pids: Iterable[int]) -> list[Member]:
    """Return running processes with their numbers in every namespace."""
    members = []
    for host_pid in host_pids:
        try:
            ns_pids = procfs.ns_pids(host_pid)
        except ProcessGone:
            continue
        if ns_pids[0] == host_pid:  # 0 while it is being reaped
            members.append(Member(host_pid, ns_pids))
    return members


def own_namespace(procfs: Procfs, members: list[Member]) -> Namespace:
    """PID namespace of the container's main process: number 1 at the least depth.

    Without one, the container shares its pod's or the host's. A host process in the container's cgroup and a namespace
    made inside look alike: parentage decides, or age. Raises Ambiguous if neither does, and CannotKnow under gVisor.
    """
    least = min(len(member.ns_pids) for member in members)
    top = [member for member in members if len(member.ns_pids) == least]
    inits = [member for member in members if member.ns_pids[-1] == 1 and len(member.ns_pids) > 1]
    if is_gvisor(procfs, (inits or top)[0].host_pid):
        raise CannotKnow(
            "the container runs under gVisor: the PIDs in it are those of a kernel of its own, and no process of this "
            "host has them"
        )
    if inits:
        depth = min(len(member.ns_pids) for member in inits)
        first = [member for member in inits if len(member.ns_pids) == depth]
        if depth == least or not _made_inside(procfs, top, first):
            return _only(procfs, first)
    return _only(procfs, top)


def is_gvisor(procfs: Procfs, host_pid: int) -> bool:
    """Recognize a process of gVisor by its executable."""
    # Its parts start themselves through /proc/self/exe; number 1 is the gofer (runsc/cmd/gofer.go).
    try:
        return procfs.comm(host_pid) == "exe" and procfs.program(host_pid).startswith("runsc")
    except ProcessGone:
        return False


def nested_namespace(procfs: Procfs, members: list[Member], pidns: int) -> Namespace:
    """Return the namespace with this inode of the container's processes. Raises NotFound."""
    seen: dict[int, None] = {}
    for member in members:
        try:
            innermost = procfs.pidns(member.host_pid)
            if innermost in seen:
                continue
            chain = procfs.pidns_chain(member.host_pid)
        except ProcessGone:
            continue
        if pidns in chain:
            return Namespace(pidns, chain.index(pidns))
        seen[innermost] = None
    levels = ", ".join(map(str, seen)) or "none, they all ended"
    raise NotFound(
        f"no process of the container is in a PID namespace with inode {pidns}; they are in: {levels}",
        "pidns",
    )


def numbered(procfs: Procfs, members: Iterable[Member], namespace: Namespace, ns_pid: int) -> list[Member]:
    """Return members with the number ``ns_pid``; two if the first has just ended."""
    fitting = []
    for member in members:
        with suppress(ProcessGone):
            if has_number(procfs, member, namespace, ns_pid):
                fitting.append(member)
    return fitting


def has_number(procfs: Procfs, member: Member | ProcessIdentity, namespace: Namespace, ns_pid: int) -> bool:
    """Check a process's number in the namespace. Raises ProcessGone and AccessDenied."""
    same = member.ns_pids[namespace.level : namespace.level + 1] == (ns_pid,)
    return same and goes_through(procfs, member, namespace)


def goes_through(procfs: Procfs, member: Member | ProcessIdentity, namespace: Namespace) -> bool:
    """Check that this level's number isn't a sibling namespace's."""
    if namespace == HOST:
        return True
    if len(member.ns_pids) == namespace.level + 1:
        return procfs.pidns(member.host_pid) == namespace.pidns
    return procfs.pidns_chain(member.host_pid)[namespace.level : namespace.level + 1] == (namespace.pidns,)


def _only(procfs: Procfs, members: list[Member]) -> Namespace:
    level = len(members[0].ns_pids) - 1
    if level == 0:
        return HOST
    by_pidns: dict[int, Member] = {}
    for member in members:
        with suppress(ProcessGone):
            by_pidns.setdefault(procfs.pidns(member.host_pid), member)
    if not by_pidns:
        raise ProcessGone("the container ended while it was checked")
    if len(by_pidns) > 1:
        raise Ambiguous(
            f"its processes are in {len(by_pidns)} PID namespaces, none inside another: choose with --pidns",
            tuple(f"--pidns {pidns}  (host PID {member.host_pid})" for pidns, member in by_pidns.items()),
        )
    return Namespace(next(iter(by_pidns)), level)


def _made_inside(procfs: Procfs, top: list[Member], inits: list[Member]) -> bool:
    outer = {member.host_pid for member in top}
    for member in inits:
        with suppress(ProcessGone):
            if procfs.parent(member.host_pid) in outer:
                return True
    born_top, born_init = _first_start(procfs, top), _first_start(procfs, inits)
    if born_top == born_init or (
        born_top < born_init and all(procfs.has_host_mounts(member.host_pid) for member in top)
    ):
        raise Ambiguous(
            "which PID namespace is the container's own, and which was made inside it, is unknown: choose with --pidns",
            tuple(
                f"--pidns {_only(procfs, [first]).pidns}  (host PID {first.host_pid})"
                for first in (top[0], inits[0])
            ),
        )
    return born_top < born_init


def _first_start(procfs: Procfs, members: list[Member]) -> int:
    starts = []
    for member in members:
        with suppress(ProcessGone):
            starts.append(procfs.start_time(member.host_pid))
    if not starts:
        raise ProcessGone("the container's processes ended while they were checked")
    return min(starts)
