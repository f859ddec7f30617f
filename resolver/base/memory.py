"""Freed memory goes back to the system: Python and the C library keep it by themselves."""

from __future__ import annotations

import gc
from contextlib import suppress
from mmap import PAGESIZE

#: Bytes above the least since the last time that are worth it, and seconds between two looks.
_WORTH, _APART = 1 << 20, 2.0


class Resident:
    """Our resident memory. `look` gives some back once it has stopped growing above what it was."""

    def __init__(self) -> None:
        self._floor, self._last, self._next = 0, 0, 0.0

    def look(self, now: float) -> None:
        """Take 20 us, and where there is something to give back some milliseconds; ``now`` is on any clock."""
        if now < self._next:
            return
        self._next = now + _APART
        resident = _resident()
        if self._floor and resident > self._floor + _WORTH and resident <= self._last:
            _give_back()
            self._floor = resident = _resident()
        self._floor, self._last = min(self._floor or resident, resident), resident


def _resident() -> int:
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * PAGESIZE


def _give_back() -> None:
    import ctypes

    gc.collect()
    with suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)
