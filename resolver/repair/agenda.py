"""Schedule of region reads, directory listings and passes.

A process takes its slot milliseconds after attaching. It guesses its host PID when CUDA has started, seconds later, by
a store that the kernel does not report: regions are read often until then, later every interval if work is pending or
attaching goes unreported, else rarely.
"""

from __future__ import annotations

import time
from math import frexp, inf
from typing import TYPE_CHECKING

from resolver.base.budget import Slices

if TYPE_CHECKING:
    from collections.abc import Container

    from resolver.base.budget import Budgets
    from resolver.config import Settings
    from resolver.gpu.attribution import Joined
    from resolver.hami.hostpid_policy import HostpidPolicy

#: Seconds since a process attached -> seconds until the next look. After these the clock's interval, until `STARTED`.
_STEPS = ((3.0, 0.02), (20.0, 0.1))
#: Where each slot is right the pause grows with the time since then, by this share up to so many seconds.
_GROWTH, _GROWN = 1 / 8, 2.0
#: Seconds after which a process that attached has surely started.
STARTED = 60.0
#: Seconds between two reads of one region, whatever its tenant does; the first one after an attachment comes at once.
_SHORTEST = 0.004
#: Intervals between reads of a right region whose changes the kernel reports.
QUIET_INTERVALS = 16
#: Seconds between listings of every directory; the second if the kernel reports changes in all.
_DISCOVER_EVERY, _DISCOVER_WATCHED = 1.0, 120.0
#: Seconds that no container is charged for: a region was only read.
_TRIFLE_SECONDS = 5e-5
#: Work that is due so soon is done at once.
_TOGETHER_SECONDS = 0.005


class Pass:
    """One pass's inputs and cost so far. ``patient``: budgets count."""

    def __init__(
        self,
        settings: Settings,
        policy: HostpidPolicy,
        joined: Joined,
        budgets: Budgets,
        *,
        patient: bool,
        everything: bool,
    ) -> None:
        self.now = time.monotonic()
        self.settings, self.policy, self.joined = settings, policy, joined
        self.patient, self.everything = patient, everything
        self.ahead = _TOGETHER_SECONDS  # work due within so many seconds is done now
        self.slices = Slices()
        self.spent = 0.0  # seconds on the loop
        self._budgets = budgets

    def spend(self, seconds: float) -> None:
        """Charge the pass alone."""
        self.spent += seconds

    def charge(self, container: str, seconds: float) -> None:
        """Charge the pass and, unless negligible, the container."""
        self.spent += seconds
        if seconds >= _TRIFLE_SECONDS:
            self._budgets.spend(container, seconds)

    def over(self, container: str) -> bool:
        """Check if this container must wait."""
        return self.patient and self._budgets.over(container)


class _Look:
    """One region's entry, due at ``regular``, or at ``early`` after an event since the last read."""

    __slots__ = ("account", "attached", "early", "last", "path", "regular")

    def __init__(self, path: str, account: str, attached: float) -> None:
        self.path, self.account, self.attached = path, account, attached
        self.regular, self.early, self.last = -inf, inf, -inf


def _shared(now: float, pause: float) -> float:
    """Shorten a pause by a quarter at most: it ends at the same moments as other regions' pauses."""
    step = 2.0 ** (frexp(pause / 4)[1] - 1)
    return (now + pause) // step * step - now


