"""Searches for an owner among all processes of the node: how many are under way, and how far they go at a time.

Where no PID namespace of a slot's container is known, every process with the slot's number has to be asked. A tenant
chooses how many there are, so such a walk goes on for a moment with each refresh of the map, and proves nothing before
its end.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from resolver.hami.discovery import Place
    from resolver.pids.pidmap import PidMap
    from resolver.pids.source import PidSource

#: CPU seconds of one refresh in which walks are begun or gone on with: others wait for that, and for the rest that a
#: long pass is followed by. And of the last one at least.
_WALK_SECONDS, _LEAST_SECONDS = 0.003, 0.002
#: Walks that were begun and not ended, some 100 KiB each; and seconds until one that nobody goes on with is forgotten.
_MOST_WALKS, _FORGOTTEN_SECONDS = 16, 60.0


class OwnerWalk:
    """A search among all processes with one number, as far as it got. ``at``: when it was last gone on with."""

    def __init__(self, source: PidSource, seen: Hashable, ns_pid: int) -> None:
        self.about = source, seen, ns_pid
        self.left = source.everywhere(ns_pid)  # 0 where nobody has that number
        self.held: tuple[int, ...] = ()  # the one that was taken from it and not asked
        self.concerned = set[int]()  # those that have anything to do with the place
        self.at = 0.0


class OwnerWalks:
    """Those that were begun and not ended, ``going`` by place, and what all of them may cost in one refresh.

    ``bounded=False``: they take the time that they take.
    """

    def __init__(self, pidmap: PidMap, clock: Callable[[], float]) -> None:
        self.bounded = True
        self.going: dict[Place, OwnerWalk] = {}
        self._pidmap = pidmap
        self._clock = clock
        self._taken: dict[Place, int] = {}  # in which refresh a walk was begun or gone on with for it
        self._began = (-1, 0.0)  # the refresh, and the CPU time of the first one in it

    def may_go_on(self, place: Place, *, again: bool = False, seconds: float = _WALK_SECONDS) -> bool:
        """Whether a walk may go on now: with each refresh once for a place, and for a limited time."""
        epoch = self._pidmap.refreshes
        if not self.bounded:
            return True
        now = time.thread_time()
        if self._began[0] != epoch:
            self._began = epoch, now
            self._taken = {each: at for each, at in self._taken.items() if at == epoch}
        if (self._taken.get(place) == epoch and not again) or now - self._began[1] > seconds:
            return False
        self._taken[place] = epoch
        return True

    def until(self, seconds: float = _WALK_SECONDS) -> float:
        """Until when one walk goes on in this refresh, in this thread's CPU time; for a moment at least."""
        if not self.bounded:
            return math.inf
        return max(self._began[1] + seconds, time.thread_time() + _LEAST_SECONDS)

    def walk(self, place: Place, seen: Hashable, ns_pid: int) -> OwnerWalk | None:
        """The place's walk, begun anew where it is about something else or is old; None where there is no room."""
        now, about = self._clock(), (self._pidmap.source, seen, ns_pid)
        walk = self.going.get(place)
        if walk is None or walk.about != about or now - walk.at > _FORGOTTEN_SECONDS:
            if not self._room(place, now):
                return None
            walk = self.going[place] = OwnerWalk(*about)
        walk.at = now
        return walk

    def _room(self, place: Place, now: float) -> bool:
        """Whether there is room for one more walk, or there is one of this place already."""
        if len(self.going) >= _MOST_WALKS:
            self.going = {
                each: walk for each, walk in self.going.items() if now - walk.at <= _FORGOTTEN_SECONDS
            }
        return place in self.going or len(self.going) < _MOST_WALKS

    def ended(self, place: Place) -> None:
        """There is nothing to go on with for this place."""
        self.going.pop(place, None)

    def forget(self, place: Place) -> None:
        """The region of that place is gone."""
        self.going.pop(place, None)
        self._taken.pop(place, None)
