"""How the kernel numbers a task: one PID per PID namespace that it is visible in."""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

NS_GET_PARENT: Final = 0xB702


@dataclass(frozen=True, slots=True)
class Chain:
    """One task's numbers, outermost PID namespace first: (inode of the namespace, PID in it)."""

    levels: tuple[tuple[int, int], ...]

    @property
    def host_pid(self) -> int:
        return self.levels[0][1]

    @property
    def pidns(self) -> int:
        return self.levels[-1][0]

    @property
    def ns_pid(self) -> int:
        return self.levels[-1][1]


def read_chain(tid: int) -> Chain:
    """The chain of a process or thread, from `NSpid:` and the parents of its PID namespace.

    Raises OSError when the task is gone.
    """
    for line in Path(f"/proc/{tid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            numbers = [int(word) for word in line.split()[1:]]
            break
    else:
        raise OSError(f"/proc/{tid}/status has no NSpid line: the kernel is older than 4.1")
    inodes: list[int] = []
    fd = os.open(f"/proc/{tid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        while len(inodes) < len(numbers):
            inodes.append(os.fstat(fd).st_ino)
            if len(inodes) < len(numbers):
                parent = fcntl.ioctl(fd, NS_GET_PARENT)
                os.close(fd)
                fd = parent
    finally:
        os.close(fd)
    return Chain(tuple(zip(reversed(inodes), numbers, strict=True)))
