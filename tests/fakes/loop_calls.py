"""The system calls that the daemon's loop may make, each with its reason; ``tests.fakes.traced`` sees any other.

Nothing here waits for a tenant: what a tenant can make wait is a lane's (``docs/security.md``), and the last reference
to something of a tenant's is dropped in a thread.
"""

import re
from collections.abc import Iterable
from typing import Final, NamedTuple, TypeVar

_Call = TypeVar("_Call", bound=tuple[str, str])


class Allowed(NamedTuple):
    """Calls that the loop may make, by name and pattern of their objects, and the reason."""

    names: str
    about: str
    reason: str


_DISK: Final = r"(file|directory|device) of (?!proc|namespace|cgroup|pidfd)\S+"
#: Not below a tenant's directory, nor a process's.
_ROOTS: Final = r"(?!/proc/)(?!.*/containers/.)(?!.*\.cache).*"

LOOP_CALLS: Final = (
    Allowed("epoll_wait epoll_ctl epoll_create1", "anonymous|", "the loop's own waiting"),
    Allowed("poll ppoll", "", "with a time limit of 0: is a process alive, has a client gone?"),
    Allowed("clock_gettime clock_nanosleep getrusage getrandom", "", "the loop's own clocks and numbers"),
    Allowed(
        "getpid gettid geteuid getuid prctl sigaltstack set_robust_list rseq", "", "about the daemon itself"
    ),
    Allowed(
        "rt_sigaction rt_sigprocmask rt_sigreturn futex tgkill", "", "signals and locks of its own threads"
    ),
    Allowed("mmap munmap mremap mprotect brk madvise", "", "its own memory; no tenant's file is mapped here"),
    Allowed("clone3 clone vfork wait4 waitid kill", "", "its threads and children; wait4 with WNOHANG"),
    Allowed("pidfd_send_signal", "pidfd", "its children"),
    Allowed("socketpair pipe2 eventfd2 memfd_create dup fcntl prlimit64", ".*", "descriptors of its own"),
    Allowed("exit exit_group", "", "its end"),
    Allowed("capset capget seccomp", "", "rights that it gives up"),
    Allowed("bpf", "", "look-ups in the kernel's map: one element, or a bounded batch"),
    Allowed(
        "socket bind listen setsockopt rename unlink chmod chown umask", ".*", "sockets in root's directories"
    ),
    Allowed(
        "accept4 shutdown connect getsockname getpeername getsockopt",
        "socket",
        "its sockets, which don't block",
    ),
    Allowed(
        "recvfrom recvmsg",
        "socket",
        "its sockets, which don't block; a client that passes descriptors is refused unread",
    ),
    Allowed("sendto sendmsg write", "socket", "its sockets, which don't block"),
    Allowed("close", "socket", "its own ends: a client's is closed in a thread"),
    Allowed(
        "read write close",
        "pipe of pipe|anonymous",
        "its children's pipes, inotify's queue, timers, BPF descriptors",
    ),
    Allowed("ioctl", "socket|pipe of pipe|anonymous|file of pidfd", "O_NONBLOCK of its own descriptors"),
    Allowed(
        "inotify_add_watch", r"/proc/self/fd/#", "a descriptor that a lane has opened: takes spin locks only"
    ),
    Allowed("inotify_init1", "", "its queue"),
    Allowed("pidfd_open", "", "0.2 ms at most under every attack"),
    Allowed("pidfd_getfd", ".*", "takes what a lane has opened, without opening it"),
    Allowed("close", "file of pidfd", "holds a process's number, nothing of the process"),
    Allowed(
        "openat",
        r"/proc/self/.*|/proc|/proc/stat|/proc/sys/vm/overcommit_memory|/proc/#/(stat|schedstat)|/dev/null",
        "its own files, its children's, and the setting that malloc reads before it gives memory back",
    ),
    Allowed(
        "openat openat2",
        "/proc/#|(task|#|ns) in proc",
        "a process's directory, one that is cached and valid: drops nothing below (`Procfs`)",
    ),
    Allowed(
        "openat readlink readlinkat newfstatat",
        r"(cgroup|comm|stat|exe|pid|mnt|user|\.) in proc|/proc/self/ns/\w+",
        "below such a directory; 0.2 ms at most under every attack",
    ),
    Allowed(
        "read lseek close newfstatat ioctl getdents64",
        "(file|directory) of proc|file of namespace",
        "files as above, cut at 4 KiB or by the kernel",
    ),
    Allowed(
        "newfstatat openat readlink mkdir",
        _ROOTS,
        "root's files and directories: modules, settings, the run directory",
    ),
    Allowed(
        "read lseek close newfstatat ioctl getdents64 ftruncate pread64 pwrite64",
        _DISK,
        "modules, settings and root's directories; a tenant's file that a lane has opened is asked for its size",
    ),
    Allowed(
        "preadv2",
        _DISK,
        "a region's pages if cached (RWF_NOWAIT), checked before where the kernel can (cachestat)",
    ),
    Allowed("cachestat", _DISK, "cachestat: are pages cached? Takes no lock"),
)


def unlisted(calls: Iterable[_Call]) -> list[_Call]:
    """Return the calls, by name and object, that no line allows."""
    return [
        call
        for call in calls
        if not any(call[0] in line.names.split() and re.fullmatch(line.about, call[1]) for line in LOOP_CALLS)
    ]
