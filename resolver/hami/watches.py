"""Who is told at once when a tenant does something with its files: `resolver.linux.inotify` for many containers.

Each process that attaches opens its cache file and writes a byte, so nobody has to look whether there is one. That
something happened is all that is taken from an event; what, is read from the files. So lost events cost time and
nothing else, and what is not watched is looked at by the clock.

A tenant can make events as fast as it likes. They are merged, reading them is at its container's expense, and from one
that makes too many nothing is heard for a while, which leaves the queue to the others.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from resolver.counters import CounterName
from resolver.linux.inotify import IGNORED, OVERFLOW, Inotify, why_not
from resolver.retry import doubled

if TYPE_CHECKING:
    from collections.abc import Callable

    from resolver.budget import Budgets

#: Events that one container may cause at once, and how many more a second. A process makes two: it comes, and goes.
BURST, RATE = 256.0, 32.0
#: Seconds that nothing is heard from a container that made more; doubled each time, forgotten after a quiet while.
FIRST_SILENCE, LONGEST_SILENCE = 1.0, 64.0
_TRY_AGAIN = 30.0  # seconds, where a limit was used up


class _Teller:
    """One container: what it may still tell."""

    __slots__ = ("at", "keys", "left", "silences", "until")

    def __init__(self, now: float) -> None:
        self.keys: set[str] = set()
        self.left, self.at = BURST, now
        self.silences = 0
        self.until = 0.0  # nothing is heard before this

    def takes(self, count: int, now: float) -> bool:
        """Whether it may cause so many events now."""
        self.left = min(BURST, self.left + (now - self.at) * RATE) - count
        self.at = now
        return self.left >= 0


class _Watched:
    """One file or directory. ``tell`` is called with what happened."""

    __slots__ = ("account", "number", "tell")

    def __init__(self, number: int, account: str, tell: Callable[[int], None]) -> None:
        self.number, self.account, self.tell = number, account, tell


class Watches:
    """Files and directories by a key, which is a path: no two have the same.

    ``why_not`` says why some are not watched that should be; empty while all is well. ``counters`` gets
    ``watch_events``, ``watch_overflows`` and ``watch_floods``.
    """

    def __init__(
        self,
        budgets: Budgets,
        counters: Counter[str],
        clock: Callable[[], float] = time.monotonic,
        make: Callable[[], Inotify] = Inotify,
    ) -> None:
        self.why_not = ""
        self._budgets, self._counters, self._clock = budgets, counters, clock
        self._watched: dict[str, _Watched] = {}
        self._keys: dict[int, set[str]] = {}  # by watch: the same inode may be known by several
        self._tellers: dict[str, _Teller] = {}
        self._silenced: dict[
            int, str
        ] = {}  # whose watches were taken away, as long as events of theirs may come
        self._full_until = 0.0
        for name in ("watch_events", "watch_overflows", "watch_floods"):
            counters[name] += 0
        self._inotify: Inotify | None = None
        try:
            self._inotify = make()
        except OSError as error:
            self.why_not = why_not(error)

    def __len__(self) -> int:
        return len(self._watched)

    def __contains__(self, key: object) -> bool:
        return key in self._watched

    @property
    def fd(self) -> int:
        """Readable while there is something to `take`; -1 where nothing can be watched."""
        return self._inotify.fd if self._inotify is not None else -1

    def watch(self, key: str, account: str, fd: int, mask: int, tell: Callable[[int], None]) -> bool:
        """Have ``tell`` called when something happens to what is open as ``fd``, at the expense of ``account``.

        Whether it is watched now. To be called with each look; it costs nothing if it is watched already.
        """
        if key in self._watched:
            return True
        if self._inotify is None or fd < 0:
            return False
        now = self._clock()
        teller = self._tellers.get(account)
        if now < self._full_until or (teller is not None and now < teller.until):
            return False
        try:
            number = self._inotify.add(fd, mask)
        except OSError as error:
            self._full_until = now + _TRY_AGAIN
            self.why_not = why_not(error)
            return False
        if self._full_until:
            self._full_until, self.why_not = 0.0, ""
        if teller is None:
            teller = self._tellers[account] = _Teller(now)
        teller.keys.add(key)
        self._watched[key] = _Watched(number, account, tell)
        self._keys.setdefault(number, set()).add(key)
        return True

    def forget(self, key: str) -> None:
        """Watch it no more; nothing happens if it is not."""
        watched = self._watched.pop(key, None)
        if watched is None:
            return
        teller = self._tellers[watched.account]
        teller.keys.discard(key)
        if not teller.keys and not teller.silences:
            del self._tellers[watched.account]
        keys = self._keys.get(watched.number, set())
        keys.discard(key)
        if not keys and self._inotify is not None:
            self._keys.pop(watched.number, None)
            self._inotify.remove(watched.number)

    def take(self) -> bool:
        """Read some of the events and tell of them; whether some were lost, so that everything is to be looked at.

        What is left comes with the next call: ``fd`` stays readable.
        """
        if self._inotify is None:
            return False
        began, lost = time.thread_time(), False
        events = self._inotify.read()
        counts: Counter[int] = Counter()
        happened: dict[int, int] = {}
        for number, mask in events:
            counts[number] += 1
            happened[number] = happened.get(number, 0) | mask
        self._counters[CounterName.WATCH_EVENTS] += len(events)
        accounts: Counter[str] = Counter()
        for number, mask in happened.items():
            if mask & OVERFLOW:
                self._counters[CounterName.WATCH_OVERFLOWS] += 1
                lost = True
                continue
            account = self._silenced.get(number, "")
            for key in list(self._keys.get(number, ())):
                watched = self._watched[key]
                account = watched.account
                if mask & IGNORED:
                    self.forget(key)
                watched.tell(mask)
            if account:
                accounts[account] += counts[number]
            if mask & IGNORED:
                self._silenced.pop(number, None)
        self._charge(accounts, time.thread_time() - began)
        return lost

    def _charge(self, accounts: Counter[str], seconds: float) -> None:
        """Each pays for its part; who told too much is not heard for a while."""
        now, total = self._clock(), accounts.total()
        for account, count in accounts.items():
            self._budgets.spend(account, seconds * count / total)
            teller = self._tellers.get(account)
            if teller is not None and teller.keys and not teller.takes(count, now):
                self._silence(account, teller, now)

    def _silence(self, account: str, teller: _Teller, now: float) -> None:
        if now - teller.until > 2 * LONGEST_SILENCE:
            teller.silences = 0
        teller.until = now + doubled(FIRST_SILENCE, LONGEST_SILENCE, teller.silences)
        teller.silences += 1
        teller.left = BURST
        self._counters[CounterName.WATCH_FLOODS] += 1
        for key in list(teller.keys):
            self._silenced[self._watched[key].number] = account
            self.forget(key)

    def tidy(self) -> None:
        """Forget who was not heard of for long; to be called now and then."""
        now = self._clock()
        self._tellers = {
            account: teller
            for account, teller in self._tellers.items()
            if teller.keys or now - teller.until < 2 * LONGEST_SILENCE
        }

    def close(self) -> None:
        """Give everything back."""
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None
        self._watched.clear()
        self._keys.clear()
        self._tellers.clear()
        self._silenced.clear()
