"""How much somebody may still ask for."""

from __future__ import annotations

import time


class Bucket:
    """Holds ``burst`` at most and is filled by ``rate`` a second; full at the beginning."""

    __slots__ = ("_at", "_burst", "_left", "_rate")

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._left, self._at = burst, time.monotonic()

    def spend(self, wanted: float) -> float:
        """Take that much; else the seconds until there is enough, and nothing is taken.

        A request for more than the bucket holds empties it.
        """
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        needed = min(wanted, self._burst)
        if needed > self._left:
            return (needed - self._left) / self._rate
        self._left -= needed
        return 0.0
