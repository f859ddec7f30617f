"""Searches for an owner among all processes of the node, where no PID namespace of the slot's container is known.

A tenant chooses how many there are, so a search goes on for a moment with each refresh of the map, and proves nothing
before its end.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from resolver.hami.discovery import Proof
    from resolver.pids.pidmap import PidMap
    from resolver.pids.source import PidSource

#: Seconds of one refresh in which walks are begun or gone on with: others wait for that, and for the rest that a
#: long pass is followed by. And of the last one at least.
_WALK_SECONDS, _LEAST_SECONDS = 0.02, 0.01
#: Walks that were begun and not ended, some 100 KiB each; and seconds until one that nobody goes on with is forgotten.
_MOST_WALKS, _FORGOTTEN_SECONDS = 16, 60.0


class OwnerWalk:
    """A search among all processes with one number, as far as it got. ``at``: when it was last gone on with."""

    def __init__(self, source: PidSource, seen: Hashable, ns_pid: int) -> None:
        self.about = source, seen, ns_pid
        self.left = source.everywhere(ns_pid)  # 0 where nobody has that number
        self.held: tuple[int, ...] = ()  # the one that was taken from it and not asked
        self.concerned = set[int]()  # those that have anything to do with the region
        self.at = 0.0


class OwnerWalks:
    """Unfinished walks (``going``), with the total cost allowed in one refresh.

    ``bounded=False``: without a limit.
    """

    def __init__(self, pidmap: PidMap, clock: Callable[[], float]) -> None:
        self.bounded = True
        self.going: dict[Proof, OwnerWalk] = {}
        self._pidmap = pidmap
        self._clock = clock
        self._taken: dict[Proof, int] = {}  # in which refresh a walk was begun or gone on with for it
        self._began = (-1, 0.0)  # the refresh, and when the first one in it began

    def may_go_on(self, proof: Proof, *, again: bool = False, seconds: float = _WALK_SECONDS) -> bool:
        """Check if a walk may go on now: once per refresh and region, and for a limited time."""
        epoch = self._pidmap.refreshes
        if not self.bounded:
            return True
        now = time.monotonic()
        if self._began[0] != epoch:
            self._began = epoch, now
            self._taken = {each: at for each, at in self._taken.items() if at == epoch}
        if (self._taken.get(proof) == epoch and not again) or now - self._began[1] > seconds:
            return False
        self._taken[proof] = epoch
        return True

    def until(self, seconds: float = _WALK_SECONDS) -> float:
        """Return the time until which one walk may go on in this refresh; a moment at least."""
        if not self.bounded:
            return math.inf
        return max(self._began[1] + seconds, time.monotonic() + _LEAST_SECONDS)

    def walk(self, proof: Proof, seen: Hashable, ns_pid: int) -> OwnerWalk | None:
        """Return the walk for a region, a new one if its subject changed or it is old; None if there is no room."""
        now, about = self._clock(), (self._pidmap.source, seen, ns_pid)
        walk = self.going.get(proof)
        if walk is None or walk.about != about or now - walk.at > _FORGOTTEN_SECONDS:
            if not self._room(proof, now):
                return None
            walk = self.going[proof] = OwnerWalk(*about)
        walk.at = now
        return walk

    def _room(self, proof: Proof, now: float) -> bool:
        """Check if there is room for one more walk, or one of this region already."""
        if len(self.going) >= _MOST_WALKS:
            self.going = {
                each: walk for each, walk in self.going.items() if now - walk.at <= _FORGOTTEN_SECONDS
            }
        return proof in self.going or len(self.going) < _MOST_WALKS

    def ended(self, proof: Proof) -> None:
        """Remove the region's walk."""
        self.going.pop(proof, None)

    def forget(self, proof: Proof) -> None:
        """Forget a vanished region."""
        self.going.pop(proof, None)
        self._taken.pop(proof, None)
