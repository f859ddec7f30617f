"""Processes that are held by a descriptor, and whether they still run.

Shared by the daemon and the slot writer, so it imports next to nothing.
"""

from __future__ import annotations

import os
import select

TYPE_CHECKING = False  # as of typing, which is not imported: it costs the slot writer more than all of this
if TYPE_CHECKING:
    from typing import Self


class HeldProcess:
    """A process that cannot turn into another one: a pidfd, or before Linux 5.3 its open /proc directory.

    Both stay bound to the very process when its PID is used again. Close it, or use ``with``.
    """

    __slots__ = ("fd", "is_pidfd")

    def __init__(self, fd: int, *, is_pidfd: bool) -> None:
        self.fd = fd
        self.is_pidfd = is_pidfd

    def alive(self) -> bool:
        """Whether the thread group still runs. Whatever was read under its PID before this was True is about it."""
        return handle_alive(self.fd, is_pidfd=self.is_pidfd)

    def close(self) -> None:
        """Give the descriptor back; may be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def handle_alive(fd: int, *, is_pidfd: bool) -> bool:
    """Whether the process behind a pidfd, or behind an open ``/proc/<pid>`` directory, still runs.

    A zombie leader with live threads does; an unreaped process does not.
    """
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
