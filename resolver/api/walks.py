"""Limits on look-ups that walk through ``/proc`` and cgroups: few threads at a time, and a time limit."""

import asyncio
from collections.abc import Callable
from typing import Any

from resolver.api.problems import Problem, Reason
from resolver.base.retry import in_a_thread

_SECONDS = 10.0


class Walks:
    """Runs at most ``most`` walks at a time, and queues at most ``waiting`` more."""

    def __init__(self, most: int, waiting: int) -> None:
        self._turns = asyncio.Semaphore(most)
        self._queued, self._most_queued = 0, waiting

    async def run(self, walk: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of ``walk(*arguments)``, or raise `Problem` if there are too many or it takes too long.

        Each walk gets a new thread: a pool's threads would keep dropped rights, and delay the daemon's end.
        """
        if self._queued >= self._most_queued and self._turns.locked():
            raise Problem(
                503,
                Reason.BUSY,
                "too many lookups that need a walk through /proc are waiting: use the full container id",
                headers={"Retry-After": "1"},
            )
        self._queued += 1
        try:
            async with asyncio.timeout(_SECONDS):
                try:
                    await self._turns.acquire()
                finally:
                    self._queued -= 1
                try:
                    done = in_a_thread(lambda: walk(*arguments), name="walk", ended=self._turns.release)
                except RuntimeError:
                    self._turns.release()
                    why = "no thread can be started to walk /proc: raise the limit on tasks (TasksMax, pids.max)"
                    raise Problem(503, Reason.BUSY, why, headers={"Retry-After": "5"}) from None
                return await done
        except TimeoutError:
            why = f"no answer was found within {_SECONDS:g} s: this node is overloaded"
            raise Problem(503, Reason.TOO_SLOW, why, headers={"Retry-After": "5"}) from None
