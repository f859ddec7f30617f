"""When each region is looked at next: often after a process attached to it, rarely while all is right.

A process that attaches takes its slot within milliseconds, and guesses its host PID once CUDA has started: up to
seconds later, and by a store through its mapping, which nobody is told of. So the region is looked at often for as long
as that takes. After that it is looked at by the clock, as long as there is something to wait for or nobody would tell
of the next process, else rarely.
"""

from __future__ import annotations

from typing import NamedTuple

#: Seconds since a process attached -> seconds until the next look. After these the clock's interval, until `STARTED`.
_STEPS = ((3.0, 0.02), (20.0, 0.04))
#: Seconds after which a process that attached has surely started.
STARTED = 60.0
#: Seconds between two looks at one region, whatever its tenant does; the first one after an attachment comes at once.
_SHORTEST = 0.004
#: Until a region is looked at of which a program that wrote into it has let go. The slot writer is one, too.
_LET_GO = 0.05
#: A region where all is right, and of which the kernel tells, is looked at once in so many intervals.
QUIET_INTERVALS = 16
_LONG_AGO = float("-inf")


class _Look(NamedTuple):
    due: float
    last: float
    attached: float


class Attention:
    """All regions, by path. Times are on the monotonic clock."""

    def __init__(self) -> None:
        self._looks: dict[str, _Look] = {}

    def attached(self, path: str, now: float) -> None:
        """Somebody wrote into the file: a process that attaches."""
        known = self._looks.get(path)
        if known is not None:
            due = min(known.due, max(now, known.last + _SHORTEST))
            self._looks[path] = _Look(due, known.last, now)

    def let_go(self, path: str, now: float) -> None:
        """Somebody who could write into the file has closed it: a process that ended, if nothing else."""
        self.by(path, now + _LET_GO)

    def by(self, path: str, when: float) -> None:
        """Look at it at this time at the latest."""
        known = self._looks.get(path)
        if known is not None and when < known.due:
            self._looks[path] = known._replace(due=when)

    def put_off(self, path: str, when: float) -> None:
        """It is not looked at before this time."""
        known = self._looks.get(path)
        if known is not None:
            self._looks[path] = known._replace(due=max(known.due, when))

    def everything(self, when: float) -> None:
        """Look at every region at this time at the latest."""
        self._looks = {path: look._replace(due=min(look.due, when)) for path, look in self._looks.items()}

    def since(self, path: str) -> float:
        """When it was last looked at; long ago if never."""
        known = self._looks.get(path)
        return known.last if known is not None else _LONG_AGO

    def is_due(self, path: str, now: float) -> bool:
        """Whether it is its time; a new region's is at once."""
        known = self._looks.get(path)
        return known is None or known.due <= now

    def found(self, path: str, attached: float) -> None:
        """A new region, to be looked at at once; the last process attached to it then, by the file's time."""
        self._looks[path] = _Look(_LONG_AGO, _LONG_AGO, attached)

    def looked(self, path: str, now: float, interval: float, *, watched: bool, quiet_until: float) -> None:
        """It was looked at: when again.

        ``watched``: the kernel reports its processes. Nothing is to be done before ``quiet_until`` as far as is known.
        """
        known = self._looks.get(path) or _Look(now, _LONG_AGO, now)
        age = now - known.attached
        often = next((pause for until, pause in _STEPS if age < until), interval)
        if age >= STARTED and watched:
            pause = min(max(interval, quiet_until - now), QUIET_INTERVALS * interval)
        else:
            # At first as long again as it is since the event: the slot comes milliseconds after it.
            pause = min(interval, often, max(_SHORTEST, age))
        self._looks[path] = _Look(now + pause, now, known.attached)

    def forget(self, path: str) -> None:
        """It is gone."""
        self._looks.pop(path, None)

    def next(self) -> float:
        """When the next one is due; never, without regions."""
        if not self._looks:
            return float("inf")
        return min(look.due for look in self._looks.values())
