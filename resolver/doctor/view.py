"""View of the node from this process, on which every other check rests."""

import os
from collections.abc import Iterator
from pathlib import Path

from resolver.base.errors import CannotKnow, ResolverError
from resolver.base.text import several
from resolver.doctor.findings import Finding, failed, together, unknown, warning
from resolver.doctor.node import Node
from resolver.linux.cgroup_directories import cgroup_roots
from resolver.linux.host_view import require_host_view


def view(node: Node) -> Finding:
    """Check that every process of the node is visible from here, with its container."""
    try:
        require_host_view(node.procfs)
        hidden = []
    except CannotKnow as error:
        finding, _, fix = str(error).partition(": ")
        hidden = [failed(finding, "it cannot see each process of the node with its host PID", fix)]
    try:
        troubles = [*hidden, *_rights()]
        node.procfs.cgroup(1)  # a process's container is read from that file
        count = len(node.procfs.entries())
        roots = cgroup_roots(node.mounts)
    except (ResolverError, OSError) as error:
        fix = "run it as root, in the host's PID namespace, outside of a confining profile"
        return together("", hidden or [unknown(f"{node.procfs.root} cannot be read", str(error), fix)])
    kinds = {
        "v2" if mount.fs_type == "cgroup2" else "v1" for mount in node.mounts if mount.mount_point in roots
    }
    if not kinds:
        cause = "resolver lookup walks all of /proc to find a container, which takes longer"
        fix = "mount -t cgroup2 none /sys/fs/cgroup"
        troubles.append(warning("no cgroup hierarchy is mounted here", cause, fix))
    cgroups = " and ".join(sorted(kinds)) or "not mounted"
    return together(f"{several(count, 'process', 'processes')}, cgroups {cgroups}", troubles)


def _rights() -> Iterator[Finding]:
    """Yield the daemon's rights that this process lacks."""
    from resolver.linux.capabilities import held

    if Path("/proc/self/uid_map").read_text(encoding="ascii").split() != ["0", "0", "4294967295"]:
        yield failed(
            "a user namespace other than the host's",
            "capabilities count only within it: BPF, process events and other containers' processes are out of reach",
            "run it without one (Kubernetes: hostUsers: true; Docker: --userns=host; not rootless)",
        )
    if (user := os.geteuid()) != 0:
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
