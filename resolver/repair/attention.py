"""When each region is read next: often after a process attached to it, rarely while all is right.

A process that attaches takes its slot within milliseconds, and guesses its host PID once CUDA has started: up to
seconds later, and by a store through its mapping, which the kernel does not report. So the region is read often
for as long as that takes. After that it is read by the clock, as long as there is something to wait for or the next
process would not be reported, else rarely.
"""

from __future__ import annotations

from math import inf
from operator import attrgetter

#: Seconds since a process attached -> seconds until the next look. After these the clock's interval, until `STARTED`.
_STEPS = ((3.0, 0.02), (20.0, 0.04))
#: Seconds after which a process that attached has surely started.
STARTED = 60.0
#: Seconds between two reads of one region, whatever its tenant does; the first one after an attachment comes at once.
_SHORTEST = 0.004
#: Until a region is read after a program that wrote into it has closed it. The slot writer is one, too.
_LET_GO = 0.05
#: A region where all is right, and whose changes the kernel reports, is read once in so many intervals.
QUIET_INTERVALS = 16
_LONG_AGO = -inf


_last = attrgetter("last")


class _Look:
    """Changed in place: each pass does that for each region that it reads."""

    __slots__ = ("attached", "due", "last", "path")

    def __init__(self, path: str, attached: float) -> None:
        self.path = path
        self.due = self.last = _LONG_AGO
        self.attached = attached


class Attention:
    """All regions, by path. Times are on the monotonic clock."""

    def __init__(self) -> None:
        self._looks: dict[str, _Look] = {}

    def attached(self, path: str, now: float) -> None:
        """Somebody wrote into the file: a process that attaches."""
        known = self._looks.get(path)
        if known is not None:
            known.due = min(known.due, max(now, known.last + _SHORTEST))
            known.attached = now

    def let_go(self, path: str, now: float) -> None:
        """Somebody who could write into the file has closed it: a process that ended, if nothing else."""
        self.by(path, now + _LET_GO)

    def by(self, path: str, when: float) -> None:
        """Look at it at this time at the latest."""
        known = self._looks.get(path)
        if known is not None and when < known.due:
            known.due = when

    def put_off(self, path: str, when: float) -> None:
        """It is not read before this time."""
        known = self._looks.get(path)
        if known is not None:
            known.due = max(known.due, when)

    def everything(self, when: float) -> None:
        """Look at every region at this time at the latest."""
        for look in self._looks.values():
            look.due = min(look.due, when)

    def due(self, until: float) -> list[str]:
        """Whose time comes until then, who waits longest first; a new region's is at once."""
        due = [look for look in self._looks.values() if look.due <= until]
        due.sort(key=_last)
        return [look.path for look in due]

    def found(self, path: str, attached: float) -> None:
        """A new region, to be read at once; the last process attached to it then, by the file's time."""
        self._looks[path] = _Look(path, attached)

    def looked(self, path: str, now: float, interval: float, *, watched: bool, quiet_until: float) -> None:
        """It was read: when it is due again.

        ``watched``: the kernel reports its processes. Nothing is to be done before ``quiet_until`` as far as is known.
        """
        known = self._looks.get(path)
        if known is None:
            known = self._looks[path] = _Look(path, now)
        age = now - known.attached
        if watched and age >= STARTED:
            pause, longest = quiet_until - now, QUIET_INTERVALS * interval
            # Comparisons, as this is done for each region that is read: a call of `min` costs more than all of it.
            if pause < interval:
                pause = interval
            elif pause > longest:
                pause = longest
        else:
            often = next((pause for until, pause in _STEPS if age < until), interval)
            # At first as long again as it is since the event: the slot comes milliseconds after it.
            pause = min(interval, often, max(_SHORTEST, age))
        known.due, known.last = now + pause, now

    def forget(self, path: str) -> None:
        """It is gone."""
        self._looks.pop(path, None)

    def next(self) -> float:
        """When the next one is due; never, without regions."""
        return min([look.due for look in self._looks.values()], default=inf)
