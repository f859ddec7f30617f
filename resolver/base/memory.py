"""Returns freed memory to the kernel, which Python and the C library would keep."""

import gc
from contextlib import suppress
from mmap import PAGESIZE

from resolver.base.retry import longer

_WORTH = 1 << 20  # bytes above the lowest level that make trimming worthwhile
#: Seconds between two trims. They grow, because how much would be freed can't be read.
_FIRST, _LONGEST = 2.0, 64.0


class Resident:
    """Resident memory of this process, trimmed when it is above its lowest level and has stopped growing."""

    def __init__(self) -> None:
        self._least, self._last, self._pause, self._next = 0, 0, _FIRST, 0.0

    def trim(self, now: float) -> None:
        """Check in 20 us if memory may be free, and return it in some milliseconds. ``now``: seconds of any clock."""
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
    with suppress(OSError, AttributeError):  # this C library has no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
