"""A process's open files by their targets: descriptors are reused, and threads close theirs at their own time."""

import contextlib
import os
from pathlib import Path


def links(host_pid: int | str = "self") -> list[str]:
    """Return the target of each descriptor of a process."""
    found = list[str]()
    for number in os.listdir(f"/proc/{host_pid}/fd"):
        with contextlib.suppress(OSError):  # closed since
            found.append(os.readlink(f"/proc/{host_pid}/fd/{number}"))
    return found


def is_open(path: Path) -> bool:
    return bool({str(path), f"{path} (deleted)"} & set(links()))


def pidfds_of(pid: int) -> int:
    found = 0
    for number in os.listdir("/proc/self/fdinfo"):
        with contextlib.suppress(OSError):  # closed since
            found += f"\nPid:\t{pid}\n" in Path(f"/proc/self/fdinfo/{number}").read_text("ascii")
    return found
