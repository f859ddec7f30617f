"""Feedback check: compares a slot's value for a device with NVML's and finds the cause of a difference.

HAMi's watcher writes ``sm_util`` of its container's slots every 120 ms. Up to 2.9.0 it zeroes only the first device;
2.5 and 2.6 add on the others, and on the first if two watchers tick at once; 2.4.1 zeroes and fills nothing in. NVML's
value is up to a second old, so a difference alone proves nothing. Two cases count, per slot and device:

*stale*: it differs, unchanged since NVML's answer and in two ticks after it. Corrected once.
*contested*: our value was replaced by one that NVML contradicts; or it exceeds a device's limit; or it kept growing
  above NVML's. Corrected until that watcher was right at two successive NVML answers.

A 0 needs more evidence than one answer of NVML without the process (`ReportedValue.enough_for_zero`). A watcher that
fills the value in again is evidence against it: then no 0 is written until there is more.

Values within `NEAR` points are equal because samples jitter, but 0 equals only 0. Our own values are kept exact.
"""

from collections.abc import Container
from copy import copy
from enum import Enum

from msgspec import Struct

from resolver.hami.hostpid_policy import HostpidPolicy, WatcherFinding, contradiction
from resolver.workers.slot_writer import MARK, NEAR, differs

#: Seconds: two ticks of a watcher of HAMi's, 120 ms each.
TWO_TICKS = 0.24
_MOST = 100  # per cent
_ABSENCES = 2  # NVML answers in a row without the process
_PEACE = 2  # answers in a row at which a watcher was right by itself
#: Seconds after which a value that is contested, or wrong and not written, is reported.
REPORTED_AFTER = 3.0
_NEVER = float("-inf")


UNABLE = (
    "HAMi-core in this container can't read this driver's samples: update to HAMi 2.10 and restart the pod"
)


class Verdict(Enum):
    """Verdict on a value."""

    RIGHT = "right"
    WAIT = "wait"  # it differs, too early to name the cause
    WRONG = "wrong"


class ReportedValue(Struct, eq=False):
    """History of a slot's ``sm_util`` on one device. Times are monotonic."""

    seen: int
    own: int  # the last value that resolver didn't write
    fault: int  # the last wrong one of those: it shows the watcher's behaviour
    actual: int | None = None  # NVML's, when it was last judged
    moved_at: float = _NEVER  # its last change by another program
    answered: float = _NEVER
    ours: bool = False  # resolver wrote the present value
    written: int | None = None  # the last value that resolver wrote
    held: tuple[int, ...] = ()  # the last two that were held
    found_at: float = _NEVER  # when a watcher last wrote a value that agrees with NVML's
    lost: bool = False  # our value was replaced, and no later one was right by itself
    rising: float | None = None  # since then it never fell, and was above NVML's at every read
    contradicted: float | None = None  # when NVML's answer first differed from this older value
    contested: bool = False
    grew: bool = False  # past NVML's values or a device's limit: a watcher adds to it
    may_double: bool = False  # its container's watchers add: two that tick at once do so on every device
    contested_since: float = 0.0
    wrong_since: float | None = None
    right: int = 0
    idle: bool = False  # the device is idle by its samples
    absences: int = 0  # NVML's answers in a row without the process
    zeroed: bool = False  # resolver wrote 0, and the process was not busy since
    disputed: bool = False  # a watcher filled in a value after our 0

    def wrote(self, value: int) -> None:
        self.seen, self.ours, self.rising, self.contradicted, self.wrong_since = value, True, None, None, None
        self.written = value
        self.zeroed = not value

    def hold(self, value: int) -> None:
        """Note a value that the slot writer is to keep from now on; the one before may still be there."""
        self.held = (*self.held[-1:], value) if self.held[-1:] != (value,) else self.held

    def see(self, present: int, now: float) -> None:
        """Note the present value; another program wrote one that is not the last known."""
        if (self.contested or self.may_double) and present in self.held:
            self.seen, self.ours = present, True
        elif present != self.seen:
            self.lost = self.lost or self.ours
            self.ours = False
            self.seen = self.own = present
            self.moved_at, self.contradicted = now, None
            # An adding watcher first sets the first device to 0.
            if present != MARK and differs(present, self.actual or 0) and (present or not self.grew):
                self.fault = present

    def judge(
        self, present: int, actual: int, answered: float, since: float, now: float, *, idle: bool = False
    ) -> Verdict:
        """Return the verdict on ``present``, given NVML's value ``actual`` from its answer at ``answered``.

        A watcher could work from ``since``, when the slot's ``hostpid`` became right. ``idle``: the device's samples
        show no load.
        """
        before, new = self.seen, answered > self.answered
        self.answered, self.actual = answered, actual
        self.see(present, now)
        self._weigh(actual, new=new, idle=idle)
        if new and self.contested:
            fresh = now - self.moved_at <= 2 * TWO_TICKS
            self.undisturbed(right=fresh and self.own != 0 and not differs(self.own, actual))
        if self._grows(before, present, actual, new=new, now=now) or present > MARK:
            self.grew = True
            self._contest(now)
        if present == actual or (not self.ours and not differs(present, actual)):
            if present and not self.ours:
                self.lost = False
                if present not in (MARK, self.written):  # an old view can show our own value again
                    self.found_at = self.moved_at
            self.wrong_since = self.contradicted = None
            return Verdict.RIGHT
        if not self.contested and not self.ours:
            if self.moved_at >= answered:
                return Verdict.WAIT
            if self.contradicted is None:
                self.contradicted = answered
            if now - max(self.contradicted, since) < TWO_TICKS:
                return Verdict.WAIT
            self.disputed = self.disputed or (self.zeroed and not idle and present <= _MOST)
            if self.lost:
                self._contest(now)
        if self.wrong_since is None:
            self.wrong_since = now
        return Verdict.WRONG

    def _weigh(self, actual: int, *, new: bool, idle: bool) -> None:
        """Update the evidence for a 0; a watcher's own 0 ends a dispute."""
        self.idle, self.absences = idle, 0 if actual else self.absences + new
        self.zeroed = self.zeroed and not actual
        self.disputed = self.disputed and not idle and (self.ours or self.seen != 0)

    def is_undisputed(self) -> None:
        self.disputed = False

    def enough_for_zero(self) -> bool:
        """Check that the process is idle on more evidence than one absence from NVML's answers."""
        return self.idle or (self.absences >= _ABSENCES and not self.disputed)

    def undoes(self, now: float) -> bool:
        """Check if a watcher has set the value to 0 against NVML for long enough to be reported."""
        return self.contested and not self.fault and now - self.contested_since >= REPORTED_AFTER

    def _contest(self, now: float) -> None:
        if not self.contested:
            self.contested, self.contested_since, self.right = True, now, 0

    def undisturbed(self, *, right: bool = True) -> None:
        """Note that a watcher was ``right``, or set the held value wrong at no tick since the last report."""
        self.right = self.right + 1 if right else 0
        if self.right >= _PEACE:
            self.contested = self.lost = False

    def _grows(self, before: int, present: int, actual: int, *, new: bool, now: float) -> bool:
        """Check if the value grew above NVML's earlier one, and grows on above the later: no rise or burst does."""
        above = present > actual + NEAR
        if not above or present < before or (new and before <= actual + NEAR) or self.rising is None:
            self.rising = now if above and not self.ours else None
            return False
        return present > before and not new and self.answered - self.rising >= TWO_TICKS

    def is_held(self, *, may_double: bool) -> bool:
        """Check if the value must be held; note if two watchers of its container may add to it at once."""
        self.may_double = may_double
        return self.contested or may_double

    def describe_fault(self) -> str:
        if self.fault > (self.actual or 0):
            return "a watcher adds to sm_util instead of setting it, as HAMi 2.5 and 2.6 do"
        if self.fault == 0:
            return "a watcher sets sm_util to 0 at every tick and fills nothing in, as HAMi 2.4.1 does"
        return "another program writes sm_util, too"


