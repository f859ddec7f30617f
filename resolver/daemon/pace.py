"""Schedule and durations of the daemon's steps."""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from resolver.base.counters import CounterName, Shortage
from resolver.base.journal import Journal
from resolver.state import PassSeconds
from resolver.workers.means import Shortages, shortage_of

#: Consecutive failures of a step that end the daemon.
ERRORS_BEFORE_END = 10


class Alarm(asyncio.Event):
    """Event that is also set at a time."""

    _timer: asyncio.TimerHandle | None = None

    def at(self, when: float) -> None:
        """Set it at this time (monotonic) unless an earlier one is scheduled; infinity cancels."""
        if self._timer is not None:
            if self._timer.when() <= when < math.inf:
                return
            self._timer.cancel()
            self._timer = None
        if when < math.inf:
            self._timer = asyncio.get_running_loop().call_at(when, self.set)


class Pace:
    """Concurrent loops of the daemon, with their ``means``; ``short_of`` is called when resources run out."""

    def __init__(
        self,
        counters: Counter[str],
        journal: Journal,
        means: list[Shortages],
        short_of: Callable[[Shortage], None],
    ) -> None:
        self._counters, self._journal = counters, journal
        self._means, self._short_of = means, short_of
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self._stopping.set()

    async def run(self, loops: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Run all loops until `stop`, or until the first one ends, and raise its error."""
        tasks = [asyncio.create_task(loop) for loop in loops]
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                task.result()
        finally:
            for task in (*tasks, stopping):
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)

    async def whenever(
        self, due: Callable[[], float], step: Callable[[], Awaitable[None]], hurry: asyncio.Event, name: str
    ) -> None:
        """Repeat when it is ``due`` (monotonic; called after each step), sooner on request."""
        errors, means = 0, Shortages(f"the step {name}", math.inf)
        self._means.append(means)
        while not self._stopping.is_set():
            try:
                await step()
                errors = 0
                means.recovered()
            except Exception as error:
                lacks = shortage_of(error.errno) if isinstance(error, OSError) else None
                if lacks is not None:
                    means.refused(lacks, f"the step {name} fails: {error}")
                    self._short_of(lacks)
                else:
                    # The daemon logs, counts and survives bugs, and failures of file systems.
                    errors += 1
                    self._counters[CounterName.INTERNAL_ERRORS] += 1
                    self._journal.log.exception("internal_error", step=name)
                    if errors >= ERRORS_BEFORE_END:
                        raise
            timer = asyncio.get_running_loop().call_at(due(), hurry.set)
            try:
                await hurry.wait()
            finally:
                timer.cancel()
            hurry.clear()


class Durations:
    """Histogram of how long a step takes: counts up to each of ``bounds``, in seconds."""

    def __init__(self, *bounds: float) -> None:
        self.bounds = bounds
        self._counts = [0] * len(bounds)
        self._observations, self._total = 0, 0.0

    def add(self, seconds: float) -> None:
        self._observations += 1
        self._total += seconds
        for index, bound in enumerate(self.bounds):
            self._counts[index] += seconds <= bound

    def seen(self) -> PassSeconds:
        return PassSeconds(
            bounds=self.bounds, counts=tuple(self._counts), observations=self._observations, total=self._total
        )
