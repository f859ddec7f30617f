"""Look-ups that take a walk through ``/proc`` and cgroups: in threads, few at a time, none for longer than it may."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from resolver.api.problems import Problem, Reason
from resolver.retry import in_a_thread

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
        """What ``walk(*arguments)`` gives or raises. `Problem` when there are too many, or it takes too long.

        A thread is made for each: a pool's would keep the rights of the moment it was made in, and the end of the
        daemon would wait for them.
        """
        if self._asked >= self._most + self._waiting:
            raise Problem(
                503,
                Reason.BUSY,
                "too many look-ups that take a walk through /proc are waiting: ask by the full id of a container",
                headers={"Retry-After": "1"},
            )
        self._asked += 1
        try:
            async with asyncio.timeout(_SECONDS):
                await self._turns.acquire()
        except TimeoutError:
            self._asked -= 1
            raise _too_slow() from None
        except BaseException:
            self._asked -= 1
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
