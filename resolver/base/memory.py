"""Freed memory goes back to the system: Python and the C library keep it by themselves."""

import gc
from contextlib import suppress
from mmap import PAGESIZE

from resolver.base.retry import longer

#: Bytes above the least so far that are worth it.
_WORTH = 1 << 20
#: Seconds between two tries: free heap can't be seen from outside.
_FIRST, _LONGEST = 2.0, 64.0


class Resident:
    """Our resident memory. `look` gives some back where it has stopped growing above the least so far."""

    def __init__(self) -> None:
        self._least, self._last, self._pause, self._next = 0, 0, _FIRST, 0.0

    def trim(self, now: float) -> None:
        """Take 20 us, and where there may be something to give back some milliseconds; ``now`` is on any clock."""
        if now < self._next:
            return
        resident = resident_bytes()
        grown = resident > self._last + _WORTH
        if self._least and not grown and resident > self._least + _WORTH:
            give_back()
            resident = resident_bytes()
            self._pause = longer(self._pause, _FIRST, _LONGEST)
        else:
            self._pause = _FIRST
        self._next = now + self._pause
        self._least, self._last = min(self._least or resident, resident), resident


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    # A line: '9421 4210 1986 1 0 3104 0': pages; the second is resident
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * PAGESIZE


def give_back() -> None:
    """Return free memory to the kernel."""
    import ctypes

    gc.collect()
    with suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)
