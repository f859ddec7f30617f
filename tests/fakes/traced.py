"""System calls of a thread, traced in the kernel: each by its name, what it is about, and its first Python stack."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from tests.fakes.loop_calls import unlisted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.fakes.warm import Process

_PROGRAM: Final = Path(__file__).with_name("bpf") / "calls.py"
#: By name: number on x86-64, number on arm64 (-1: none), and its subject: a path, a path relative to a descriptor, a
#: descriptor, or nothing shared.
_CALLS: Final[dict[str, tuple[int, int, str]]] = {
    "read": (0, 63, "fd"), "write": (1, 64, "fd"), "open": (2, -1, "path"), "close": (3, 57, "fd"),
    "stat": (4, -1, "path"), "fstat": (5, 80, "fd"), "lstat": (6, -1, "path"), "poll": (7, -1, ""),
    "lseek": (8, 62, "fd"), "mmap": (9, 222, ""), "mprotect": (10, 226, ""), "munmap": (11, 215, ""),
    "brk": (12, 214, ""), "mremap": (25, 216, ""), "rt_sigaction": (13, 134, ""), "rt_sigprocmask": (14, 135, ""),
    "rt_sigreturn": (15, 139, ""), "ioctl": (16, 29, "fd"), "pread64": (17, 67, "fd"), "pwrite64": (18, 68, "fd"),
    "madvise": (28, 233, ""), "dup": (32, 23, "fd"), "getpid": (39, 172, ""), "sendfile": (40, 71, "fd"),
    "socket": (41, 198, ""), "connect": (42, 203, "fd"), "accept": (43, 202, "fd"), "sendto": (44, 206, "fd"),
    "recvfrom": (45, 207, "fd"), "sendmsg": (46, 211, "fd"), "recvmsg": (47, 212, "fd"), "shutdown": (48, 210, "fd"),
    "bind": (49, 200, "fd"), "listen": (50, 201, "fd"), "getsockname": (51, 204, "fd"), "getpeername": (52, 205, "fd"),
    "socketpair": (53, 199, ""), "setsockopt": (54, 208, "fd"), "getsockopt": (55, 209, "fd"), "clone": (56, 220, ""),
    "vfork": (58, -1, ""), "exit": (60, 93, ""), "wait4": (61, 260, ""), "kill": (62, 129, ""), "fcntl": (72, 25, "fd"),
    "flock": (73, 32, "fd"), "fsync": (74, 82, "fd"), "ftruncate": (77, 46, "fd"), "getcwd": (79, 17, ""),
    "rename": (82, -1, "path"), "mkdir": (83, -1, "path"), "rmdir": (84, -1, "path"), "unlink": (87, -1, "path"),
    "readlink": (89, -1, "path"), "chmod": (90, -1, "path"), "chown": (92, -1, "path"), "umask": (95, 166, ""),
    "getrusage": (98, 165, ""), "getuid": (102, 174, ""), "getgid": (104, 176, ""), "geteuid": (107, 175, ""),
    "getppid": (110, 173, ""), "capget": (125, 90, ""), "capset": (126, 91, ""), "sigaltstack": (131, 132, ""),
    "statfs": (137, 43, "path"), "prctl": (157, 167, ""), "gettid": (186, 178, ""), "futex": (202, 98, ""),
    "epoll_create": (213, -1, ""), "getdents64": (217, 61, "fd"), "clock_gettime": (228, 113, ""),
    "clock_nanosleep": (230, 115, ""), "exit_group": (231, 94, ""), "epoll_wait": (232, -1, "fd"),
    "epoll_ctl": (233, 21, "fd"), "tgkill": (234, 131, ""), "waitid": (247, 95, ""),
    "inotify_init": (253, -1, ""), "inotify_add_watch": (254, 27, "fd+path"), "inotify_rm_watch": (255, 28, "fd"),
    "openat": (257, 56, "fd+path"), "mkdirat": (258, 34, "fd+path"), "newfstatat": (262, 79, "fd+path"),
    "unlinkat": (263, 35, "fd+path"), "renameat": (264, 38, "fd+path"), "readlinkat": (267, 78, "fd+path"),
    "fchmodat": (268, 53, "fd+path"), "faccessat": (269, 48, "fd+path"), "ppoll": (271, 73, ""),
    "set_robust_list": (273, 99, ""), "epoll_pwait": (281, 22, "fd"), "accept4": (288, 242, "fd"),
    "eventfd2": (290, 19, ""), "epoll_create1": (291, 20, ""), "pipe2": (293, 59, ""), "inotify_init1": (294, 26, ""),
    "preadv": (295, 69, "fd"), "prlimit64": (302, 261, ""), "getrandom": (318, 278, ""),
    "memfd_create": (319, 279, ""), "bpf": (321, 280, ""), "preadv2": (327, 286, "fd"), "statx": (332, 291, "fd+path"),
    "rseq": (334, 293, ""), "pidfd_send_signal": (424, 424, "fd"), "clone3": (435, 435, ""),
    "close_range": (436, 436, ""),
    "pidfd_open": (434, 434, ""), "pidfd_getfd": (438, 438, "fd"),
    "openat2": (437, 437, "fd+path"),
    "cachestat": (451, 451, "fd"), "faccessat2": (439, 439, "fd+path"), "epoll_pwait2": (441, 441, "fd"),
    "seccomp": (317, 277, ""),
}  # fmt: skip
_COLUMN: Final = {"x86_64": 0, "aarch64": 1}[platform.machine()]
_NAMES: Final = {numbers[_COLUMN]: name for name, numbers in _CALLS.items()}
_SYSTEMS: Final = {
    0x9FA0: "proc", 0x534F434B: "socket", 0x09041934: "anonymous", 0x50495045: "pipe", 0x50494446: "pidfd",
    0x62656572: "sysfs", 0x63677270: "cgroup", 0x27E0EB: "cgroup", 0x01021994: "tmpfs", 0xEF53: "ext4",
    0x794C7630: "overlay", 0x6E736673: "namespace", 0xCAFE4A11: "bpf",
}  # fmt: skip
_KINDS: Final = {
    0o140000: "socket",
    0o100000: "file",
    0o040000: "directory",
    0o020000: "device",
    0o010000: "pipe",
}


class Call(NamedTuple):
    """System call: its name, and what it is about, as ``file of ext4``, ``/proc/#/cgroup`` or ``stat in proc``."""

    name: str
    about: str


