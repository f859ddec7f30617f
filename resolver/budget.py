"""CPU time of the event loop's thread: when to give way, and how much of it one container may cost.

Everything here is measured in CPU time (CLOCK_THREAD_CPUTIME_ID) and not by the clock on the wall, so a machine that is
busy with other things makes nobody look guilty.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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

    async def breathe(self) -> None:
        """Let the loop's other tasks go on, if this thread has worked for long enough since it last did."""
        if time.thread_time() - self._since >= self._seconds:
            import asyncio  # `resolver slots` pays for every import

            await asyncio.sleep(0)
            self._since = time.thread_time()


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


class Budgets(Account):
    """What each container has left: a bucket of CPU seconds that fills by ``SHARE`` a second, up to ``BURST_SECONDS``.

    One step can take more than is left; the debt is paid back before the next one. What is not in here is full.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}  # what was left, and when that was

    def left(self, container: str) -> float:
        """Seconds that the container may still cost now; 0 or less: it has to wait."""
        left, at = self._left.get(container, (BURST_SECONDS, 0.0))
        return min(BURST_SECONDS, left + (self._clock() - at) * SHARE)

    def over(self, container: str) -> bool:
        """Whether the container has to wait."""
        return self.left(container) <= 0

    def spend(self, container: str, seconds: float) -> None:
        """Take that much from what is left."""
        self._left[container] = self.left(container) - seconds, self._clock()

    def forget_full(self) -> None:
        """Drop what need not be remembered."""
        self._left = {
            container: known
            for container, known in self._left.items()
            if self.left(container) < BURST_SECONDS
        }


def give_back_memory() -> None:
    """Return to the system what the allocator keeps for later; it costs some milliseconds."""
    import ctypes
    import gc

    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)
