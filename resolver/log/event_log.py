"""What happened: the last thousand events, kept for clients of the API, and for those that wait for the next one."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

from msgspec import Struct

_KEPT = 1024


class Event(Struct, frozen=True):
    """Something that happened. ``number`` grows by one with each since the daemon started; ``at`` is Unix time."""

    number: int
    at: float
    kind: str
    fields: dict[str, Any]


class EventLog:
    """The last events. Belongs to one event loop's thread."""

    def __init__(self, kept: int = _KEPT) -> None:
        self.number = 0  # of the last event
        self._last: deque[Event] = deque(maxlen=kept)
        self._waiting: set[asyncio.Future[None]] = set()

    def publish(self, kind: str, fields: dict[str, Any]) -> None:
        """Add one, and wake everybody who waits."""
        self.number += 1
        self._last.append(Event(number=self.number, at=time.time(), kind=kind, fields=fields))
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def after(self, number: int) -> list[Event]:
        """Those with a larger number, as far as they are still kept."""
        return [event for event in self._last if event.number > number]

    async def wait(self, number: int) -> list[Event]:
        """The same, but at least one: waits until there is one."""
        while self.number <= number:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                await future
            finally:
                self._waiting.discard(future)
        return self.after(number)
