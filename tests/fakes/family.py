"""`/proc` of a node where nothing runs but this process and its children, however many others there are."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from resolver.linux.procfs import Procfs


class Family(Procfs):
    """The real `/proc`, which lists only some processes, but still shows every process by its number."""

    def each_entry(self) -> Iterator[tuple[int, int]]:
        mine, children = os.getpid(), set[int]()
        for each in Path(self.root, str(mine), "task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that closed a file
                children |= set(map(int, each.read_text().split()))
        for host_pid in sorted({mine, *children}):
            try:
                yield host_pid, os.stat(f"{self.root}/{host_pid}").st_ino
            except FileNotFoundError:
                continue
