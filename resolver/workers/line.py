"""The line before a lane: few questions are at the lane, and accounts take turns, those with most budget left first."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


class Line:
    """At most ``room`` questions are at the lane; the others wait here. ``left(account)`` is its budget in seconds."""

    def __init__(self, room: int, left: Callable[[str], float]) -> None:
        self._room, self._left = room, left
        self._at_lane: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._at_lane)

    @asynccontextmanager
    async def turn(self, account: str) -> AsyncIterator[None]:
        """Wait for the account's turn; the block is its question."""
        if self._waiting or self._at_lane.total() >= self._room:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(account, deque()).append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if mine.done() and not mine.cancelled():
                    self._leave(account)  # its turn had come
                raise
        else:
            self._at_lane[account] += 1
        try:
            yield
        finally:
            self._leave(account)

    def _leave(self, account: str) -> None:
        self._at_lane[account] -= 1
        self._at_lane += Counter()  # without those that have none
        while self._waiting and self._at_lane.total() < self._room:
            chosen = min(self._waiting, key=lambda each: (self._at_lane[each], -self._left(each)))
            future = self._waiting[chosen].popleft()
            if not self._waiting[chosen]:
                del self._waiting[chosen]
            if not future.done():  # else it was cancelled
                self._at_lane[chosen] += 1
                future.set_result(None)
