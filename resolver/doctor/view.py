"""View of the node from this process, on which every other check rests."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from resolver.base.errors import CannotKnow, ResolverError
from resolver.base.text import several
from resolver.doctor.findings import Finding, failed, together, unknown, warning
from resolver.linux.cgroup_directories import cgroup_roots
from resolver.linux.host_view import require_all_processes
from resolver.linux.procfs import HOST_PIDNS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resolver.doctor.node import Node


def view(node: Node) -> Finding:
    """Check that every process of the node is visible from here, with its container."""
    proc = node.procfs.root
    try:
        troubles = [*_namespaces(node), *_rights(node)]
        node.procfs.cgroup(1)  # a process's container is read from that file
        count = len(node.procfs.entries())
        roots = cgroup_roots(node.mounts)
    except (ResolverError, OSError) as error:
        if os.path.isdir(f"{proc}/self"):
            fix = "run it as root, in the host's PID namespace, outside of a confining profile"
            return unknown(f"{proc} cannot be read", str(error), fix)
        cause = "without it nothing is known of any process"
        return failed(f"{proc} is not a mounted proc file system", cause, f"mount -t proc proc {proc}")
    mounts = [mount for mount in node.mounts if mount.mount_point in roots]
    kinds = {"v2" if mount.fs_type == "cgroup2" else "v1" for mount in mounts}
    if not kinds:
        cause = "resolver lookup walks all of /proc to find a container, which takes longer"
        fix = "mount -t cgroup2 none /sys/fs/cgroup"
        troubles.append(warning("no cgroup hierarchy is mounted here", cause, fix))
    cgroups = " and ".join(sorted(kinds)) or "not mounted"
    found = f"{several(count, 'process', 'processes')}, cgroups {cgroups}"
    return together(found, troubles)


def _namespaces(node: Node) -> Iterator[Finding]:
    """Yield namespaces that aren't the host's."""
    proc = node.procfs.root
    pidns = node.procfs.pidns("self")
    if pidns != HOST_PIDNS:
        yield failed(
            f"pid:[{pidns}], not the host's pid:[{HOST_PIDNS}]",
            "in a PID namespace of its own it sees neither host PIDs nor other containers' processes",
            "run it on the host, or with hostPID: true (Kubernetes, in the pod's spec) or --pid=host (Docker)",
        )
    with open(f"{proc}/self/uid_map", encoding="ascii") as file:
        initial = file.read().split() == ["0", "0", "4294967295"]
    if not initial:
        yield failed(
            "a user namespace of its own",
            "capabilities count only within it: BPF, process events and other containers' processes are out of reach",
            "run it without one (Kubernetes: hostUsers: true; Docker: --userns=host; not rootless)",
        )


def _rights(node: Node) -> Iterator[Finding]:
    from resolver.linux.capabilities import held

    user = os.geteuid()
    if user != 0:
        yield failed(
            f"user {user}, not root",
            "the lock's directory, HAMi's directory and other users' processes are root's; what the checks below miss "
            "may only be hidden from this user",
            "sudo resolver doctor; and let the daemon be root (Kubernetes: securityContext.runAsUser: 0)",
        )
    if "SYS_PTRACE" not in held():
        yield failed(
            "CAP_SYS_PTRACE is missing",
            "other processes' mount tables, memory maps and namespaces stay hidden, so no slot finds its owner",
            "give it CAP_SYS_PTRACE (Kubernetes: securityContext.capabilities.add: [SYS_PTRACE]; Docker: --cap-add "
            "SYS_PTRACE; systemd: CapabilityBoundingSet), or run as root with all of them",
        )
    try:
        require_all_processes(node.procfs, node.mounts)
    except CannotKnow as error:
        yield failed(
            f"{node.procfs.root} hides other users' processes (hidepid)",
            str(error),
            f"give it CAP_SYS_PTRACE, or mount -o remount,hidepid=0 {node.procfs.root}",
        )
