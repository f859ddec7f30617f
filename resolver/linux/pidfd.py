"""Whether the process behind a descriptor still runs.

Shared by the daemon and the slot writer, so it imports next to nothing.
"""

from __future__ import annotations

import os
import select


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
