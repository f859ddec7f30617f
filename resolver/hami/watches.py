"""Callbacks for changes to tenants' files: `resolver.linux.inotify` for many containers.

Each attaching process opens its cache file and writes a byte, so no polling is needed; lost events cost only time.
Events are merged and charged to their container, which is ignored for a while after too many.
"""

import time
from collections import Counter
from collections.abc import Callable

from resolver.base.budget import Account, Budgets
from resolver.base.counters import CounterName
from resolver.linux.inotify import IGNORED, OVERFLOW, Inotify, why_not

_TRY_AGAIN = 30.0  # seconds until a retry after a limit was reached


class _Watch:
    """A file or directory. ``on_event`` gets the event's mask."""

    def __init__(self, number: int, record: Account, on_event: Callable[[int], None]) -> None:
        self.number, self.record, self.on_event = number, record, on_event


class Watches:
    """Files and directories by path. ``why_not``: why some are unwatched."""

    def __init__(
        self,
        budgets: Budgets,
        counters: Counter[str],
        clock: Callable[[], float] = time.monotonic,
        make: Callable[[], Inotify] = Inotify,
    ) -> None:
        self.why_not = ""
        self._budgets, self._counters, self._clock = budgets, counters, clock
        self._watched: dict[str, _Watch] = {}
        self._keys: dict[int, set[str]] = {}  # by watch; one inode may have several keys
        self._full_until = 0.0
        for name in ("watch_events", "watch_overflows", "watch_floods"):
            counters[name] += 0
        self._make = make
        self._inotify: Inotify | None = None
        self._open()

    def __contains__(self, key: object) -> bool:
        return key in self._watched

    @property
    def fd(self) -> int:
        """Descriptor, readable when `take` has work; -1 if nothing can be watched."""
        return self._inotify.fd if self._inotify is not None else -1

    def _open(self) -> None:
        """Open inotify; fails if the user's quota is used up."""
        try:
            self._inotify = self._make()
        except OSError as error:
            self._full_until, self.why_not = self._clock() + _TRY_AGAIN, why_not(error)
        else:
            self._full_until, self.why_not = 0.0, ""

    def watch(self, key: str, account: str, fd: int, mask: int, on_event: Callable[[int], None]) -> bool:
        """Call ``on_event`` for events of the file open as ``fd``, charged to ``account``; True if watched now.

        Call it with each check; it costs nothing if watched.
        """
        if key in self._watched:
            return True
        if self._inotify is None or fd < 0:
            return False
        now, record = self._clock(), self._budgets.of(account)
        if now < max(self._full_until, record.deaf_until):
            return False
        try:
            number = self._inotify.add(fd, mask)
        except OSError as error:
            self._full_until = now + _TRY_AGAIN
            self.why_not = why_not(error)
            return False
        if self._full_until:
            self._full_until, self.why_not = 0.0, ""
        self._watched[key] = _Watch(number, record, on_event)
        self._keys.setdefault(number, set()).add(key)
        return True

    def forget(self, key: str) -> None:
        watched = self._watched.pop(key, None)
        if watched is None:
            return
        keys = self._keys.get(watched.number, set())
        keys.discard(key)
        if not keys and self._inotify is not None:
            self._keys.pop(watched.number, None)
            self._inotify.remove(watched.number)

    def take(self) -> bool:
        """Read some events and call back; True if some were lost and everything needs a check.

        ``fd`` stays readable while more remain.
        """
        if self._inotify is None:
            return False
        began, lost = time.thread_time(), False
        events = Counter(self._inotify.read())
        self._counters[CounterName.WATCH_EVENTS] += events.total()
        records: Counter[Account] = Counter()
        for (number, mask), count in events.items():
            if mask & OVERFLOW:
                self._counters[CounterName.WATCH_OVERFLOWS] += 1
                lost = True
            for place, key in enumerate(list(self._keys.get(number, ()))):
                watched = self._watched[key]
                if mask & IGNORED:
                    self.forget(key)
                watched.on_event(mask)
                records[watched.record] += 0 if place else count  # several keys count once
        if events:
            self._charge(records, (time.thread_time() - began) / events.total())
        return lost

    def _charge(self, records: Counter[Account], seconds: float) -> None:
        """Charge each container ``seconds`` per event; unwatch one that caused too many."""
        now = self._clock()
        for record, count in records.items():
            record.spend(seconds * count, now)
            keys = [key for key, watched in self._watched.items() if watched.record is record]
            if keys and record.flooded(count, now):
                self._counters[CounterName.WATCH_FLOODS] += 1
                for key in keys:
                    self.forget(key)

    def tidy(self) -> None:
        """Retry refused watches; call occasionally."""
        if self._inotify is None and self._clock() >= self._full_until:
            self._open()

    def close(self) -> None:
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None
        self._watched.clear()
        self._keys.clear()
