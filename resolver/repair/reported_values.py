"""The loop closed: whether what a slot says of a device is what NVML says, and whose doing it is if not.

HAMi's watcher wakes about every 120 ms and writes ``sm_util`` of its container's slots, as far as its release does
that: up to 2.9.0 it zeroes the first device alone, so that on the others a process's last value stands when it idles;
2.5 and 2.6 add there; 2.4.1 zeroes and fills nothing in. Our own number is older than a working watcher's: up to a
second, NVML's interval. So a difference alone says nothing. What counts, for each slot and device:

*stale*: the value has not moved since NVML's answer, nor in two of a watcher's ticks after it, and differs. A watcher
  that worked would have taken in by then what NVML said. Put right once; what moves by itself is left to who moves it.
*contested*: the value that we wrote was replaced by one that NVML's next answer contradicts as well; or it is more than
  a device can do; or it grew and grew, above what NVML said before and after. Somebody's watcher works, and wrongly.
  Put right whenever it differs, until that watcher was right by itself at two of NVML's answers in a row.

Values that differ by `NEAR` points or less are the same, but 0 is only 0: samples jitter, and idle is idle. A value of
our own, which nobody else touches, is kept equal to NVML's.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from resolver.config import HostpidNamespace
from resolver.hami.hostpid_policy import Origin

if TYPE_CHECKING:
    from resolver.hami.hostpid_policy import HostpidPolicy

#: Seconds: two ticks of a watcher of HAMi's, 120 ms each.
TWO_TICKS = 0.24
NEAR = 3  # points
_PEACE = 2  # answers in a row at which a watcher was right by itself
#: For so many seconds a value must have been contested, or wrong and not ours to write, before that is reported.
TOLD_AFTER = 3.0
_NEVER = float("-inf")


class Verdict(Enum):
    """What to do about a value."""

    RIGHT = "right"
    WAIT = "wait"  # it differs, and it is too early to say whose doing that is
    WRONG = "wrong"


def differs(present: int, actual: int) -> bool:
    """Whether a slot's value is another than NVML's, both in per cent."""
    return abs(present - actual) > NEAR or (present == 0) != (actual == 0)


class Word:
    """What is known of one slot's ``sm_util`` on one device. Times are of a monotonic clock."""

    __slots__ = (
        "actual", "answered", "contested", "contested_since", "contradicted", "lost", "moved_at", "ours", "own",
        "right", "rising", "seen", "wrong_since",
    )  # fmt: skip

    def __init__(self, present: int) -> None:
        self.seen = self.own = present  # own: the last value that was not ours
        self.actual: int | None = None  # NVML's, when it was last judged
        self.moved_at = _NEVER  # by itself
        self.answered = _NEVER
        self.ours = False  # the value that stands there
        self.lost = False  # ours was replaced, and nothing since then was right by itself
        self.rising: float | None = None  # since then it never fell, and was above NVML's at every look
        self.contradicted: float | None = (
            None  # when NVML first said another value than this, which stands since before
        )
        self.contested = False
        self.contested_since = 0.0
        self.wrong_since: float | None = None
        self.right = 0

    def wrote(self, value: int) -> None:
        """We put this value there."""
        self.seen, self.ours, self.rising, self.contradicted, self.wrong_since = value, True, None, None, None

    def see(self, present: int, now: float) -> None:
        """Take in what stands there; whatever is not the last known value came there by itself."""
        if present != self.seen:
            self.lost = self.lost or self.ours
            self.ours = False
            self.seen = self.own = present
            self.moved_at, self.contradicted = now, None

    def judge(self, present: int, actual: int, answered: float, since: float, now: float) -> Verdict:
        """What to do about ``present``, where NVML said ``actual`` in the answer that came at ``answered``.

        ``since`` is from when on a watcher could have worked: its slot's ``hostpid`` is right.
        """
        before, new = self.seen, answered > self.answered
        self.see(present, now)
        self.answered, self.actual = answered, actual
        if new and self.contested:
            self._make_peace(actual, now)
        if self._grows(before, present, actual, new=new, now=now) or present > 100:
            self._contest(now)
        if present == actual or (not self.ours and not differs(present, actual)):
            if present and not self.ours:
                self.lost = False
            self.wrong_since = self.contradicted = None
            return Verdict.RIGHT
        if not self.contested and not self.ours:
            if self.moved_at >= answered:
                return Verdict.WAIT
            if self.contradicted is None:
                self.contradicted = answered
            if now - max(self.contradicted, since) < TWO_TICKS:
                return Verdict.WAIT
            if self.lost:
                self._contest(now)
        if self.wrong_since is None:
            self.wrong_since = now
        return Verdict.WRONG

    def _contest(self, now: float) -> None:
        if not self.contested:
            self.contested, self.contested_since, self.right = True, now, 0

    def _make_peace(self, actual: int, now: float) -> None:
        fresh = now - self.moved_at <= 2 * TWO_TICKS
        self.right = self.right + 1 if fresh and self.own and not differs(self.own, actual) else 0
        if self.right >= _PEACE:
            self.contested = self.lost = False

    def _grows(self, before: int, present: int, actual: int, *, new: bool, now: float) -> bool:
        """Whether it grew above what NVML said both before and after; a load that rises is under the later answer."""
        above = present > actual + NEAR
        if not above or present < before or (new and before <= actual + NEAR) or self.rising is None:
            self.rising = now if above and not self.ours else None
            return False
        return self.rising < self.moved_at and self.answered - self.rising >= TWO_TICKS

    def ways(self) -> str:
        """What its watcher does to it, in words."""
        if self.own > (self.actual or 0):
            return "a watcher adds to sm_util instead of setting it, as HAMi 2.5 and 2.6 do"
        if self.own == 0:
            return "a watcher sets sm_util to 0 at every tick and fills nothing in, as HAMi 2.4.1 does"
        return "somebody else writes sm_util as well"


