"""Check if a process shown in a container's PID namespace is safe from the others there.

One that isn't dumpable is accessible (``__ptrace_may_access``) only with CAP_SYS_PTRACE in the initial user namespace,
by way of the bounding set. CAP_SYS_ADMIN can enter any namespace.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING

from resolver.base.errors import ProcessGone

if TYPE_CHECKING:
    from resolver.linux.procfs import Procfs

#: Inode of the initial user namespace (PROC_USER_INIT_INO in include/linux/proc_ns.h).
HOST_USERNS = 0xEFFFFFFD
#: By their numbers in include/uapi/linux/capability.h.
_DANGEROUS = {19: "CAP_SYS_PTRACE", 21: "CAP_SYS_ADMIN"}
#: Every set that a capability can be held in, or come back from.
_SETS = re.compile(rb"^Cap(?:Inh|Prm|Bnd|Amb):\t([0-9a-f]+)$", re.MULTILINE)
_TRIES = 5


def dangerous(status: bytes) -> str:
    """A thread's dangerous capability, if any."""
    sets = _SETS.findall(status)
    if len(sets) < 3:  # CapAmb came with 4.3
        raise ValueError("status has no capability lines")
    mask = 0
    for text in sets:
        mask |= int(text, 16)
    return next((name for number, name in _DANGEROUS.items() if mask >> number & 1), "")


def objection(procfs: Procfs, pidns: int) -> str:
    """Why no child may be shown in this PID namespace, directly below the host's; else empty.

    Threads that come and go could hide one, so two lists of all threads must be equal.
    """
    if procfs.userns("self") != HOST_USERNS:
        return "this daemon is in a separate user namespace, where the kernel's rules do not protect its children"
    before: set[str] | None = None
    for _ in range(_TRIES):
        threads = set[str]()
        try:
            for host_pid in _members(procfs, pidns):
                for thread in procfs.threads(host_pid):
                    name = dangerous(procfs.status_text(thread))
                    if name and procfs.userns(thread) == HOST_USERNS:
                        return f"one of its processes has, or may get, {name}"
                    threads.add(thread)
        except ProcessGone:
            before = None
            continue
        if threads == before:
            return "" if threads else "it has no processes any more"
        before = threads
    return "its processes come and go too fast to check all of them"


def _members(procfs: Procfs, pidns: int) -> list[int]:
    """Host PIDs in a PID namespace and below."""
    members = []
    for host_pid in procfs.entries():
        try:
            if len(procfs.ns_pids(host_pid)) > 1 and pidns in _chain(procfs, host_pid):
                members.append(host_pid)
        except ProcessGone:
            continue
    return members


def _chain(procfs: Procfs, host_pid: int) -> tuple[int, ...]:
    """A process's PID namespaces, by a thread if its leader has exited."""
    for thread in procfs.threads(host_pid):
        with suppress(ProcessGone):
            return procfs.pidns_chain(thread)
    raise ProcessGone(f"{procfs.root}/{host_pid}: the process ended")
