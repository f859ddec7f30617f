"""System calls of a thread, traced in the kernel: the names, the objects, and the first Python stack of each."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tests.fakes.loop_calls import unlisted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.fakes.warm import Process

_PROGRAM: Final = Path(__file__).with_name("bpf") / "calls.py"
#: Of the compiler's headers. ``cachestat`` is newer than Debian 12's.
_DEFINED: Final[dict[str, str]] = dict(
    re.findall(
        r"^#define (__NR\w+) (\w+)$",
        subprocess.check_output(
            ["cc", "-dM", "-E", "-include", "sys/syscall.h", "-x", "c", os.devnull], text=True
        ),
        re.MULTILINE,
    )
)
_NUMBERS: Final = {
    "cachestat": 451,
    **{
        name.removeprefix("__NR_"): int(_DEFINED.get(value, value))
        for name, value in _DEFINED.items()
        if _DEFINED.get(value, value).isdigit()
    },
}
_NAMES: Final = {number: name for name, number in _NUMBERS.items()}
#: Calls about a path, a path relative to a descriptor, a descriptor.
_OF_PATH: Final = "open stat lstat rename mkdir rmdir unlink readlink chmod chown statfs"
_OF_BOTH: Final = (
    "inotify_add_watch openat openat2 mkdirat newfstatat unlinkat renameat readlinkat fchmodat faccessat faccessat2 "
    "statx"
)
_OF_DESCRIPTOR: Final = (
    "read write close fstat lseek ioctl pread64 pwrite64 dup sendfile connect accept accept4 sendto recvfrom sendmsg "
    "recvmsg shutdown bind listen getsockname getpeername setsockopt getsockopt fcntl flock fsync ftruncate getdents64 "
    "epoll_wait epoll_ctl epoll_pwait epoll_pwait2 inotify_rm_watch preadv preadv2 pidfd_send_signal pidfd_getfd "
    "cachestat"
)
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
    """System call: its name and object, such as ``file of ext4``, ``/proc/#/cgroup`` or ``stat in proc``."""

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


def _numbers(names: str) -> list[int]:
    return [_NUMBERS[name] for name in names.split() if name in _NUMBERS]


#: Numbers for the program. Signals are blocked around vfork.
_KINDS_OF_CALLS: Final = {
    "OF_PATH": _numbers(_OF_PATH),
    "OF_BOTH": _numbers(_OF_BOTH),
    "OF_DESCRIPTOR": _numbers(_OF_DESCRIPTOR),
    "OF_WRITE": _numbers("write"),
    "UNCOUNTED": _numbers("rt_sigreturn"),
    "UNSIGNALLED": _numbers("rt_sigprocmask vfork clone clone3"),
}


class Tracer(AbstractContextManager["Tracer"]):
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

    def __exit__(self, *_: object) -> None:
        self._orders.close()
        self._process.wait()
        self._answers.close()
