"""One account's record: its share of a core, its files' events, and its quarantine after slot writer failures.

SIGBUS and SIGSEGV of the slot writer are blamed on the file at once. A late or killed writer may only mean a slow
machine: several in a row count.
"""

from __future__ import annotations

import time
from math import inf
from typing import TYPE_CHECKING

from resolver.base.limiter import Bucket
from resolver.base.retry import doubled

if TYPE_CHECKING:
    from collections.abc import MutableMapping

#: A container's lasting share of one core, and the seconds of CPU that it may save up.
SHARE, BURST_SECONDS = 0.1, 0.25
#: Events that one container may cause at once, and how many more a second. A process makes one: it comes.
#: One that made more is ignored until it has paid for them and has its burst again: half a minute at most.
EVENT_BURST, EVENT_RATE = 256.0, 32.0
DEATHS_IN_A_ROW = 3
FIRST_SECONDS, LONGEST_SECONDS = 10.0, 3600.0
#: So many seconds without a death, or after a quarantine, and everything is forgiven.
FORGIVEN_SECONDS = 600.0


class Account:
    """Shared by an account's files, which it outlives among ``kept`` while it matters. Times are monotonic."""

    def __init__(self, account: str, kept: MutableMapping[str, Account], now: float) -> None:
        self._account, self._kept = account, kept
        self.seconds = Bucket(SHARE, BURST_SECONDS, now=now)
        self.events = Bucket(EVENT_RATE, EVENT_BURST, now=now)
        self.overdrawn = 0.0  # since when (Unix time) its seconds are not full again after a debt
        self.deaf_until = 0.0  # its events are ignored before this
        self._deaths = self._quarantines = 0  # deaths in a row, without an answer in between
        self._last = self.until = -inf  # the files are skipped before the second one

    def spend(self, seconds: float, now: float) -> None:
        self._kept[self._account] = self
        if self.seconds.charge(seconds, now):
            self.overdrawn = self.overdrawn or time.time()

    def flooded(self, events: int, now: float) -> bool:
        """Count events; True, and ignore it for a while, if they are too many."""
        self._kept[self._account] = self
        debt = self.events.charge(events, now)
        if debt:
            self.deaf_until = now + debt + EVENT_BURST / EVENT_RATE
        return debt > 0

    def died(self, now: float, *, guilty: bool) -> float:
        """Note a writer failure; return the seconds of quarantine, 0 for none yet.

        ``guilty``: it died of a signal that a file can cause.
        """
        self._kept[self._account] = self
        if self.forgiven(now):
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
        return now < self.until

    def forgiven(self, now: float) -> bool:
        return now - max(self.until, self._last) > FORGIVEN_SECONDS

    def idle(self, now: float) -> bool:
        """Check if nothing is held against it."""
        if full := self.seconds.full(now):
            self.overdrawn = 0.0
        return full and self.events.full(now) and self.forgiven(now)
