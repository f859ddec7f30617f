"""The real daemon with its event loop watched: how long it takes in one go before it gives way.

The daemon runs unchanged, under this file as its launcher: the selector of its loop is replaced by one that reads two
clocks before and after each wait. So a stretch is all that runs between two looks for news: in the thread's own CPU
time, in which neither waiting nor a busy machine counts, and by the wall but for waits for a CPU, where the kernel may
have waited for a tenant. The figures are in a file mapped by both sides, to be read while the loop stands still.

    python tests/bench/loop_clock.py FIGURES PYTHON -m resolver run ...
"""

import faulthandler
import mmap
import os
import runpy
import selectors
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Final

#: Nanoseconds of the longest stretch, and the thread's clock at the beginning of the present one, 0 while it waits; the
#: same by the clock on the wall.
LONGEST, BEGAN, LONGEST_WALL, BEGAN_WALL = range(0, 32, 8)
_WORD: Final = struct.Struct("=Q")


class _Watching(selectors.DefaultSelector):
    """Reads the clock at both ends of a wait. ``figures`` is the mapped file."""

    figures: mmap.mmap

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        figures, began = self.figures, get(self.figures, BEGAN)
        if began:
            taken = time.thread_time_ns() - began
            if taken > get(figures, LONGEST):
                set_to(figures, LONGEST, taken)
            wall = awake() - get(figures, BEGAN_WALL)
            if wall > get(figures, LONGEST_WALL):
                set_to(figures, LONGEST_WALL, wall)
            set_to(figures, BEGAN, 0)
        found = super().select(timeout)
        set_to(figures, BEGAN_WALL, awake())
        set_to(figures, BEGAN, time.thread_time_ns())
        return found


def awake(host_pid: int | str = "self") -> int:
    """The clock on the wall, in nanoseconds, without the time for which a thread was ready and waited for a CPU."""
    with open(f"/proc/{host_pid}/schedstat", "rb", buffering=0) as file:
        return time.monotonic_ns() - int(file.read(64).split()[1])


def stacks_of(host_pid: int) -> Path:
    """File with the stack of each new call, for `tests.fakes.traced`; in memory, where it counts no writes."""
    return Path(f"/dev/shm/stacks-{host_pid}")  # noqa: S108 - root's


def get(figures: mmap.mmap, at: int) -> int:
    return int(_WORD.unpack_from(figures, at)[0])


def set_to(figures: mmap.mmap, at: int, value: int) -> None:
    _WORD.pack_into(figures, at, value)


def mapped(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 4096)


def main() -> None:
    _Watching.figures = mapped(Path(sys.argv[1]))
    selectors.DefaultSelector = _Watching  # type: ignore[misc]
    sys.path[0] = os.getcwd()  # as `python -m` does it
    module, sys.argv = sys.argv[4], sys.argv[4:]
    stacks = os.open(
        stacks_of(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600
    )  # until the very end
    faulthandler.register(signal.SIGURG, stacks, all_threads=False)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
