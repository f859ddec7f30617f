"""What the slot writer suffered from one container's cache files, and for how long it is kept away from them.

It belongs to the container and not to a file, which its tenant can exchange for a new one at any time. A file is to
blame at once for a death that a file can cause (SIGBUS, SIGSEGV). A writer that was late or was killed says nothing
about the file, as the machine may be slow: its successor tries again, and only several in a row count as a blame.
"""

from __future__ import annotations

from resolver.retry import doubled

DEATHS_IN_A_ROW = 3
FIRST_SECONDS, LONGEST_SECONDS = 10.0, 3600.0
#: A row of deaths is none if so many seconds lie between two of them, and as many without any take back one doubling.
FORGIVEN_SECONDS = 600.0


class Blame:
    """One container's. Times are those of a monotonic clock, in seconds."""

    __slots__ = ("__weakref__", "_deaths", "_last", "_quarantines", "until")

    def __init__(self) -> None:
        self._deaths = 0  # in a row, without an answer in between
        self._quarantines = 0
        self._last = self.until = float("-inf")  # the files are skipped before the second one

    def died(self, now: float, *, guilty: bool) -> float:
        """The writer failed on one of the files; returns for how many seconds they are skipped, 0 if not yet.

        ``guilty``: it died of what a file can do to it.
        """
        if now - self._last > FORGIVEN_SECONDS:
            self._deaths = 0
        self._deaths, self._last = self._deaths + 1, now
        if not guilty and self._deaths < DEATHS_IN_A_ROW:
            return 0.0
        forgiven = int(min((now - self.until) / FORGIVEN_SECONDS, self._quarantines))
        self._quarantines -= max(0, forgiven)
        seconds = doubled(FIRST_SECONDS, LONGEST_SECONDS, self._quarantines)
        self._deaths, self._quarantines, self.until = 0, self._quarantines + 1, now + seconds
        return float(seconds)

    def answered(self) -> None:
        """The writer answered: what it died of before was not the file."""
        self._deaths = 0

    def quarantined(self, now: float) -> bool:
        """Whether the files are skipped."""
        return now < self.until

    def forgotten(self, now: float) -> bool:
        """Whether nothing of it matters any more."""
        return now - max(self.until, self._last) > FORGIVEN_SECONDS * (self._quarantines + 1)
