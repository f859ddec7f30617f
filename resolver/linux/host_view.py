"""Checks that every process of the host is visible."""

from __future__ import annotations

import os
import re

from resolver.base.errors import CannotKnow
from resolver.linux.procfs import HOST_PIDNS

TYPE_CHECKING = False  # as typing's, which a look-up does without
if TYPE_CHECKING:
    from collections.abc import Iterable

    from resolver.linux.mounts import Mount
    from resolver.linux.procfs import Procfs

_CAP_SYS_PTRACE = 19  # include/uapi/linux/capability.h


def require_host_view(procfs: Procfs) -> None:
    """Raise `CannotKnow`, with the fix, unless host processes are visible."""
    if not os.path.isdir(f"{procfs.root}/self"):
        raise CannotKnow(f"{procfs.root} is not a mounted proc file system: mount -t proc proc {procfs.root}")
    if procfs.pidns("self") != HOST_PIDNS:
        raise CannotKnow(
            "this process is not in the host's PID namespace, so it cannot see host PIDs: "
            "run it on the host, or with hostPID: true (Kubernetes) or --pid=host (Docker)"
        )
    if not os.path.exists(f"{procfs.root}/1/status"):
        raise CannotKnow(
            f"{procfs.root} is mounted with hidepid and hides other users' processes: run as root with "
            f"CAP_SYS_PTRACE, or remount it with: mount -o remount,hidepid=0 {procfs.root}"
        )


def require_all_processes(procfs: Procfs, mounts: Iterable[Mount]) -> None:
    """Raise `CannotKnow` if hidepid hides a process."""
    options = ""
    for mount in mounts:
        if mount.fs_type == "proc" and mount.mount_point == procfs.root:
            options = mount.super_options  # the last one covers those before
    hidden = dict(option.split("=", 1) for option in options.split(",") if "=" in option)
    if hidden.get("hidepid", "0") in ("0", "off"):
        return
    capabilities = re.search(rb"^CapEff:\s*([0-9a-f]+)$", procfs.read("self/status"), re.MULTILINE)
    if capabilities is not None and int(capabilities[1], 16) >> _CAP_SYS_PTRACE & 1:
        return
    groups = {*os.getgroups(), os.getegid()}
    if hidden["hidepid"] not in ("ptraceable", "4") and int(hidden.get("gid", -1)) in groups:
        return
    raise CannotKnow(
        f"{procfs.root} is mounted with hidepid={hidden['hidepid']} and hides processes from this one: "
        f"give it CAP_SYS_PTRACE, or remount with: mount -o remount,hidepid=0 {procfs.root}"
    )
