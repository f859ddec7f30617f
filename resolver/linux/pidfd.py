"""Processes held by a descriptor. Few imports, because the slot writer loads this module."""

from __future__ import annotations

import os
import select

TYPE_CHECKING = False  # typing would cost the slot writer more than this module
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

_PIDFD_GETFD = 438  # on x86-64 and arm64 alike


class HeldProcess:
    """Process held by pidfd, or before Linux 5.3 by its /proc directory: PID reuse does not change it."""

    __slots__ = ("fd", "is_pidfd")

    def __init__(self, fd: int, *, is_pidfd: bool) -> None:
        self.fd = fd
        self.is_pidfd = is_pidfd

    def alive(self) -> bool:
        """Check if the thread group still runs; if so, all that was read under its PID is its own."""
        return handle_alive(self.fd, is_pidfd=self.is_pidfd)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def fetch(host_pid: int, fds: Iterable[int]) -> list[int]:
    """Copy a child's descriptors (pidfd_getfd(2), Linux 5.6), without queueing them in a socket.

    Needs CAP_SYS_PTRACE, or all capabilities of the child. Raises OSError.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    taken: list[int] = []
    handle = os.pidfd_open(host_pid)
    try:
        for fd in fds:
            number = libc.syscall(_PIDFD_GETFD, handle, fd, 0)
            if number < 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), "pidfd_getfd")
            taken.append(number)
    except BaseException:
        for number in taken:
            os.close(number)
        raise
    finally:
        os.close(handle)
    return taken


def handle_alive(fd: int, *, is_pidfd: bool) -> bool:
    """Check if the process behind a pidfd or ``/proc/<pid>`` still runs; a zombie does not."""
    if is_pidfd:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return not poll.poll(0)
    try:
        stat_fd = os.open("stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=fd)
    except OSError:
        return False
    try:
        stat = os.read(stat_fd, 1024)
        if stat[stat.rindex(b")") + 2 : stat.rindex(b")") + 3] not in b"ZX":
            return True
        task_fd = os.open("task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
        try:
            return len(os.listdir(task_fd)) > 1
        finally:
            os.close(task_fd)
    except (OSError, ValueError):
        return False
    finally:
        os.close(stat_fd)
