"""What each fixed reason means and what to do about it: for ``resolver explain``, and the tables in the documents.

In Markdown, without links: ``docs/NAME.md#part`` becomes one in the documents' tables.
"""

from __future__ import annotations

from typing import NamedTuple

from resolver.reasons import RepairReason, SampleReason, UnresolvedReason


class Words(NamedTuple):
    """What happened, and what to do."""

    cause: str
    fix: str


REPAIR = {
    RepairReason.MISSING: "nobody wrote the number of its process: HAMi's watcher finds no sample of it, and its core "
    "limit has no effect",
    RepairReason.WRONG_NAMESPACE: "it is the right process's number, but of the other PID namespace than this driver's "
    "samples carry, so HAMi's watcher finds no sample of it",
    RepairReason.DUPLICATE: "another slot of this file holds the same number, so HAMi's guess took a neighbour's",
    RepairReason.STALE: "it is the number of an earlier process, or of a stranger's that started in the same moment",
}

UNRESOLVED = {
    UnresolvedReason.NO_SUCH_PROCESS: Words(
        "no process of that container has this PID. It counts as dead, and its utilization is set to 0, once the "
        "kernel says so: the container's PID namespace is known (from another slot's owner or the container's first "
        "process), and the number is not in it",
        "nothing",
    ),
    UnresolvedReason.NOT_MAPPED: Words(
        "a process has that PID but does not map this cache file",
        "nothing, if it just started. Otherwise the slot names a process that never used HAMi",
    ),
    UnresolvedReason.UNPROVEN: Words(
        "a process maps what looks like this file, and has no descriptor of it that proves which file it is",
        "with `--mapped-regions`, and with KAI: the program has closed HAMi's file, or left the mount namespace in "
        "which it opened it: restart it. With KAI also: kubelet has no log of its container: `resolver doctor` says so",
    ),
    UnresolvedReason.OTHER_CONTAINER: Words(
        "the process with that PID is in another container",
        "nothing; if two containers share one cache file, give each its own",
    ),
    UnresolvedReason.OTHER_POD: Words(
        "a process of another pod has this PID and uses this file, which every container can reach (KAI)",
        "nothing is written to the slot; check what that pod runs: "
        "docs/security.md#files-that-every-container-can-reach",
    ),
    UnresolvedReason.AMBIGUOUS: Words(
        "several processes fit: in nested PID namespaces, or in containers that share the file",
        "`resolver lookup --pidns` distinguishes them; nothing is written to the slot",
    ),
    UnresolvedReason.INVALID_PID: Words(
        "the slot is in use, yet its PID is 0 or negative",
        "the file is damaged or hostile; restart the container",
    ),
    UnresolvedReason.ACCESS_DENIED: Words(
        "the kernel refused a file in `/proc`", "grant `CAP_SYS_PTRACE`, or run as root"
    ),
    UnresolvedReason.TOO_LARGE: Words(
        "the process's map or mount table is longer than is read",
        "report it, with the numbers from the log",
    ),
    UnresolvedReason.DRIVER_UNKNOWN: Words(
        "it is not known which PIDs this driver's samples carry",
        "add `SYS_ADMIN`, so that it is measured, or `--hostpid-namespace host` or `container`, if you know; see "
        "docs/how-it-works.md",
    ),
    UnresolvedReason.CONFLICT: Words(
        "another program changes `hostpid` back", "find the other writer; `resolver` backs off"
    ),
    UnresolvedReason.QUARANTINED: Words(
        "the slot writer died or hung on this file",
        "it is retried, at growing intervals; look for a tenant that truncates its file",
    ),
    UnresolvedReason.WRITE_FAILED: Words(
        "the slot moved or its owner ended before the write", "nothing; it is retried"
    ),
    UnresolvedReason.OVER_BUDGET: Words(
        "its container costs the daemon more than its share of CPU, so its slots wait",
        "check what runs there: very many mappings or mounts, slots that change all the time; "
        "docs/limits.md#what-one-container-may-cost has the share",
    ),
    UnresolvedReason.CHANGED: Words("the slot changed while it was being read", "nothing; it is read again"),
    UnresolvedReason.GONE: Words("the process ended while it was being checked", "nothing"),
}

SAMPLE = {
    SampleReason.NOT_IN_CONTAINER: Words(
        "a process on the host itself uses the GPU", "nothing: HAMi counts containers only"
    ),
    SampleReason.NO_SHARED_REGION: Words(
        "a container without HAMi",
        "look whether the pod asks for HAMi's resources, and whether its library is loaded: "
        "`grep libvgpu /proc/HOST_PID/maps`",
    ),
    SampleReason.NO_SLOT: Words(
        "a container with HAMi, but no slot is resolved to this process",
        "nothing, if it just started; otherwise HAMi's library isn't loaded in it (a static program, or one without "
        "`LD_PRELOAD`), or its slot is one of those that are unresolved",
    ),
    SampleReason.PROCESS_ENDED: Words("the process ended before its sample was read", "nothing"),
    SampleReason.PID_UNKNOWN: Words("the driver gave 0, or a number that no process has had", "nothing"),
}

#: They pass by themselves.
PASSING = frozenset((UnresolvedReason.CHANGED, UnresolvedReason.GONE, UnresolvedReason.WRITE_FAILED))
#: About what is written, not about whose the slot is.
OF_WRITING = frozenset(
    (UnresolvedReason.CONFLICT, UnresolvedReason.QUARANTINED, UnresolvedReason.WRITE_FAILED)
)


def plain(markdown: str) -> str:
    """For a terminal."""
    return markdown.replace("`", "")
