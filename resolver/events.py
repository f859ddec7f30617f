"""What happened, for those who want to be told: the last thousand events, and whoever waits for the next.

An event is also a line of the log, under the same name and with the same fields (`resolver.log.Journal.tell`).
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import asyncio

_KEPT = 1024

#: Every kind of event, with what it says.
KINDS = {
    "repair": "a slot's hostpid was written",
    "events_left_out": "one container caused more events than are told one by one: how many of each kind were not",
    "conflict": "another writer changed a slot's hostpid back",
    "region_found": "a cache file of HAMi's is looked after from now on",
    "region_gone": "a cache file is gone",
    "region_abandoned": "nobody has a cache file open any more: the utilization in its slots is set to 0",
    "region_quarantined": "the slot writer died or hung on a cache file, which is left alone for a while",
    "container_started": "a container was seen for the first time",
    "container_ended": "a container's last process ended",
    "source": "PIDs come from another source now",
    "source_failed": "the source in use failed",
    "policy": "which number hostpid must be was decided anew",
    "slot_stuck": "a slot's sm_util does not stay what NVML says, though its hostpid is right",
    "gpu_found": "a GPU is there that was not",
    "gpu_gone": "a GPU is gone",
    "gpu_unhealthy": "a GPU became unhealthy",
    "gpu_healthy": "a GPU is healthy again",
    "nvml_unavailable": "NVML does not answer",
    "nvml_available": "NVML answers again",
}


class Event(NamedTuple):
    """``number`` grows by one with each event since the daemon started; ``at`` is Unix time."""

    number: int
    at: float
    kind: str
    fields: dict[str, Any]


class Events:
    """The last events. Belongs to one event loop's thread."""

    def __init__(self, kept: int = _KEPT) -> None:
        self.number = 0  # of the last event
        self._last: deque[Event] = deque(maxlen=kept)
        self._waiting: set[asyncio.Future[None]] = set()

    def publish(self, kind: str, fields: dict[str, Any]) -> None:
        """Add one, and wake everybody who waits."""
        self.number += 1
        self._last.append(Event(self.number, time.time(), kind, fields))
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def after(self, number: int) -> list[Event]:
        """Those with a larger number, as far as they are still kept."""
        return [event for event in self._last if event.number > number]

    async def wait(self, number: int) -> list[Event]:
        """The same, but at least one: waits until there is one."""
        import asyncio  # the loggers of commands and children import this module, too

        while self.number <= number:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                await future
            finally:
                self._waiting.discard(future)
        return self.after(number)
