"""Time on the event loop and in the lanes: when to yield, and each container's share.

The loop's steps cost their CPU time: they wait for no tenant, and a wait for a CPU is not charged.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

from resolver.base.account import BURST_SECONDS, Account

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine, Generator, Iterable
    from typing import Any

T = TypeVar("T")

#: Seconds after which a loop's task lets the others go on. One step more can come on top of it.
SLICE_SECONDS = 0.005


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
        """Yield to other tasks, and start a new slice."""
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
        self._postponed: list[asyncio.Future[None]] = []  # woken too late; first in the next round
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
        """Return the account's record, the same as long as it matters."""
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
        """Forget those with nothing held against them."""
        now = self._clock()
        for account in [account for account, record in self._kept.items() if record.idle(now)]:
            del self._kept[account]
