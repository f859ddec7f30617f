"""Table of reasons: causes of errors and unknowns, with meanings and fixes.

Commands, the daemon and the documents' tables read it. In Markdown, ``docs/NAME.md#part`` becomes a link; ``PATH``
stands for the file concerned.
"""

from enum import StrEnum
from typing import Self


class ReasonWithWords(StrEnum):
    """A word for programs, with its ``meaning`` and ``fix`` for people."""

    meaning: str
    fix: str

    def __new__(cls, word: str, meaning: str = "", fix: str = "nothing") -> Self:
        member = str.__new__(cls, word)
        member._value_ = word
        member.meaning = meaning
        member.fix = fix
        return member

    def for_terminal(self, path: str = "") -> tuple[str, str]:
        """Return meaning and fix without Markdown, about the file at ``path``."""
        return self.meaning.replace("`", ""), self.fix.replace("`", "").replace("PATH", path or "PATH")


class RepairReason(ReasonWithWords):
    """Why a slot's ``hostpid`` is wrong; the daemon writes the right one."""

    MISSING = "missing", "it is 0: HAMi's watcher finds no sample of its process and can't limit it"
    WRONG_NAMESPACE = "wrong_namespace", "it is the PID in a namespace that this driver's samples do not use"
    DUPLICATE = "duplicate", "another slot of this file has the same number: HAMi guessed wrongly"
    STALE = "stale", "it is the PID of an earlier process, or of one that started at the same moment"


class UnresolvedReason(ReasonWithWords):
    """Why a slot's owner is unknown, or its number can't be written. Never shown as 0."""

    NO_SUCH_PROCESS = (
        "no_such_process",
        "no process of its container has this PID. Once the kernel proves that, the slot counts as dead, at 0 %",
    )
    NOT_MAPPED = (
        "not_mapped",
        "a process has that PID but does not map this cache file",
        "nothing, if it just started. Otherwise the slot names a process that never used HAMi",
    )
    UNPROVEN = (
        "unproven",
        "a process maps a file that may be this one, but has no open descriptor that proves it",
        "restart the program: it has closed HAMi's file, or left the mount namespace in which it opened it",
    )
    OTHER_CONTAINER = (
        "other_container",
        "the process with that PID is in another container",
        "nothing; if two containers share one cache file, give each a separate one",
    )
    OTHER_POD = (
        "other_pod",
        "a process of another pod has this PID and uses this file, which every container can reach (KAI)",
        "check that pod's programs: docs/security.md#files-that-every-container-can-reach",
    )
    AMBIGUOUS = (
        "ambiguous",
        "several processes fit: in nested PID namespaces, or in containers that share the file",
        "`resolver lookup --pidns` distinguishes them (from Linux 4.9 on); nothing is written to the slot",
    )
    INVALID_PID = "invalid_pid", "the slot is in use, but its PID is below 1", "restart the container"
    ACCESS_DENIED = "access_denied", "the kernel refused a file in `/proc`", "grant `CAP_SYS_PTRACE`"
    TOO_LARGE = "too_large", "its map or mount table exceeds the read limit", "report the sizes in the log"
    DRIVER_UNKNOWN = (
        "driver_unknown",
        "the PID namespace of this driver's samples is unknown",
        "set `--hostpid-namespace`, after a measurement: docs/compatibility.md#measure-a-driver",
    )
    CONFLICT = "conflict", "another program changes `hostpid` back", "find that program"
    QUARANTINED = (
        "quarantined",
        "the slot writer died or hung on it",
        "check if its tenant truncates it, or its file system hangs",
    )
    WRITE_FAILED = "write_failed", "the slot moved or its owner ended first", "nothing; it is retried"
    NOT_WRITABLE = (
        "not_writable",
        "the containers directory is read-only for the daemon, so no slot in it can be repaired",
        "mount it writable for the daemon (Kubernetes: `readOnly: false`; systemd: `ReadWritePaths`) and restart it",
    )
    OVER_BUDGET = (
        "over_budget",
        "its container costs the daemon more than its share, so its slots wait",
        "find its many mappings, mounts or changes: docs/how-it-works.md#budget-of-a-container",
    )
    TOO_SLOW = (
        "too_slow",
        "its container blocks the kernel on a lock of its memory or files, so its slots wait",
        "find its endless calls: change memory protection, truncate files or remove directories",
    )
    CHANGED = "changed", "the slot changed while it was being read", "nothing; it is read again"
    GONE = "gone", "the process ended while it was being checked"

    @property
    def passing(self) -> bool:
        """Check if the problem resolves itself."""
        return self in ("changed", "gone", "write_failed")

    @property
    def of_writing(self) -> bool:
        """Check if only the write failed: the owner is known."""
        return self in ("conflict", "quarantined", "write_failed", "not_writable")


