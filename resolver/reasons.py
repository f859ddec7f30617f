"""The words that every module shares: why something is not as it should be, or not known."""

from __future__ import annotations

from enum import StrEnum


class RepairReason(StrEnum):
    """Why a slot's ``hostpid`` is not the number that it must be."""

    MISSING = "missing"  # 0: nobody ever wrote it
    WRONG_NAMESPACE = "wrong_namespace"  # the right process, numbered in the wrong PID namespace
    DUPLICATE = "duplicate"  # another slot of this region holds the same number
    STALE = "stale"  # some other number: of an earlier process, or of a wrong guess


class UnresolvedReason(StrEnum):
    """Why nothing is said about a slot. Never shown as 0."""

    NO_SUCH_PROCESS = "no_such_process"  # no process of this container has that PID (dead or a lie)
    NOT_MAPPED = "not_mapped"  # a process has that PID but does not map this file
    UNPROVEN = "unproven"  # a process maps what looks like this file, and nothing proves that it is this one
    OTHER_CONTAINER = "other_container"  # the process with that PID is in another container
    OTHER_POD = "other_pod"  # a process of another pod has that PID, and uses a file that all pods can reach
    AMBIGUOUS = "ambiguous"  # several processes fit (nested PID namespaces)
    INVALID_PID = "invalid_pid"  # the slot's pid is 0 or negative while its status is not 0
    ACCESS_DENIED = "access_denied"  # /proc refused; CAP_SYS_PTRACE is missing
    TOO_LARGE = "too_large"  # maps or mountinfo longer than is read
    DRIVER_UNKNOWN = "driver_unknown"  # which PID namespace the samples use is not known
    CONFLICT = "conflict"  # another writer changes it back; backing off
    QUARANTINED = "quarantined"  # the writer died or hung on this file
    WRITE_FAILED = "write_failed"  # the slot moved or its owner ended before the write
    OVER_BUDGET = "over_budget"  # its container costs more than its share, so it is resolved later
    CHANGED = "changed"  # the slot changed while it was being resolved; retried in the next pass
    GONE = "gone"  # the process ended while it was checked


class RegionReason(StrEnum):
    """Why a file in a containers directory is skipped."""

    NOT_REGULAR = "not_regular"  # directory, FIFO, socket, device node
    SYMLINK = "symlink"
    NOT_ON_NODE = "not_on_node"  # its directory names a container that kubelet does not have here
    HARD_LINK = "hard_link"  # more than one link: the same inode may be anybody's
    OTHER_DEVICE = "other_device"  # a mount below the directory
    UNPROVEN = "unproven"  # nothing proves that what was opened is what is mapped
    UNKNOWN_SIZE = "unknown_size"
    UNKNOWN_VERSION = "unknown_version"
    NOT_INITIALIZED = "not_initialized"  # the magic number is not there (yet)
    BAD_HEADER = "bad_header"  # device or process count out of range, UUIDs that are not text
    TRUNCATED = "truncated"  # a read came back short
    TOO_MANY_ENTRIES = "too_many_entries"  # more directory entries than are read
    ACCESS_DENIED = "access_denied"
    GONE = "gone"
    IO_ERROR = "io_error"


class SampleReason(StrEnum):
    """Why a utilization sample finds no slot."""

    NOT_IN_CONTAINER = "not_in_container"
    NO_SHARED_REGION = "no_shared_region"  # a container without HAMi
    NO_SLOT = "no_slot"  # a container with HAMi, but no slot resolved to this process
    PROCESS_ENDED = "process_ended"
    PID_UNKNOWN = "pid_unknown"  # NVML gave 0, or a number no process has had


class PeerReason(StrEnum):
    """Why nothing is known of who connected to a socket."""

    ENDED = "ended"  # the process that connected is gone, though another may hold the connection
    NOT_VISIBLE = "not_visible"  # it has no PID in this process's PID namespace
    NOT_PROVEN = "not_proven"  # this kernel can't tell whether it is the process that has the number now
    ACCESS_DENIED = "access_denied"  # /proc refused


class BrokerRefusal(StrEnum):
    """Why a client of the broker got no number; counted as ``broker_refused_<reason>``."""

    INVALID = "invalid"  # no request of this protocol's
    POLICY_UNKNOWN = "policy_unknown"  # which number this driver's samples carry is not known
    ENDED = PeerReason.ENDED.value
    NOT_VISIBLE = PeerReason.NOT_VISIBLE.value
    NOT_PROVEN = PeerReason.NOT_PROVEN.value
    ACCESS_DENIED = PeerReason.ACCESS_DENIED.value
