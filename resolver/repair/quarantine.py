"""Slot writer failures caused by one container's cache files, and their quarantine.

SIGBUS and SIGSEGV are blamed at once. A late or killed writer may only mean a slow machine: several in a row count.
"""

from __future__ import annotations

from resolver.base.retry import doubled

DEATHS_IN_A_ROW = 3
FIRST_SECONDS, LONGEST_SECONDS = 10.0, 3600.0
#: So many seconds without a death, or after a quarantine, and everything is forgiven.
FORGIVEN_SECONDS = 600.0


class Blame:
    """One container's failures. Times are monotonic, in seconds."""

    def __init__(self) -> None:
        self._deaths = 0  # in a row, without an answer in between
        self._quarantines = 0
        self._last = self.until = float("-inf")  # the files are skipped before the second one

    def died(self, now: float, *, guilty: bool) -> float:
        """Note a writer failure; return the seconds of quarantine, 0 for none yet.

        ``guilty``: it died of a signal that a file can cause.
        """
        if self.forgotten(now):
            self._deaths = self._quarantines = 0
        self._deaths, self._last = self._deaths + 1, now
        if not guilty and self._deaths < DEATHS_IN_A_ROW:
            return 0.0
        seconds = doubled(FIRST_SECONDS, LONGEST_SECONDS, self._quarantines)
        self._deaths, self._quarantines, self.until = 0, self._quarantines + 1, now + seconds
        return seconds

    def answered(self) -> None:
        """Clear the failures: the file was not to blame."""
        self._deaths = 0

    def quarantined(self, now: float) -> bool:
        """Check if the files are skipped now."""
        return now < self.until

    def forgotten(self, now: float) -> bool:
        """Check if the record no longer matters."""
        return now - max(self.until, self._last) > FORGIVEN_SECONDS
