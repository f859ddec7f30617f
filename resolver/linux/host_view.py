"""Checks that every process of the host is visible."""

import os

from resolver.base.errors import CannotKnow
from resolver.linux.procfs import HOST_PIDNS, Procfs


def require_host_view(procfs: Procfs) -> None:
    """Raise `CannotKnow`, with the fix, unless all processes of the host are visible."""
    if not os.path.isdir(f"{procfs.root}/self"):
        raise CannotKnow(f"{procfs.root} is not a mounted proc file system: mount -t proc proc {procfs.root}")
    if procfs.pidns("self") != HOST_PIDNS:
        raise CannotKnow(
            "this process is not in the host's PID namespace, so it cannot see host PIDs: "
            "run it on the host, or with hostPID: true (Kubernetes) or --pid=host (Docker)"
        )
    # kthreadd, always PID 2 (rest_init in init/main.c), has every capability: a process that sees it sees all.
    if not os.path.exists(f"{procfs.root}/2/status"):
        raise CannotKnow(
            f"{procfs.root} is mounted with hidepid and hides other users' processes: run as root with "
            f"CAP_SYS_PTRACE, or remount it with: mount -o remount,hidepid=0 {procfs.root}"
        )
    procfs.ns_pids(2)  # raises before Linux 4.1