class Evidence:
    """What is known of the values of one process's slot."""

    __slots__ = ("logged", "since", "words")

    def __init__(self) -> None:
        self.words: dict[int, Word] = {}  # by device
        self.since: float | None = None  # its hostpid is right from then on
        self.logged = False

    def word(self, device: int, present: int) -> Word:
        """That of a device; ``present`` is what it says now."""
        word = self.words.get(device)
        if word is None:
            word = self.words[device] = Word(present)
        return word

    def calm(self) -> bool:
        """Whether no value is wrong, and nobody contests any."""
        return all(not word.contested and word.wrong_since is None for word in self.words.values())

    def contested(self) -> list[int]:
        """The devices whose value somebody else writes wrongly, as far as they are in use."""
        return [device for device, word in self.words.items() if word.contested and word.actual]

    def why(self, hostpid: int, policy: HostpidPolicy, now: float) -> str:
        """Why values of this slot don't stay right; empty if they do, or it is too early to say."""
        for word in self.words.values():
            if word.contested and now - word.contested_since >= TOLD_AFTER:
                return f"{word.ways()}; it is put right after each tick{_doubt(word, hostpid, policy)}"
        for word in self.words.values():
            if not word.contested and word.wrong_since is not None and now - word.wrong_since >= TOLD_AFTER:
                return f"it says {word.seen} % where NVML says {word.actual} %, and is not written to"
        return ""


def _doubt(word: Word, hostpid: int, policy: HostpidPolicy) -> str:
    """Where a watcher that finds nothing may be right, and we wrong."""
    if word.own or policy.origin not in (Origin.BY_VERSION, Origin.FORCED):
        return ""
    namespace = "host" if policy.namespace is HostpidNamespace.HOST else "container"
    why = f"; or it works, and finds no sample of {hostpid}, which this slot's hostpid is: "
    if policy.origin is Origin.FORCED:
        return f"{why}--hostpid-namespace {namespace} is wrong for this driver: try auto"
    said = f"the driver's samples do not carry {namespace} PIDs as its version says"
    return f"{why}{said}: with CAP_SYS_ADMIN that is measured"