class Evidence(Struct, eq=False):
    """Evidence on one slot's values."""

    words: dict[int, ReportedValue] = {}  # by device
    since: float | None = None  # its hostpid is right from then on
    logged: bool = False

    def twin(self) -> "Evidence":
        words = {device: copy(word) for device, word in self.words.items()}
        return Evidence(words, self.since, self.logged)

    def begins(self, now: float) -> float:
        """Return the time since which the hostpid is right, at the latest now."""
        self.since = now if self.since is None else self.since
        return self.since

    def ends(self) -> None:
        self.since = None

    def logs(self) -> bool:
        before, self.logged = self.logged, True
        return not before

    def word(self, device: int, present: int) -> ReportedValue:
        """Return a device's value, created from ``present`` if new."""
        word = self.words.get(device)
        if word is None:
            word = self.words[device] = ReportedValue(present, present, present)
        return word

    def calm(self, *, held: bool) -> bool:
        """Check that no value is wrong, or contested and not ``held``."""
        return all((held or not word.contested) and word.wrong_since is None for word in self.words.values())

    def unsure(self) -> bool:
        """Check that a written value was replaced after NVML's answer: only the next answer shows which is right."""
        lost = (word for word in self.words.values() if word.lost and not (word.contested or word.may_double))
        return any(word.moved_at >= word.answered for word in lost)

    def disputed(self) -> list[int]:
        """Return the devices with a written 0 that a watcher contradicts."""
        return [device for device, word in self.words.items() if word.disputed]

    def finding(self, now: float, blind: Container[int] = ()) -> WatcherFinding | None:
        """Return the evidence of the policy in the watcher's own values. Its tenant can fake them.

        The driver refuses the older call for samples of the devices at ``blind``.
        """
        since = self.since
        if since is None:
            return None
        if any(word.found_at > since for word in self.words.values()):
            return WatcherFinding.CONFIRMS
        undone = [device for device, word in self.words.items() if word.undoes(now)]
        if not undone or now - since < REPORTED_AFTER:
            return None
        unable = all(device in blind for device in undone)
        return WatcherFinding.UNABLE if unable else WatcherFinding.DOUBTS

    def why(
        self,
        hostpid: int,
        policy: HostpidPolicy,
        now: float,
        order: str = "",
        blind: Container[int] = (),
    ) -> str:
        """Explain why values don't stay right, by ``order`` if given; empty if they do or it is too early."""
        if self.finding(now, blind) is WatcherFinding.UNABLE:
            return f"{UNABLE}; its value is held right, but its core limit has no effect"
        for word in self.words.values():
            if word.disputed:
                return (
                    f"NVML has no sample of {hostpid}, but its watcher fills in {word.seen} % after each 0, and the"
                    " GPU is busy: one of them is wrong, and no 0 is written any more"
                )
            if word.contested and now - word.contested_since >= REPORTED_AFTER:
                doubt = ""
                if word.undoes(now) and self.finding(now) is WatcherFinding.DOUBTS and policy.namespace:
                    doubt = f"; or it works, and finds no sample of {hostpid}: {contradiction(policy)}"
                return f"{order or word.describe_fault()}; it is put right after each tick{'' if order else doubt}"
        for word in self.words.values():
            if (
                not word.contested
                and word.wrong_since is not None
                and now - word.wrong_since >= REPORTED_AFTER
            ):
                return f"it says {word.seen} % where NVML says {word.actual} %, and is not written to"
        return ""