class Agenda:
    """Regions by path. Times are monotonic."""

    def __init__(self) -> None:
        self.not_before = 0.0  # events bring no pass further forward
        self._looks: dict[str, _Look] = {}
        self._next_discovery = 0.0
        self._next_refresh = 0.0  # of the discoveries, by the clock
        self._lost_at = 0.0  # when everything was, or is to be, checked for want of events

    def start_over(self) -> None:
        """List and read everything in the next pass."""
        self._next_discovery = self._next_refresh = 0.0
        self.everything(0.0)

    def rest_after(self, cost: float, interval: float, now: float) -> None:
        """Rest twice as long as the pass took, despite events."""
        self.not_before = now + min(2 * cost, interval)

    def search_due(self, now: float) -> tuple[bool, bool]:
        """Return whether to list all directories and whether to refresh discoveries."""
        full = now >= self._next_discovery
        return full, full or now >= self._next_refresh

    def searched(self, now: float, interval: float, *, full: bool, watched: bool) -> float:
        """Note a refresh; return seconds until the next. ``watched``: the kernel reports new files."""
        if full:
            self._next_discovery = now + (_DISCOVER_WATCHED if watched else _DISCOVER_EVERY)
        pause = interval * (QUIET_INTERVALS if watched else 1)
        self._next_refresh = now + pause
        return pause

    def events_lost(self, now: float) -> None:
        """Check everything, at a limited rate: tenants can cause losses."""
        if now > self._lost_at:  # else the check that is to come will do
            self._lost_at = max(now, self._lost_at + _DISCOVER_EVERY)
        self.everything(self._lost_at)
        self._next_discovery = min(self._next_discovery, self._lost_at)

    def next_pass(self, wait: float, wanted: float, now: float, going: Container[str] = ()) -> float:
        """Return the next pass's time: in ``wait`` seconds, or earlier at ``wanted``; see `next`."""
        clock = min(self._next_refresh, self._next_discovery, now + wait)
        return max(min(clock, self.next(going), wanted), self.not_before)

    def attached(self, path: str, now: float) -> None:
        """Note a write to the file: a process attached."""
        look = self._look(path)
        look.early, look.attached = min(look.early, max(now, look.last + _SHORTEST)), now

    def by(self, path: str, when: float) -> None:
        """Read the region by this time."""
        look = self._look(path)
        look.early = min(look.early, when)

    def put_off(self, path: str, when: float) -> None:
        """Read the region no earlier."""
        look = self._look(path)
        look.regular, look.early = max(min(look.regular, look.early), when), inf

    def _look(self, path: str) -> _Look:
        """Return a region's entry; a dummy if unknown."""
        return self._looks.get(path) or _Look(path, "", 0.0)

    def everything(self, when: float) -> None:
        """Read every region by this time."""
        for look in self._looks.values():
            look.early = min(look.early, when)

    def due(self, until: float, going: Container[str] = ()) -> list[str]:
        """Return due paths, least recently read first, of no ``going`` account."""
        looks = self._looks.values()
        due = [look for look in looks if look.regular <= until or look.early <= until]
        due = [look for look in due if look.account not in going]
        due.sort(key=lambda look: look.last)
        return [look.path for look in due]

    def found(self, path: str, attached: float, account: str = "") -> None:
        """Add a region, due at once; ``attached`` is its last process's time."""
        self._looks[path] = _Look(path, account, attached)

    def taken(self, path: str, now: float) -> None:
        """Note a read; a later event makes the region due again."""
        look = self._look(path)
        look.regular, look.early, look.last = now + _SHORTEST, inf, now

    def looked(
        self,
        path: str,
        now: float,
        interval: float,
        *,
        watched: bool,
        quiet_until: float,
        right: bool = False,
        started: bool = False,
    ) -> None:
        """Schedule the next read after one at ``now``, and after the turn that followed.

        ``watched``: the kernel reports attaching processes. Before ``quiet_until`` (0: now) no work is expected.
        ``right``: the slot of the last process is right, and only its guess may change that, unless it has ``started``.
        """
        entry = self._look(path)
        age = now - entry.attached
        if watched and (started or age >= STARTED):
            pause = max(interval, min(quiet_until - now, QUIET_INTERVALS * interval))
        else:
            often = next((pause for until, pause in _STEPS if age < until), interval)
            # At first as long again as it is since the event: the slot comes milliseconds after it.
            pause = min(interval, often, max(_SHORTEST, age))
            if watched and right:
                pause = max(
                    pause, min(_shared(now, min(_GROWN, _GROWTH * age)), max(interval, quiet_until - now))
                )
        entry.regular = now + pause

    def forget(self, path: str) -> None:
        """Remove a region."""
        self._looks.pop(path, None)

    def next(self, going: Container[str] = ()) -> float:
        """Return when the next region of no ``going`` account is due, or infinity."""
        looks = (
            [look for look in self._looks.values() if look.account not in going]
            if going
            else self._looks.values()
        )
        regular, early = [look.regular for look in looks], [look.early for look in looks]
        return min(regular + early, default=inf)
