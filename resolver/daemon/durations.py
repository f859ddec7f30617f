"""Histogram of how long a step takes."""

from __future__ import annotations

from resolver.state import PassSeconds


class Durations:
    """Counts of durations up to each of ``bounds``, in seconds."""

    def __init__(self, *bounds: float) -> None:
        self.bounds = bounds
        self._counts = [0] * len(bounds)
        self._observations, self._total = 0, 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self._observations += 1
        self._total += seconds
        for index, bound in enumerate(self.bounds):
            self._counts[index] += seconds <= bound

    def seen(self) -> PassSeconds:
        """Return the counts so far."""
        return PassSeconds(
            bounds=self.bounds, counts=tuple(self._counts), observations=self._observations, total=self._total
        )
