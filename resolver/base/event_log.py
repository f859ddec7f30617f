"""Kinds of events, each also a log line with the same fields, and the last thousand events for clients of the API."""

import time
from collections import deque
from typing import Any

from msgspec import Struct

#: Every kind of event that the API serves, with its meaning.
KINDS = {
    "repair": "a slot's hostpid was written; not repeated after a second `conflict`",
    "events_left_out": "a container or directory caused too many events; counts the dropped ones of each kind",
    "conflict": "another writer changed a slot's hostpid back, for the `times`-th time",
    "region_found": "a cache file was discovered and is repaired from now on",
    "region_gone": "a cache file is gone",
    "region_abandoned": "no process has a cache file open any more: the utilization in its slots is set to 0",
    "region_quarantined": "the slot writer died or hung on a cache file, which is skipped for a while",
    "container_started": "a container was seen for the first time",
    "container_ended": "a container's last process ended",
    "source": "the source of PIDs changed",
    "source_failed": "the source in use failed",
    "policy": "the decision on the PID namespace of hostpid changed",
    "slot_stuck": "a slot's sm_util does not stay at NVML's value, though its hostpid is right",
    "nvml_contradicts_watchers": "a watcher fills in a value, but NVML has no sample: no 0 is written any more",
    "gpu_found": "a GPU appeared",
    "gpu_gone": "a GPU is gone",
    "gpu_unhealthy": "a GPU became unhealthy",
    "gpu_healthy": "a GPU is healthy again",
    "gpu_xid": "the driver reported an error of a GPU (XID), for the first time",
    "nvml_unavailable": "NVML does not answer",
    "nvml_available": "NVML answers again",
}


class Event(Struct, frozen=True):
    """``number`` grows by one with each event since the daemon started; ``at`` is Unix time."""

    number: int
    at: float
    kind: str
    fields: dict[str, Any]


class EventLog:
    """The last events, for one event loop's thread."""

    def __init__(self, kept: int = 1024) -> None:
        from asyncio import Event as News  # commands load this module for the names only

        self.number = 0  # of the last event
        self._last: deque[Event] = deque(maxlen=kept)
        self._new_news = News
        self._news = News()

    def publish(self, kind: str, fields: dict[str, Any]) -> None:
        self.number += 1
        self._last.append(Event(number=self.number, at=time.time(), kind=kind, fields=fields))
        self._news.set()
        self._news = self._new_news()

    def after(self, number: int) -> list[Event]:
        return [event for event in self._last if event.number > number]

    async def wait(self, number: int) -> list[Event]:
        """Return the events after ``number``; wait for one if there is none."""
        while self.number <= number:
            await self._news.wait()
        return self.after(number)
