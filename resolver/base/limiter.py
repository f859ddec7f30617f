"""Token bucket: the one rate limiter."""

import time


class Bucket:
    """Token bucket with a capacity of ``burst`` and ``rate`` tokens per second; starts full.

    `take` takes only available tokens; `charge` may overdraw. Times are monotonic, by default now.
    """

    __slots__ = ("_at", "_left", "burst", "rate")

    def __init__(self, rate: float, burst: float, *, now: float | None = None) -> None:
        self.rate, self.burst = rate, burst
        self._left, self._at = burst, time.monotonic() if now is None else now

    def left(self, now: float | None = None) -> float:
        """Return the tokens left; a debt is negative."""
        if now is None:
            now = time.monotonic()
        self._left = min(self.burst, self._left + (now - self._at) * self.rate)
        self._at = now
        return self._left

    def take(self, wanted: float, now: float | None = None) -> float:
        """Take the tokens and return 0; if there are too few, return the seconds to wait.

        More than ``burst`` empties the bucket.
        """
        needed, left = min(wanted, self.burst), self.left(now)
        if needed > left:
            return (needed - left) / self.rate
        self._left -= needed
        return 0.0

    def charge(self, cost: float, now: float | None = None) -> float:
        """Take the tokens in any case; return the seconds until the debt is paid."""
        self._left = self.left(now) - cost
        return max(0.0, -self._left / self.rate)

    def full(self, now: float | None = None) -> bool:
        return self.left(now) >= self.burst