_HOSTILE = "HAMi never makes such a file, so a tenant did; it is never opened"
_LOOK_INSIDE = "check the programs in that container: `ls -lan PATH`"
KERNEL_LOG = "`dmesg | grep -iE 'nvrm|xid' | tail`"
#: A GPU of unified memory, such as GB10.
NO_MEMORY = (
    "no device memory of its own, so its Device object has no gpu-memory, and Koordinator can't schedule it"
)
_RETRIED = "fix the cause that `resolver status` names; it is retried"
_QUERY = f"`nvidia-smi -q -i INDEX`; {KERNEL_LOG}"


class RegionReason(ReasonWithWords):
    """Why a file in a containers directory is skipped."""

    NOT_REGULAR = "not_regular", f"it is not a regular file; {_HOSTILE}", _LOOK_INSIDE
    SYMLINK = "symlink", f"it is a symbolic link; {_HOSTILE}", _LOOK_INSIDE
    BAD_NAME = "bad_name", f"its name has unprintable characters; {_HOSTILE}", _LOOK_INSIDE
    NOT_ON_NODE = (
        "not_on_node",
        "its directory names a container that this node does not have: the pod is gone, or another pod made it",
        "mount `/var/log/containers`, if kubelet has such a container there; else remove `PATH`",
    )
    HARD_LINK = "hard_link", f"it has more than one name; {_HOSTILE}", _LOOK_INSIDE
    OTHER_DEVICE = (
        "other_device",
        "something else is mounted there, so it may not be the tenant's file",
        "find the mount, and unmount it: `findmnt --target PATH`",
    )
    UNPROVEN = (
        "unproven",
        "no process is proven to map this file (docs/node.md#proof-of-a-file); with KAI: its owner is not proven",
        "restart the container of `PATH`. With KAI, mount `/var/log/containers` (`--container-logs-dir`)",
    )
    UNKNOWN_SIZE = (
        "unknown_size",
        "no released layout has this size: it is from a newer HAMi, or not from HAMi. It is neither read nor written",
        "report HAMi's version, with `file_bytes` of `resolver slots --json PATH`",
    )
    UNKNOWN_VERSION = (
        "unknown_version",
        "its size is known, but not the version in its header: it is from a newer HAMi. It is neither read nor written",
        "report HAMi's version, with `resolver slots --json PATH`",
    )
    NOT_INITIALIZED = (
        "not_initialized",
        "HAMi has not written its magic number: it is just starting, or its start failed",
        "check again in a minute: `resolver slots PATH`; if it stays, restart the container",
    )
    BAD_HEADER = (
        "bad_header",
        "its counts are out of range, or its UUIDs aren't text: it is damaged or hostile",
        "restart the container, which makes a new file; keep this one: `cp --sparse=always PATH /var/tmp`",
    )
    TRUNCATED = "truncated", "it is shorter than its layout: damaged, or cut by a tenant", _LOOK_INSIDE
    TOO_MANY_ENTRIES = (
        "too_many_entries",
        "the directory has more entries than the daemon reads; HAMi's monitor refuses it, too",
        "find their source, and remove those that are not HAMi's: `ls -lan PATH`",
    )
    ACCESS_DENIED = (
        "access_denied",
        "the kernel refused to open it",
        "run as root; if this is root, a security module or a network file system refuses: `ls -lanZ PATH`",
    )
    GONE = "gone", "it disappeared between listing and opening", "nothing; check again: `ls PATH`"
    IO_ERROR = (
        "io_error",
        "a file system error or the descriptor limit prevented reading it",
        "`dmesg | tail; ulimit -n; cat PATH > /dev/null`",
    )

    OVERLOADED = (
        "overloaded",
        "the child that reads files did not answer in time, or is being restarted",
        "nothing; it is read again. If it stays: `uptime`, and the worker's line in `resolver status`",
    )

    @property
    def grave(self) -> bool:
        """Check if it may keep a working HAMi's file from being repaired."""
        return self in ("unknown_size", "unknown_version", "access_denied", "io_error")


