"""Listing of directories that tenants fill: limits on their size, and detection of changes."""

from __future__ import annotations

import os
import time
from itertools import islice

MAX_CONTAINERS = 16384  # directories in a containers directory
MAX_ENTRIES = 64  # entries read in one container's directory; upstream makes two or three
MAX_CACHES = 8  # of them, names that end in .cache; upstream's own monitor refuses more than two

#: Changes within this time before a listing may carry the same time stamp as later ones (kernel ticks).
_TICK_NS = 50_000_000


def list_caches(dir_fd: int) -> tuple[list[str], bool]:
    """Return names that end in .cache, and True if all entries were read. Raises OSError."""
    names: list[str] = []
    with os.scandir(dir_fd) as listing:
        for entry in islice(listing, MAX_ENTRIES):
            if entry.name.endswith(".cache"):
                if len(names) == MAX_CACHES:
                    return names, False
                names.append(entry.name)
        return names, next(listing, None) is None


def change_stamp(info: os.stat_result) -> int:
    """Return a directory's change time (no tenant can set it), or -1 while later changes could carry the same."""
    return info.st_ctime_ns if time.time_ns() - info.st_ctime_ns > _TICK_NS else -1
