"""The last thousand events, for clients of the API."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

from msgspec import Struct


class Event(Struct, frozen=True):
    """``number`` grows by one with each event since the daemon started; ``at`` is Unix time."""

    number: int
    at: float
    kind: str
    fields: dict[str, Any]


class EventLog:
    """The last events, for one event loop's thread."""

    def __init__(self, kept: int = 1024) -> None:
        self.number = 0  # of the last event
        self._last: deque[Event] = deque(maxlen=kept)
        self._news = asyncio.Event()

    def publish(self, kind: str, fields: dict[str, Any]) -> None:
        """Add an event, and wake all waiting readers."""
        self.number += 1
        self._last.append(Event(number=self.number, at=time.time(), kind=kind, fields=fields))
        self._news.set()
        self._news = asyncio.Event()

    def after(self, number: int) -> list[Event]:
        """Return the kept events with a larger number."""
        return [event for event in self._last if event.number > number]

    async def wait(self, number: int) -> list[Event]:
        """Return them, waiting until there is at least one."""
        while self.number <= number:
            await self._news.wait()
        return self.after(number)