class SampleReason(ReasonWithWords):
    """Why a utilization sample finds no slot."""

    NOT_IN_CONTAINER = "not_in_container", "a process of the host uses the GPU", "nothing: HAMi ignores it"
    NO_SHARED_REGION = (
        "no_shared_region",
        "a container without HAMi",
        "check that its pod asks for HAMi's resources, unless it has whole GPUs",
    )
    NOT_FOUND_YET = (
        "not_found_yet",
        "the daemon has known its container for less than 10 s, and found no cache file of it yet",
        "nothing",
    )
    NO_SLOT = (
        "no_slot",
        "a container with HAMi, but no slot belongs to this process",
        "nothing, if it just started; after 30 s `resolver usage` has the cause",
    )
    PROCESS_ENDED = "process_ended", "the process ended before its sample was read"
    PID_UNKNOWN = "pid_unknown", "the driver reported PID 0, or a process that ended before the daemon saw it"


class BypassReason(ReasonWithWords):
    """Why a process uses a GPU without a slot, read from ``/proc``."""

    NOT_MOUNTED = (
        "not_mounted",
        "HAMi's library is not mounted in its container",
        "let its pod ask for HAMi's resources; nothing, if it has whole GPUs",
    )
    CONTROL_DISABLED = (
        "control_disabled",
        "`CUDA_DISABLE_CONTROL=true` is set, so HAMi mounts no `/etc/ld.so.preload` and limits nothing, as requested",
        "nothing, if that is wanted; else remove the variable from the pod",
    )
    NOT_PRELOADED = (
        "not_preloaded",
        "its container has no `/etc/ld.so.preload`, and its `LD_PRELOAD` lacks HAMi's library (`env -i`, SSH)",
        "start it with the container's environment, or with a HAMi that mounts `/etc/ld.so.preload`",
    )
    PRELOAD_MISSING = (
        "preload_missing",
        "`/etc/ld.so.preload` names a library of HAMi's that is not in the container",
        "check that the library is on the node, under the hook path that HAMi's device plugin mounts; reinstall HAMi",
    )
    STATIC = "static", "it is a static program, into which nothing is preloaded", "link it dynamically"
    NOT_LOADED = (
        "not_loaded",
        "its container preloads HAMi's library, but this process has not loaded it: it may have another root directory",
        "start it in the container's own root directory",
    )
    OTHER_USER = (
        "other_user",
        "it has loaded HAMi's library, but runs as another user than its container's first process",
        "check that this user may write the cache file, whose mode the first user's umask decides",
    )
    LOADED = (
        "loaded",
        "it has loaded HAMi's library, which took no slot",
        "read HAMi-core's messages of the process's start",
    )
    UNREADABLE = (
        "unreadable",
        "the kernel refused or delayed the answer",
        "nothing: it is read again; grant `CAP_SYS_PTRACE` if that lasts",
    )


class PeerReason(ReasonWithWords):
    """Why the process that connected to a socket is unknown."""

    ENDED = "ended", "the process that connected is gone, though another may hold the connection"
    NOT_VISIBLE = "not_visible", "it has no PID in the daemon's PID namespace, which is not the host's"
    NOT_PROVEN = "not_proven", "this kernel can't prove its identity: the PID may have been reused"
    ACCESS_DENIED = "access_denied", "the kernel refused a file in `/proc`"


