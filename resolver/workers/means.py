"""Shortages of the daemon's resources; no container is to blame."""

from __future__ import annotations

import errno
import time
from collections import Counter
from typing import TYPE_CHECKING

from resolver.base.counters import Shortage

if TYPE_CHECKING:
    from resolver.base.journal import Journal

#: Seconds of refusals after which the daemon is not ready, and seconds without one after which a shortage is over.
NOT_READY_SECONDS, FORGOTTEN_SECONDS = 10.0, 5.0

_SHORTAGES = {
    errno.ETOOMANYREFS: Shortage.IN_FLIGHT,
    errno.EMFILE: Shortage.DESCRIPTORS,
    errno.ENFILE: Shortage.DESCRIPTORS,
    errno.ENOMEM: Shortage.MEMORY,
    errno.ENOBUFS: Shortage.MEMORY,
    errno.EAGAIN: Shortage.PROCESSES,
    errno.ENOSPC: Shortage.WATCHES,
}


def shortage_of(code: int | None) -> Shortage | None:
    """Resource that a system call lacked."""
    return _SHORTAGES.get(code or 0)


class Shortages:
    """Shortages of one part; ``counts`` are refusals by kind, ever.

    One is over when the work was done, or ``seconds`` after the last refusal.
    """

    def __init__(self, part: str, seconds: float = FORGOTTEN_SECONDS) -> None:
        self.part, self._seconds = part, seconds
        self.counts: Counter[Shortage] = Counter()
        self._since: float | None = None
        self._last = 0.0
        self._why, self._told = "", False

    def refused(self, shortage: Shortage, why: str) -> None:
        """Count a refusal that stopped work."""
        self.counts[shortage] += 1
        self._last = time.monotonic()
        self._why = why
        if self._since is None:
            self._since = self._last

    def recovered(self) -> None:
        """End the shortage: the work was done."""
        self._since = None

    def short(self) -> str:
        """Why this part does not work; else empty."""
        if self._since is not None and time.monotonic() - self._last > self._seconds:
            self._since = None
        return "" if self._since is None else self._why

    def lacking(self) -> str:
        """Why this part has not worked for 10 s; else empty."""
        why, seconds = self.short(), time.monotonic() - (self._since or 0.0)
        return f"for {seconds:.0f} s {why}" if why and seconds >= NOT_READY_SECONDS else ""

    def tell(self, journal: Journal) -> None:
        why = self.short()
        if why or self._told:
            journal.trouble(f"means of {self.part}", why, "out_of_means", "means_restored")
        self._told = bool(why)
