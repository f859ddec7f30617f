"""CPU time of the event loop's thread: when to give way, and how much of it one container may cost.

Everything here is measured in CPU time (CLOCK_THREAD_CPUTIME_ID) and not by the clock on the wall, so a machine that is
busy with other things makes nobody look guilty.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")

#: Seconds of its own CPU after which a loop's task lets the others go on. One step more can come on top of it.
SLICE_SECONDS = 0.005
#: What one container may cost in the long run, as a share of one core, and what it may save up, in seconds.
SHARE = 0.1
BURST_SECONDS = 0.25


class Slices:
    """Keeps one task from holding up the loop: call `breathe` between any two steps of its work."""

    def __init__(self, seconds: float = SLICE_SECONDS) -> None:
        self._seconds = seconds
        self._since = time.thread_time()
        self._until = time.monotonic() + seconds  # no thread has used more CPU than time has gone by

    def over(self) -> bool:
        """Whether this thread has worked for long enough since it last gave way."""
        # The CPU's clock is a system call, and costs ten to a hundred times as much as the other one.
        if time.monotonic() < self._until:
            return False
        left = self._seconds - (time.thread_time() - self._since)
        self._until = time.monotonic() + left
        return left <= 0

    async def breathe(self) -> None:
        """Let the loop's other tasks go on, if it is time."""
        if self.over():
            await self.give_way()

    async def give_way(self) -> None:
        """Let the loop's other tasks go on."""
        import asyncio  # `resolver slots` pays for every import

        await asyncio.sleep(0)
        self._since = time.thread_time()
        self._until = time.monotonic() + self._seconds


class Account:
    """Something that containers' CPU time is charged to."""

    def spend(self, container: str, seconds: float) -> None:
        """Take that much of what the container has."""
        raise NotImplementedError

    @contextlib.contextmanager
    def charge(self, container: str) -> Iterator[None]:
        """Charge the CPU time of the block, in which nothing may be awaited: that would be others' time."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.spend(container, time.thread_time() - began)


class Shares:
    """Charges many short steps for different containers: one stretch of CPU time, shared by their time on the wall.

    To read the CPU's clock before and after each step would cost more than the steps do.
    """

    def __init__(self, spend: Callable[[str, float], None]) -> None:
        self._spend = spend
        self._parts: dict[str, float] = {}
        self._cpu, self._wall = time.thread_time(), time.perf_counter()

    def took(self, container: str) -> None:
        """What was done since the last call was done for this container."""
        now = time.perf_counter()
        self._parts[container] = self._parts.get(container, 0.0) + now - self._wall
        self._wall = now

    def settle(self) -> None:
        """Charge what was used so far; nothing may be awaited without that."""
        cpu, total = time.thread_time(), sum(self._parts.values())
        for container, part in self._parts.items():
            self._spend(container, (cpu - self._cpu) * part / total)
        self.begin(cpu)

    def begin(self, cpu: float | None = None) -> None:
        """From now on; to be called when something was awaited."""
        self._parts.clear()
        self._cpu, self._wall = time.thread_time() if cpu is None else cpu, time.perf_counter()


class Budgets(Account):
    """What each container has left: a bucket of CPU seconds that fills by ``SHARE`` a second, up to ``BURST_SECONDS``.

    One step can take more than is left; the debt is paid back before the next one. What is not in here is full.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}  # what was left, and when that was
        self.spenders = self._left.keys()  # the containers that have not all of it

    def left(self, container: str) -> float:
        """Seconds that the container may still cost now; 0 or less: it has to wait."""
        left, at = self._left.get(container, (BURST_SECONDS, 0.0))
        return min(BURST_SECONDS, left + (self._clock() - at) * SHARE)

    def over(self, container: str) -> bool:
        """Whether the container has to wait."""
        return container in self._left and self.left(container) <= 0

    def most_left_first(self, items: Iterable[T], account: Callable[[T], str]) -> list[T]:
        """The items by what their containers have left; those with all of it come first, as they are."""
        listed = list(items)
        if not self._left:
            return listed
        behind = [item for item in listed if account(item) in self._left]
        full = [item for item in listed if account(item) not in self._left]
        return full + sorted(behind, key=lambda item: -self.left(account(item)))

    def spend(self, container: str, seconds: float) -> None:
        """Take that much from what is left."""
        self._left[container] = self.left(container) - seconds, self._clock()

    def forget_full(self) -> None:
        """Drop what need not be remembered."""
        for container in [each for each in self._left if self.left(each) >= BURST_SECONDS]:
            del self._left[container]


class Rests:
    """How long to rest between pieces of work that others can ask for at any time.

    In the long run the work takes one part in five of the time. What was not used is saved up, to `_SAVED_SECONDS` of
    CPU time: as long as there is some, a rest is as long as the work was, so that what is asked for at once is done
    together.
    """

    _PARTS = 5
    _SAVED_SECONDS = 0.1

    def __init__(self) -> None:
        self._saved, self._at = self._SAVED_SECONDS, 0.0

    def after(self, cost: float, now: float) -> float:
        """Seconds to rest after work that has cost so many of CPU time, and ended ``now``."""
        saved = min(self._SAVED_SECONDS, self._saved + (now - self._at) / self._PARTS) - cost
        self._at = now
        # What was overdrawn is rested for at once, or forgotten: nothing is owed for longer than for one piece of work.
        self._saved = max(saved, cost / self._PARTS - cost)
        return max(cost, -self._saved * self._PARTS)


def give_back_memory() -> None:
    """Return to the system what the allocator keeps for later; it costs some milliseconds."""
    import ctypes
    import gc

    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)
