"""A hostile program for inside a container: waits for a process by its name, and tries to get something out of it.

    spy.py reach NAME        every way into it, as one JSON object: way -> "reached", or the errno's name
    spy.py kill|stop NAME    SIGKILL or SIGSTOP to each that shows up, a line for each
    spy.py look NAME         what anybody may see: its status, its command line, what its network namespace has

It needs nothing but the standard library, and none of the project.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

LIBC = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH, PTRACE_SEIZE, PTRACE_DETACH = 16, 0x4206, 17
SYS_PIDFD_GETFD, SYS_KCMP = 438, 312
CLONE_NEWNS = 0x20000


class Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def named(name: str, seen: set[int]) -> Iterator[int]:
    """PIDs of processes with that name that were not given before, as they come; never ends."""
    while True:
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) not in seen:
                try:
                    with open(f"/proc/{entry}/comm", encoding="utf-8", errors="replace") as comm:
                        found = comm.read().strip() == name
                except OSError:
                    continue
                if found:
                    seen.add(int(entry))
                    yield int(entry)
        time.sleep(0.001)


def checked(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), "")


def read(path: str) -> None:
    with open(path, "rb") as file:
        file.read(4096)


def listed(path: str) -> None:
    os.listdir(path)


def memory(pid: int) -> None:
    os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY))


def vm_read(pid: int) -> None:
    buffer = ctypes.create_string_buffer(8)
    local = Iovec(ctypes.addressof(buffer), 8)
    remote = Iovec(ctypes.cast(LIBC.getpid, ctypes.c_void_p).value, 8)
    if LIBC.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) < 0:
        code = ctypes.get_errno()
        if code != errno.EFAULT:  # let in, at an address that it does not have
            raise OSError(code, "")


def trace(pid: int, how: int) -> None:
    checked(LIBC.ptrace(how, pid, None, None))
    if how == PTRACE_ATTACH:
        os.waitpid(pid, 0)
    LIBC.ptrace(PTRACE_DETACH, pid, None, None)


def take_descriptor(pid: int) -> None:
    fd = os.pidfd_open(pid)
    try:
        os.close(_checked_fd(LIBC.syscall(SYS_PIDFD_GETFD, fd, 0, 0)))
    finally:
        os.close(fd)


def _checked_fd(result: int) -> int:
    checked(result)
    return result


def enter_mounts(pid: int) -> None:
    fd = os.pidfd_open(pid)
    try:
        checked(LIBC.setns(fd, CLONE_NEWNS))
    finally:
        os.close(fd)


def ways(pid: int) -> dict[str, Callable[[], object]]:
    proc = f"/proc/{pid}"
    return {
        "root": lambda: listed(f"{proc}/root/"),
        "a file below root": lambda: read(f"{proc}/root/etc/passwd"),
        "cwd": lambda: listed(f"{proc}/cwd/"),
        "exe": lambda: read(f"{proc}/exe"),
        "environ": lambda: read(f"{proc}/environ"),
        "auxv": lambda: read(f"{proc}/auxv"),
        "maps": lambda: read(f"{proc}/maps"),
        "smaps": lambda: read(f"{proc}/smaps"),
        "map_files": lambda: listed(f"{proc}/map_files"),
        "mem": lambda: memory(pid),
        "fd": lambda: os.readlink(f"{proc}/fd/0"),
        "open fd": lambda: os.close(os.open(f"{proc}/fd/0", os.O_RDWR)),
        "fdinfo": lambda: read(f"{proc}/fdinfo/0"),
        "mountinfo": lambda: read(f"{proc}/mountinfo"),
        "mounts": lambda: read(f"{proc}/mounts"),
        "io": lambda: read(f"{proc}/io"),
        "ns/mnt": lambda: os.readlink(f"{proc}/ns/mnt"),
        "ns/net": lambda: os.close(os.open(f"{proc}/ns/net", os.O_RDONLY)),
        "root of a thread": lambda: listed(f"{proc}/task/{pid}/root/"),
        "process_vm_readv": lambda: vm_read(pid),
        "pidfd_getfd": lambda: take_descriptor(pid),
        "kcmp": lambda: checked(LIBC.syscall(SYS_KCMP, os.getpid(), pid, 1, 0, 0)),
        "setns": lambda: enter_mounts(pid),
        "ptrace attach": lambda: trace(pid, PTRACE_ATTACH),
        "ptrace seize": lambda: trace(pid, PTRACE_SEIZE),
    }


def reach(pid: int) -> dict[str, str]:
    found = {}
    for name, way in ways(pid).items():
        try:
            way()
            found[name] = "reached"
        except OSError as error:
            found[name] = errno.errorcode.get(error.errno or 0, str(error.errno))
    return found


def look(pid: int) -> dict[str, object]:
    with open(f"/proc/{pid}/status", encoding="utf-8") as status:
        fields = dict(line.rstrip("\n").split(":\t", 1) for line in status if ":\t" in line)
    with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
        words = cmdline.read().decode().split("\0")
    with open(f"/proc/{pid}/net/dev", encoding="ascii") as devices:
        interfaces = [line.split(":")[0].strip() for line in devices if ":" in line]
    with open(f"/proc/{pid}/mountinfo", encoding="utf-8") as table:
        mounts = [line.split()[4] for line in table]
    return {"status": fields, "cmdline": words, "interfaces": interfaces, "mounts": mounts}


def main() -> None:
    what, name = sys.argv[1:3]
    print("ready", flush=True)
    for pid in named(name, set()):
        if what in ("kill", "stop"):
            os.kill(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
            print(pid, flush=True)
            continue
        print(json.dumps(reach(pid) if what == "reach" else look(pid)), flush=True)


if __name__ == "__main__":
    main()
