"""The path walker: opens files inside containers, and is killed when a tenant's file system keeps it waiting.

Runs as a child of the daemon (`resolver.workers.child`; standard library only). It gets a process and a path,
walks that path below the process's root, and hands the open file back. A step through a tenant's mounts can take for
ever: an overlay shows the type ``overlay``, whatever is below it. That is why no other part of the daemon ever takes
one.

Wire format (SOCK_SEQPACKET, JSON, one message each way)::

    {"host_pid": 4711, "path": "/tmp/cudevshr.cache", "file_systems": ["overlay", ...]}
    {"reason": "", "detail": ""}        and the file by SCM_RIGHTS; or a `RegionReason`, and nothing
"""

from __future__ import annotations

import json
import os
import socket

from resolver.errors import AccessDenied, ProcessGone, RegionRejected
from resolver.linux import seccomp
from resolver.linux.procfs import Procfs
from resolver.linux.safe_open import mount_id, open_plain, translate
from resolver.reasons import RegionReason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container

_MAX_DEPTH = 16  # components of a path
_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC


def main() -> int:
    """Serve requests until the daemon closes the socket."""
    seccomp.forbid(seccomp.DANGEROUS)
    channel = socket.socket(fileno=os.dup(0))
    procfs = Procfs()
    while message := channel.recv(1 << 16):
        asked = json.loads(message)
        try:
            fd = walk(procfs, asked["host_pid"], asked["path"], asked["file_systems"])
        except RegionRejected as why:
            channel.send(json.dumps({"reason": why.reason, "detail": why.detail}).encode())
            continue
        try:
            socket.send_fds(channel, [b'{"reason": "", "detail": ""}'], [fd])
        finally:
            os.close(fd)
    return 0


def walk(procfs: Procfs, host_pid: int, path: str, file_systems: Container[str]) -> int:
    """Open the path below the process's root, read-only; returns the descriptor. Raises `RegionRejected`.

    Every component is held without opening it, and no link is followed. Each mount on the way must be one of the
    process's own, of one of these ``file_systems``.
    """
    *directories, file_name = path.strip("/").split("/")
    if len(directories) > _MAX_DEPTH:
        raise RegionRejected(RegionReason.TOO_MANY_ENTRIES, "its path is too long")
    try:
        fd = os.open(f"{procfs.root}/{host_pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Only now: what it mounts in a user namespace that it enters after this is not below this root.
            if procfs.userns(host_pid) != procfs.userns("self"):
                raise RegionRejected(
                    RegionReason.ACCESS_DENIED,
                    "its process is in a user namespace of its own, where tenants can make mounts: it is skipped",
                )
            mounts = {mount.mount_id: mount.fs_type for mount in procfs.first_mounts(host_pid, limit=1 << 20)}
            _check_mount(fd, mounts, file_systems)
            for component in directories:
                below = os.open(component, _STEP, dir_fd=fd)
                os.close(fd)
                fd = below
                _check_mount(fd, mounts, file_systems)
            return open_plain(fd, file_name)[0]
        finally:
            os.close(fd)
    except ProcessGone:
        raise RegionRejected(RegionReason.GONE, "its process ended") from None
    except AccessDenied as error:
        raise RegionRejected(RegionReason.ACCESS_DENIED, str(error)) from None
    except OSError as error:
        raise translate(error) from None


def _check_mount(fd: int, mounts: dict[int, str], file_systems: Container[str]) -> None:
    """Raise `RegionRejected` unless the held directory is on a mount of the process's, of a kernel file system."""
    kind = mounts.get(mount_id(fd))
    if kind is None or kind not in file_systems:
        raise RegionRejected(
            RegionReason.OTHER_DEVICE,
            f"its path leads through {f'a file system of type {kind}' if kind else 'a foreign mount'}",
        )