class BrokerRefusal(ReasonWithWords):
    """Why a client of the broker got no number; counted as ``broker_refused_<reason>``."""

    INVALID = "invalid", "the request is shorter than eight bytes, or not of version 1"
    POLICY_UNKNOWN = (
        "policy_unknown",
        "the PID namespace of this driver's samples is unknown (yet); see `driver_unknown` in docs/troubleshooting.md",
    )
    ENDED = PeerReason.ENDED.value, PeerReason.ENDED.meaning
    NOT_VISIBLE = PeerReason.NOT_VISIBLE.value, PeerReason.NOT_VISIBLE.meaning
    NOT_PROVEN = PeerReason.NOT_PROVEN.value, PeerReason.NOT_PROVEN.meaning
    ACCESS_DENIED = PeerReason.ACCESS_DENIED.value, PeerReason.ACCESS_DENIED.meaning


class GpuReason(ReasonWithWords):
    """Why a GPU is unhealthy, the gravest first."""

    LOST = "lost", "it fell off the bus, or its firmware hangs", f"{KERNEL_LOG}; power-cycle the node"
    RESET_REQUIRED = (
        "reset_required",
        "it does no work until it is reset",
        "stop its processes, then: `nvidia-smi --gpu-reset -i INDEX`; or reboot the drained node",
    )
    UNREACHABLE = "unreachable", "the driver refuses to open it", _QUERY
    MEMORY_QUERY_FAILED = "memory_query_failed", "the driver does not report its memory", _QUERY
    TOO_HOT = (
        "too_hot",
        "it was over 95 C, and has not been below 90 C since",
        "check fans, air flow and power limit: `nvidia-smi -q -d TEMPERATURE,POWER -i INDEX`",
    )
    ECC_UNCORRECTED = (
        "ecc_uncorrected",
        "its memory has had uncorrectable errors since the driver was loaded",
        f"`nvidia-smi -q -d ECC -i INDEX`; {KERNEL_LOG}; reset it, and replace it if they recur",
    )
    XID = (
        "xid",
        "the driver reported an error that requires a reset, and it has not been reset since",
        f"{KERNEL_LOG}; drain the node, then: `nvidia-smi --gpu-reset -i INDEX`",
    )


#: NVML's error before its first answer, which is no failure.
STARTING = "NVML is starting"


class DriverError(ReasonWithWords):
    """An error of the driver's library, by NVML's name of it."""

    LIBRARY_NOT_FOUND = (
        "LibraryNotFound",
        "libnvidia-ml.so.1 is not found: no driver, or not mounted into this container",
        (
            "install the driver, if `ldconfig -p | grep libnvidia-ml` prints nothing on the host; in a container: "
            "`runtimeClassName: nvidia` with `NVIDIA_VISIBLE_DEVICES=all`, or mount it and set `LD_LIBRARY_PATH`"
        ),
    )
    DRIVER_NOT_LOADED = (
        "DriverNotLoaded",
        "the library is installed, but the kernel module is not loaded, or its device nodes are missing",
        f"`modprobe nvidia && nvidia-modprobe -u -c 0; ls -l /dev/nvidia*`; {KERNEL_LOG}",
    )
    LIB_RM_VERSION_MISMATCH = (
        "LibRmVersionMismatch",
        "the driver was upgraded while the old kernel module stayed loaded",
        "`cat /proc/driver/nvidia/version`; drain the node, then reboot it",
    )
    NO_PERMISSION = (
        "NoPermission",
        "the driver refuses this user",
        "run it as root; in a container: allow the devices `/dev/nvidiactl` and `/dev/nvidia0` (device cgroup)",
    )
    GPU_IS_LOST = "GpuIsLost", "a GPU has fallen off the bus", GpuReason.LOST.fix
    RESET_REQUIRED = "ResetRequired", "a GPU needs a reset before it answers", GpuReason.RESET_REQUIRED.fix
    UNKNOWN = (
        "Unknown",
        "this pod lost its devices, as after `systemctl daemon-reload`: that says nothing about the GPUs",
        "restart the pod; on the host, `nvidia-smi` shows whether the GPUs answer",
    )
    FUNCTION_NOT_FOUND = "FunctionNotFound", "the driver is too old for HAMi", "upgrade the driver"
    HANGS = (
        "hangs",
        "a call into the driver hangs; the worker that made it was killed, and utilization is unknown",
        f"check if `nvidia-smi` hangs, too; {KERNEL_LOG}; `systemctl restart nvidia-persistenced`, or reboot",
    )
    OTHER = "other", "NVML answers with an error", f"compare with `nvidia-smi`; {KERNEL_LOG}"

    @classmethod
    def named_in(cls, text: str) -> Self:
        """Return the error that a message names in parentheses, or `HANGS`."""
        for error in cls:
            if f"({error})" in text:
                return error
        return cls.HANGS if "did not answer within" in text else cls.OTHER


