"""Record of each source of PIDs: its name, module, rights, and the meaning of its failure.

A new source is a module with ``open_source``, a record here, and a column in docs/how-it-works.md#where-pids-come-from.
"""

import re
from enum import StrEnum
from typing import NamedTuple

from resolver.base.reasons import ReasonWithWords


class SourceName(StrEnum):
    """Where PIDs come from. ``auto`` takes the best that works here."""

    AUTO = "auto"
    BPF = "bpf"
    NETLINK = "netlink"
    SCAN = "scan"


class SourceFailure(ReasonWithWords):
    """Why a source of PIDs does not work; most are words of `LoadError` in ``bpf/obstacles.py``."""

    PLACE = (
        "place",
        "the process is not in the host's PID and user namespace",
        "run it on the host, or with `hostPID: true` and `hostUsers: true` (Docker: `--pid=host --userns=host`)",
    )
    RIGHTS = (
        "rights",
        "capabilities are missing",
        "run it as root, or give it `CAP_BPF` and `CAP_PERFMON` (a pod: `capabilities.add: [BPF, PERFMON]`)",
    )
    SECCOMP = (
        "seccomp",
        "a seccomp filter forbids bpf()",
        "use `deploy/seccomp/resolver.json`, or the default profile of containerd 1.6.20 or Docker 23 and later",
    )
    MODULE = (
        "module",
        "a security module forbids BPF programs",
        "allow it in the profile; `journalctl -k | grep -iE 'apparmor|avc'` shows what was denied",
    )
    KERNEL = (
        "kernel",
        "the kernel is too old, or its architecture is not supported",
        "boot Linux 5.8 or later, or set `source = netlink` to skip the attempt",
    )
    LOCKDOWN = (
        "lockdown",
        "kernel lockdown in confidentiality mode keeps BPF programs from reading kernel memory",
        "boot with `lockdown=integrity` (Secure Boot allows that), or set `source = netlink`",
    )
    BTF = (
        "btf",
        "the kernel has no BTF, so the probes can't locate its fields",
        "boot a kernel with `CONFIG_DEBUG_INFO_BTF=y`; in a container: mount `/sys/kernel/btf` of the host",
    )
    BCC = (
        "bcc",
        "`/usr/bin/python3` has no bcc, the compiler of the probes",
        "`apt-get install python3-bpfcc` (Debian, Ubuntu) or `dnf install python3-bcc` (Fedora)",
    )
    VERIFIER = (
        "verifier",
        "the kernel's verifier refused the program",
        "report `resolver doctor --json --only bpf`; until then: `source = netlink`",
    )
    MEMORY = (
        "memory",
        "memory ran out while the probes were compiled",
        "raise the memory limit to 288Mi or more (`resources.limits.memory`, `MemoryMax`), or set `source = netlink`",
    )
    NETLINK = (
        "netlink",
        "the kernel reports no process events",
        "fix the cause that `resolver doctor` names; a kernel without `CONFIG_PROC_EVENTS` has none",
    )
    SCAN = "scan", "`/proc` can't be listed", "fix this first: everything else depends on it"
    OTHER = "other", "another error", "report the details of `resolver doctor --json --only bpf`"


class SourceRecord(NamedTuple):
    """Source of PIDs. ``open_source(procfs, room, run_dir)`` in ``module`` raises `CannotKnow`.

    Its children have the capabilities ``rights``, and ``at_first`` for the first start; ``early`` ones go before that.
    The daemon keeps `KEPT`, and ``keeps_before`` on kernels before a release. ``calls`` are dangerous system calls,
    ``failure`` the default reason.
    """

    name: SourceName
    module: str
    rights: frozenset[str]
    calls: frozenset[str]
    failure: SourceFailure
    at_first: frozenset[str] = frozenset()
    early: frozenset[str] = frozenset()
    keeps_before: tuple[tuple[int, int], frozenset[str]] = (0, 0), frozenset()

    def keeps(self, release: str) -> frozenset[str]:
        """Return the daemon's effective capabilities on a kernel of that release (``uname -r``)."""
        before, capabilities = self.keeps_before
        match = re.match(r"(\d+)\.(\d+)", release)
        return KEPT if match and tuple(map(int, match.groups())) >= before else KEPT | capabilities


#: Any source reads other processes' files in ``/proc``.
KEPT = frozenset({"SYS_PTRACE"})
#: Best first.
SOURCE_RECORDS: dict[str, SourceRecord] = {
    record.name.value: record
    for record in (
        SourceRecord(
            name=SourceName.BPF,
            module="resolver.pids.bpf",
            rights=KEPT | {"BPF", "PERFMON"},
            calls=frozenset({"bpf", "perf_event_open"}),
            failure=SourceFailure.OTHER,
            early=frozenset({"SYS_RESOURCE"}),  # to lift the limit on locked memory, before Linux 5.11
            # Until then a look-up takes CAP_BPF, where kernel.unprivileged_bpf_disabled is set.
            keeps_before=((5, 19), frozenset({"BPF"})),
        ),
        SourceRecord(
            name=SourceName.NETLINK,
            module="resolver.pids.netlink",
            rights=KEPT | {"NET_ADMIN"},
            calls=frozenset({"setns"}),
            failure=SourceFailure.NETLINK,
            at_first=frozenset({"SYS_ADMIN"}),  # to enter the host's network namespace, from another one
        ),
        SourceRecord(
            name=SourceName.SCAN,
            module="resolver.pids.scan",
            rights=KEPT,
            calls=frozenset(),
            failure=SourceFailure.SCAN,
        ),
    )
}


def steps(wanted: str) -> tuple[str, ...]:
    """Return the allowed sources, best first."""
    return tuple(SOURCE_RECORDS) if wanted == SourceName.AUTO else (str(wanted),)
