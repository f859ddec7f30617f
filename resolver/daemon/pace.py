"""When what runs: each step of the daemon at its own pace, until it is asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

from resolver.counters import CounterName
from resolver.errors import no_descriptors

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Awaitable, Callable, Coroutine, Iterable

    from resolver.log.journal import Journal

#: So many failures of one step in a row end the daemon.
ERRORS_BEFORE_END = 10


class Pace:
    """Runs the daemon's loops side by side. ``out_of_descriptors`` is called when the process has no more of them."""

    def __init__(
        self, counters: Counter[str], journal: Journal, out_of_descriptors: Callable[[], None]
    ) -> None:
        self._counters, self._journal = counters, journal
        self._out_of_descriptors = out_of_descriptors
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End every loop now."""
        self._stopping.set()

    async def run(self, loops: Iterable[Coroutine[Any, Any, None]]) -> None:
        """All of them, until `stop`. A loop ends only by an error that nobody foresaw, which is raised."""
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

    async def unless_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for the work, which may take a compiler's time, or for `stop`."""
        working, stopping = asyncio.create_task(work), asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            working.cancel()
            stopping.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    async def every(
        self,
        interval: Callable[[], float],
        step: Callable[[], Awaitable[None]],
        hurry: asyncio.Event,
        name: str,
    ) -> None:
        """Repeat at a fixed pace, sooner in a hurry. A step that took long delays the next, it does not double it."""
        due = time.monotonic()

        def next_due() -> float:
            nonlocal due
            now = time.monotonic()
            due = max(min(due, now) + interval(), now)  # after a hurry the pace goes on from there
            return due

        await self.whenever(next_due, step, hurry, name)

    async def whenever(
        self,
        due: Callable[[], float],
        step: Callable[[], Awaitable[None]],
        hurry: asyncio.Event,
        name: str,
    ) -> None:
        """Repeat when it is ``due`` (monotonic; asked after each step), sooner in a hurry."""
        errors = 0
        while not self._stopping.is_set():
            try:
                await step()
                errors = 0
            except Exception as error:
                if no_descriptors(error):
                    self._out_of_descriptors()
                else:
                    # A bug, or a file system that fails in a new way: shown, counted, and survived.
                    errors += 1
                    self._counters[CounterName.INTERNAL_ERRORS] += 1
                    self._journal.log.exception("internal_error", step=name)
                    if errors >= ERRORS_BEFORE_END:
                        raise
            # Not wait_for: before Python 3.12 it can swallow a cancellation, and the daemon would not end.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due() - time.monotonic())):
                    await hurry.wait()
            hurry.clear()
