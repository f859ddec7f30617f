"""Limits of rates, and of time on the event loop and in the lanes: when to yield, and each container's share.

The loop's steps cost their CPU time: they wait for no tenant, and a wait for a CPU is not charged.
"""

from __future__ import annotations

import time
from math import inf
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

from resolver.base.retry import doubled

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine, Generator, Iterable, MutableMapping
    from typing import Any

T = TypeVar("T")

#: Seconds after which a task yields to the loop's other tasks; the step in progress ends first.
SLICE_SECONDS = 0.005
#: A container's lasting share of one core, and the seconds of CPU that it may save up.
SHARE, BURST_SECONDS = 0.1, 0.25
#: Events that a container may cause at once, and how many more per second. A process causes one when it starts.
#: A container that causes more is ignored until its debt is paid and its burst full: half a minute at most.
EVENT_BURST, EVENT_RATE = 256.0, 32.0
DEATHS_IN_A_ROW = 3
FIRST_SECONDS, LONGEST_SECONDS = 10.0, 3600.0
#: Seconds without a writer failure, or after a quarantine, until earlier failures are forgotten.
FORGIVEN_SECONDS = 600.0


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


class Slices:
    """Time slices of a task on the loop: call `yield_if_due` between two steps."""

    def __init__(self, seconds: float = SLICE_SECONDS) -> None:
        self._seconds = seconds
        self._until = time.monotonic() + seconds

    def over(self) -> bool:
        return time.monotonic() >= self._until

    async def yield_if_due(self) -> None:
        if self.over():
            await self.yield_now()

    async def yield_now(self) -> None:
        import asyncio  # `resolver slots` pays for every import

        await asyncio.sleep(0)
        self._until = time.monotonic() + self._seconds


class Rounds:
    """One time slice per round of the event loop, shared by several tasks in order of arrival.

    Together they delay other tasks as much as a single task does.
    """

    def __init__(self) -> None:
        self._left = SLICE_SECONDS
        self._waiting: list[asyncio.Future[None]] = []
        self._postponed: list[asyncio.Future[None]] = []  # woken too late in a round; first in the next
        self._woken = 0  # tasks woken for this round that have not run yet; new ones queue behind them
        self._loop: asyncio.AbstractEventLoop | None = None  # set while a new round is scheduled there

    async def wait(self) -> None:
        """Wait for a round with time left."""
        import asyncio  # `resolver slots` pays for every import

        queue = self._waiting
        while self._left <= 0 or queue is self._postponed or self._woken or self._waiting:
            self._plan()
            queue.append(future := asyncio.get_running_loop().create_future())
            try:
                await future
            finally:
                self._woken -= not future.cancelled()
            if self._left > 0:
                return
            queue = self._postponed

    def spend(self, seconds: float) -> None:
        self._plan()
        self._left -= seconds

    def _plan(self) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._loop, self._left = None, SLICE_SECONDS
        woken = [task for task in self._postponed + self._waiting if not task.done()]
        self._postponed.clear()
        self._waiting.clear()
        self._woken = len(woken)
        for task in woken:
            task.set_result(None)


class Metered:
    """Coroutine that pays for its steps on the event loop; waiting is free. Each step waits for ``rounds`` if given."""

    __slots__ = ("_rounds", "_spend", "_work")

    def __init__(
        self, work: Coroutine[Any, Any, T], spend: Callable[[float], None], rounds: Rounds | None = None
    ) -> None:
        self._work, self._spend, self._rounds = work, spend, rounds

    def __await__(self) -> Generator[Any, Any, Any]:
        steps, thrown = self._work.__await__(), None
        while True:
            try:
                if self._rounds is not None and thrown is None:
                    yield from self._rounds.wait().__await__()
            except BaseException as error:  # noqa: BLE001 - it is the coroutine's
                thrown = error
            began = time.thread_time()
            try:
                wanted = steps.send(None) if thrown is None else steps.throw(thrown)
            except StopIteration as end:
                return end.value
            finally:
                seconds = time.thread_time() - began
                self._spend(seconds)
                if self._rounds is not None:
                    self._rounds.spend(seconds)
            thrown = None
            try:
                yield wanted
            except BaseException as error:  # noqa: BLE001 - as above
                thrown = error


class Account:
    """Record of an account: its share of a core, its files' events, and its quarantine after slot writer failures.

    Its files share it; it outlives them among ``kept`` while it matters. Times are monotonic. SIGBUS and SIGSEGV of the
    slot writer are blamed on the file at once; a late or killed writer may only mean a slow machine.
    """

    def __init__(self, account: str, kept: MutableMapping[str, Account], now: float) -> None:
        self._account, self._kept = account, kept
        self.seconds = Bucket(SHARE, BURST_SECONDS, now=now)
        self.events = Bucket(EVENT_RATE, EVENT_BURST, now=now)
        self.overdrawn = 0.0  # Unix time of the first debt since its budget was last full; 0 without one
        self.deaf_until = 0.0  # its events are ignored before this
        self._deaths = self._quarantines = 0  # deaths in a row, without an answer in between
        self._last = self.until = -inf  # last failure; end of the quarantine

    def spend(self, seconds: float, now: float) -> None:
        self._kept[self._account] = self
        if self.seconds.charge(seconds, now):
            self.overdrawn = self.overdrawn or time.time()

    def flooded(self, events: int, now: float) -> bool:
        """Count events. If there are too many, return True, and ignore further ones for a while."""
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
        """Check if the record has nothing to remember."""
        if full := self.seconds.full(now):
            self.overdrawn = 0.0
        return full and self.events.full(now) and self.forgiven(now)


class Budgets:
    """Accounts' records. Each account's budget fills at ``SHARE`` per second up to ``BURST_SECONDS``.

    One step may overdraw it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records = WeakValueDictionary[str, Account]()
        self._kept: dict[str, Account] = {}  # those with something to remember

    @property
    def overdrawn(self) -> dict[str, float]:
        """Accounts that went over their budget, and since when (Unix time), until it is full again."""
        return {account: record.overdrawn for account, record in self._kept.items() if record.overdrawn}

    def of(self, account: str) -> Account:
        """Return the account's record: the same one while it is in use, or has something to remember."""
        record = self._records.get(account)
        if record is None:
            record = self._records[account] = Account(account, self._kept, self._clock())
        return record

    def left(self, account: str) -> float:
        """Return the account's remaining seconds; at 0 it must wait."""
        record = self._kept.get(account)
        return record.seconds.left(self._clock()) if record else BURST_SECONDS

    def over(self, account: str) -> bool:
        return self.left(account) <= 0

    def most_left_first(self, items: Iterable[T], account: Callable[[T], str]) -> list[T]:
        """Return the items sorted by remaining budget, full ones first."""
        return sorted(items, key=lambda item: -self.left(account(item))) if self._kept else list(items)

    def spend(self, account: str, seconds: float) -> None:
        self.of(account).spend(seconds, self._clock())

    def tidy(self) -> None:
        """Drop records that have nothing to remember."""
        now = self._clock()
        for account in [account for account, record in self._kept.items() if record.idle(now)]:
            del self._kept[account]
