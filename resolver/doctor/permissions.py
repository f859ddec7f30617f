"""What this process may do and see: user, capabilities, namespaces, hidepid."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from resolver.doctor.findings import Finding, failed, listed, ok, several, together, unknown, warning
from resolver.errors import CannotKnow, ProcessGone, ResolverError

if TYPE_CHECKING:
    from resolver.doctor.node import Node

_CAPABILITIES = {
    "SYS_PTRACE": "other processes' mount tables, memory maps and namespaces stay hidden, so no slot finds its owner",
    "BPF": "the kernel's map of processes cannot be made (source bpf)",
    "PERFMON": "the probes of the kernel's map cannot be attached (source bpf)",
    "NET_ADMIN": "before Linux 6.6 the kernel's process events take it (source netlink)",
    "DAC_OVERRIDE": "a cache file that a tenant's umask closed to others is not repaired (write_failed)",
}
#: Since this release anybody may listen to the proc connector (drivers/connector/cn_proc.c).
_FREE_CONNECTOR = (6, 6)


def root(node: Node) -> Finding:  # noqa: ARG001
    """Whether this is root, whose files HAMi's and the lock's are."""
    user = os.geteuid()
    if user == 0:
        return ok("user root")
    return failed(
        f"user {user}, not root",
        "the lock's directory, HAMi's directory and other users' processes are root's; what the checks below miss may "
        "only be hidden from this user",
        "sudo resolver doctor; and let the daemon be root (Kubernetes: securityContext.runAsUser: 0)",
    )


def capabilities(node: Node) -> Finding:
    """Whether the sources that are wanted, and the slot writer, have what they need."""
    from resolver.config import HostpidNamespace
    from resolver.linux.capabilities import TO_START, held
    from resolver.workers.driver_probe import RIGHTS

    have = held()
    if "SYS_ADMIN" in have:
        have |= {"BPF", "PERFMON"}  # the kernel takes it for either (include/linux/capability.h)
    version = node.version()
    needed = frozenset().union(*(TO_START[source] for source in node.sources))
    if version is not None and version >= _FREE_CONNECTOR:
        needed -= {"NET_ADMIN"}
    missing = [name for name in _CAPABILITIES if name not in have and name in needed | {"DAC_OVERRIDE"}]
    without_fall = len(node.sources) == 1
    troubles = []
    for name in missing:
        grave = name == "SYS_PTRACE" or (without_fall and name != "DAC_OVERRIDE")
        judge = failed if grave else warning
        fix = (
            f"give it CAP_{name} (Kubernetes: securityContext.capabilities.add: [{name}]; Docker: --cap-add {name}; "
            f"systemd: CapabilityBoundingSet), or run as root with all of them"
        )
        troubles.append(judge(f"CAP_{name} is missing", f"without CAP_{name} {_CAPABILITIES[name]}", fix))
    note = ""
    unmeasured = sorted(f"CAP_{name}" for name in RIGHTS - have)
    if unmeasured and node.settings.hostpid_namespace is HostpidNamespace.AUTO:
        note = f"; without {listed(unmeasured)} nothing is measured: the driver's version decides what hostpid must be"
    return together(f"all that {listed(node.sources)} may need{note}", troubles)


def system_calls(node: Node) -> Finding:
    """Whether the kernel refuses a running daemon the system calls that it does not need."""
    from resolver.linux.seccomp import MACHINES

    proc, holder = node.procfs.root, node.lock_holder
    if not os.path.exists(f"{proc}/sys/kernel/seccomp/actions_avail") or node.machine not in MACHINES:
        return warning(
            "no filters of system calls",
            "the kernel is without CONFIG_SECCOMP_FILTER, or this machine is neither x86-64 nor arm64: a daemon or a "
            "child that was taken over could make every system call that its rights allow",
            "nothing, or a kernel with CONFIG_SECCOMP_FILTER",
        )
    if holder is None:
        return ok("the kernel has filters, and no daemon runs")
    try:
        with open(f"{proc}/{holder}/status", encoding="ascii", errors="replace") as file:
            fields = dict(line.split(":\t", 1) for line in file if ":\t" in line)
    except OSError as error:
        return unknown(
            f"PID {holder}: {error.strerror}", "it ended just now, or is hidden", "run it again, as root"
        )
    if fields.get("Seccomp", "").strip() == "2":
        return ok(f"PID {holder} has a filter, which its children inherit")
    return warning(
        f"PID {holder} has no filter",
        "it is of a version without one, or a profile of its starter's forbids seccomp()",
        "restart it after an update; in a container, allow seccomp() in its seccomp profile",
    )


def pid_namespace(node: Node) -> Finding:
    """Whether host PIDs can be seen at all."""
    from resolver.linux.procfs import HOST_PIDNS

    try:
        inode = node.procfs.pidns("self")
    except (ResolverError, OSError) as error:
        return _no_proc(node, error)
    if inode == HOST_PIDNS:
        return ok("the host's")
    return failed(
        f"pid:[{inode}], not the host's pid:[{HOST_PIDNS}]",
        "in a PID namespace of its own it sees neither host PIDs nor other containers' processes",
        "run it on the host, or with hostPID: true (Kubernetes, in the pod's spec) or --pid=host (Docker)",
    )


def user_namespace(node: Node) -> Finding:
    """Whether capabilities count on the host."""
    try:
        with open(f"{node.procfs.root}/self/uid_map", encoding="ascii") as file:
            mapped = file.read().split()
    except OSError as error:
        return _no_proc(node, error)
    if mapped == ["0", "0", "4294967295"]:
        return ok("the host's")
    return failed(
        "a user namespace of its own",
        "capabilities count only within it: BPF, process events and other containers' processes are out of reach",
        "run it without one (Kubernetes: hostUsers: true; Docker: --userns=host; not rootless)",
    )


def hidepid(node: Node) -> Finding:
    """Whether ``/proc`` shows every process."""
    proc = node.procfs.root
    try:
        mounts = node.mounts
        option = ""
        for mount in mounts:
            if mount.fs_type == "proc" and mount.mount_point == proc:
                options = dict(part.partition("=")[::2] for part in mount.super_options.split(","))
                option = options.get("hidepid", "")
        node.procfs.require_all_processes(mounts)
        count = len(node.procfs.entries())
    except (ProcessGone, OSError) as error:
        return _no_proc(node, error)
    except CannotKnow:
        return failed(
            f"{proc} is mounted with hidepid={option}",
            "it hides other users' processes from a process without CAP_SYS_PTRACE: their slots find no owner",
            f"give it CAP_SYS_PTRACE, or: mount -o remount,hidepid=0 {proc}",
        )
    if option in ("", "0", "off"):
        return ok(f"off; {proc} shows {several(count, 'process', 'processes')}")
    return ok(f"hidepid={option}, which CAP_SYS_PTRACE or its group sees through")


def _no_proc(node: Node, error: Exception) -> Finding:
    proc = node.procfs.root
    if os.path.isdir(f"{proc}/self"):
        return unknown(
            f"{proc}/self cannot be read", str(error), "run it as root, outside of a confining profile"
        )
    return failed(
        f"{proc} is not a mounted proc file system",
        "without it nothing is known of any process",
        f"mount -t proc proc {proc}",
    )