class Seen(NamedTuple):
    """How often a call was made, and which signal the first one caused (from 1 on; 0: none)."""

    times: int
    signal: int


def _call(number: int, magic: int, kind: int, path: str) -> Call:
    name = _NAMES.get(number, f"number {number}")
    about = re.sub("[0-9]+", "#", re.sub("[0-9a-f]{12,}", "ID", path))
    system = _SYSTEMS.get(magic, f"{magic:#x}" if magic else "")
    if system and path:
        about = f"{about} in {system}"
    elif system:
        about = f"{_KINDS.get(kind, 'object')} of {system}" if kind not in (0, 0o140000) else system
    return Call(name, about)


def _numbers(*names: str, kind: str | None = None) -> list[int]:
    chosen = [row[_COLUMN] for name, row in _CALLS.items() if name in names or row[2] == kind]
    return [number for number in chosen if isinstance(number, int) and number >= 0]


#: Numbers for the program. Signals are blocked around vfork.
_KINDS_OF_CALLS: Final = {
    "OF_PATH": _numbers(kind="path"),
    "OF_BOTH": _numbers(kind="fd+path"),
    "OF_DESCRIPTOR": _numbers(kind="fd"),
    "OF_WRITE": _numbers("write"),
    "UNCOUNTED": _numbers("rt_sigreturn"),
    "UNSIGNALLED": _numbers("rt_sigprocmask", "vfork", "clone", "clone3"),
}


class Tracer:
    """The program in the kernel; closed at its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            ["/usr/bin/python3", str(_PROGRAM), json.dumps(_KINDS_OF_CALLS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        self._answers, self._orders = self._process.stdout, self._process.stdin
        assert self._answers.readline() == "ready\n"

    def _ask(self, order: str) -> str:
        with self._lock:
            self._orders.write(order + "\n")
            self._orders.flush()
            return self._answers.readline()

    def watch(self, tid: int) -> None:
        self._ask(f"watch {tid}")

    def take(self, tid: int) -> dict[Call, Seen]:
        found: dict[Call, Seen] = {}
        for number, magic, kind, path, count, signal in json.loads(self._ask(f"take {tid}")):
            call = _call(number, magic, kind, path)
            before = found.get(call, Seen(0, signal))
            found[call] = Seen(before.times + count, before.signal)
        return found

    def unlisted(self, process: Process | subprocess.Popen[str], stacks: Sequence[str] = ()) -> list[str]:
        """Return calls of an ended process's main thread that `loop_calls` doesn't list, with their stacks if known."""
        seen, problems = self.take(process.pid), []
        stacks = stacks or getattr(process, "stacks", [])
        for call in unlisted(seen):
            at = seen[call].signal - 1
            stack = stacks[at] if 0 <= at < len(stacks) else " unknown"
            problems.append(
                f"the loop called {call.name} ({call.about}), {seen[call].times} times; its stack:{stack}"
            )
        return problems

    def close(self) -> None:
        self._orders.close()
        self._process.wait()
        self._answers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
