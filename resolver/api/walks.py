"""Look-ups that take a walk through ``/proc`` and cgroups: in threads, few at a time, none for longer than it may."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from resolver.api.problems import Problem, Reason
from resolver.base.retry import in_a_thread

if TYPE_CHECKING:
    from collections.abc import Callable

_SECONDS = 10.0


class Walks:
    """At most ``most`` walks at a time; ``waiting`` more may wait for their turn."""

    def __init__(self, most: int, waiting: int) -> None:
        self._most = most
        self._waiting = waiting
        self._turns = asyncio.Semaphore(most)
        self._asked = 0

    async def run(self, walk: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of ``walk(*arguments)``. `Problem` if there are too many, or it takes too long.

        Each has a thread of its own: a pool's threads would keep their first rights, and delay the daemon's end.
        """
        if self._asked >= self._most + self._waiting:
            raise Problem(
                503,
                Reason.BUSY,
                "too many lookups that need a walk through /proc are waiting: use the full container id",
                headers={"Retry-After": "1"},
            )
        self._asked += 1
        try:
            async with asyncio.timeout(_SECONDS):
                await self._turns.acquire()
        except BaseException as error:
            self._asked -= 1
            if isinstance(error, TimeoutError):
                raise _too_slow() from None
            raise
        done = in_a_thread(lambda: walk(*arguments), name="walk", ended=self._finished)
        try:
            async with asyncio.timeout(_SECONDS):
                return await done
        except TimeoutError:
            raise _too_slow() from None

    def _finished(self) -> None:
        self._asked -= 1
        self._turns.release()


def _too_slow() -> Problem:
    return Problem(
        503,
        Reason.TOO_SLOW,
        f"no answer was found within {_SECONDS:g} s: this node is overloaded",
        headers={"Retry-After": "5"},
    )