class TroubleReason(ReasonWithWords):
    """Problem of a running daemon, gravest first; a logged reason has its event's name."""

    STALLED = (
        "stalled",
        "its passes have stopped",
        "`cat /proc/PID/stack`; `uptime`; check for a file system that hangs, then restart the daemon",
    )
    NOT_READY = "not_ready", "not ready", "`resolver doctor --only SOURCE`"
    API_OFF = "api_off", "it does not answer on one of its sockets", _RETRIED
    METRICS_OFF = (
        "metrics_off",
        "it serves no metrics",
        "`ss -ltnp` shows the process with the port: stop it, or change `--metrics-addr`; it is retried",
    )
    METRICS_FILES_REFUSED = (
        "metrics_files_refused",
        "new files for the metrics' TLS or token can't be used; the old ones stay",
        "fix the file that `resolver status` names; it is read again",
    )
    BROKER_OFF = "broker_off", "the broker does not answer", _RETRIED
    NVML_UNAVAILABLE = "nvml_unavailable", "NVML is unavailable", "`resolver doctor --only nvml`"
    OUT_OF_DESCRIPTORS = (
        "out_of_descriptors",
        "it ran out of descriptors",
        "raise the limit (`LimitNOFILE` of its unit, or of the container runtime's), and restart it",
    )
    OUT_OF_MEANS = "out_of_means", "it lacks resources", "docs/monitoring.md#resolvershortofmeans"
    SOURCE_INCOMPLETE = "source_incomplete", "its map is incomplete", "set `map_size` to 0, or higher"
    CONTAINERS_DIR_MISSING = (
        "containers_dir_missing",
        "a directory of cache files is missing",
        "`resolver doctor --only containers_dir`",
    )
    FILES_SKIPPED = (
        "files_skipped",
        "skipped cache files may belong to a working HAMi",
        "`resolver doctor --only regions`",
    )
    NOT_WATCHED = (
        "not_watched",
        "cache files are only checked periodically, so a new process is found later",
        "`sysctl -w fs.inotify.max_user_instances=1024 fs.inotify.max_user_watches=524288`; for good: `/etc/sysctl.d`",
    )
    DRY_RUN = "dry_run", "it is a dry run", "start it without `--dry-run`"
    SLOTS_UNRESOLVED = (
        "slots_unresolved",
        "slots are unresolved",
        "`resolver explain`; docs/troubleshooting.md has the meaning of each reason",
    )
    OVER_BUDGET = (
        "over_budget",
        "containers went over their budget, so their slots wait",
        "`resolver top` shows their slots; docs/how-it-works.md#budget-of-a-container has the share",
    )
    NO_SYSTEM_CALL_FILTER = (
        "no_system_call_filter",
        "the kernel does not filter its system calls",
        "allow seccomp() in the profile of its container, or use a kernel with `CONFIG_SECCOMP_FILTER`",
    )
    INTERNAL_ERRORS = "internal_errors", "it survived internal errors", "report the tracebacks in its log"

    @property
    def grave(self) -> bool:
        """Check if the daemon leaves work undone because of it."""
        slight = ("source_incomplete", "not_watched", "dry_run", "slots_unresolved", "over_budget")
        return self not in (*slight, "no_system_call_filter", "internal_errors")
