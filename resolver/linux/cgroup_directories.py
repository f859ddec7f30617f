"""Containers' directories and processes in cgroup hierarchies."""

import errno
import os
from collections.abc import Callable, Iterable

from resolver.base.errors import AccessDenied
from resolver.linux.cgroup import names_in_pod
from resolver.linux.mounts import Mount

#: Takes a directory's path, its name, and true below the wanted pod; returns the container's key or None, and
#: true if its children are in the pod.
Match = Callable[[str, str, bool], tuple[str | None, bool]]


def cgroup_roots(mounts: Iterable[Mount]) -> list[str]:
    """Mount points of cgroup hierarchies, v2 first.

    Of a hierarchy also mounted in part, the top.
    """
    best: dict[str, tuple[bool, bool, int, str]] = {}
    for mount in mounts:
        if mount.fs_type in ("cgroup", "cgroup2"):
            cheap = "name=systemd" in mount.super_options  # has all containers, and the fewest files to list
            rank = (mount.fs_type == "cgroup", not cheap, len(mount.root), mount.mount_point)
            if mount.device not in best or rank < best[mount.device]:
                best[mount.device] = rank
    return [mount_point for *_, mount_point in sorted(best.values())]


def find_directories(root: str, match: Match, top: str = "", container_id: str = "") -> dict[str, list[str]]:
    """``{key: directories}`` of containers that ``match`` knows, parents first.

    ``top`` limits the walk. With the complete ``container_id``, pods are listed only if none has a cgroup that runtimes
    name after it. Raises `AccessDenied` if a directory can't be listed.
    """
    directories: dict[str, list[str]] = {}
    stack: list[tuple[str, tuple[str, ...], bool]] = []
    pods: list[tuple[str, tuple[str, ...], bool]] = []

    def visit(path: str, name: str, owners: tuple[str, ...], *, in_pod: bool) -> None:
        key, in_pod = match(path[len(root) :], name, in_pod)
        if key is not None and key not in owners:
            owners = (*owners, key)
        for owner in owners:
            directories.setdefault(owner, []).append(path)
        if container_id and not owners and (names := names_in_pod(name, container_id)):
            for child in (child for child in names if os.access(f"{path}/{child}", os.F_OK)):
                visit(f"{path}/{child}", child, owners, in_pod=in_pod)
            pods.append((path, owners, in_pod))
        elif _may_have_children(path):
            stack.append((path, owners, in_pod))

    if top:
        visit(root + top, top.rsplit("/", 1)[-1], (), in_pod=False)
    else:
        stack.append((root, (), False))
    while stack:
        path, owners, in_pod = stack.pop()
        for name in subdirectories(path):
            visit(f"{path}/{name}", name, owners, in_pod=in_pod)
        if not stack and not directories:
            stack, pods, container_id = pods, [], ""
    return directories


def processes_in(directories: Iterable[str]) -> dict[int, None]:
    """Return these cgroups' host PIDs, as an ordered set; vanished directories are empty.

    Threaded subtrees (EOPNOTSUPP) are listed further up; too deep paths are skipped.
    """
    host_pids: dict[int, None] = {}
    for directory in directories:
        path = directory + "/cgroup.procs"
        try:
            with open(path, "rb", buffering=0) as file:
                host_pids.update(dict.fromkeys(map(int, file.read().split())))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP, errno.ENAMETOOLONG):
                continue
            raise _translate(error, path) from None
    host_pids.pop(0, None)  # a process of a PID namespace that cannot be seen from here
    return host_pids


def subdirectories(path: str) -> list[str]:
    """Return the names of the control groups directly below."""
    try:
        with os.scandir(path) as listing:
            return [entry.name for entry in listing if entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENODEV, errno.ENOTDIR):
            return []
        raise _translate(error, path) from None


def _may_have_children(path: str) -> bool:
    """Guess by the link count, which includes subdirectories (fs/kernfs/inode.c)."""
    try:
        return os.stat(path).st_nlink != 2
    except OSError:
        return False


def _translate(error: OSError, path: str) -> Exception:
    if error.errno in (errno.EACCES, errno.EPERM):
        return AccessDenied(f"{path} may not be read, and the container may be there: run as root")
    return error
