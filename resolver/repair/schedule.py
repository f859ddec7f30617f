"""Schedule of a region's reads.

A process takes its slot milliseconds after attaching. It guesses its host PID when CUDA has started, seconds later, by
a store that the kernel does not report: a region is read often until then, later every interval if work is pending or
attaching goes unreported, else rarely.
"""

from math import frexp, inf

#: Seconds since a process attached -> seconds until the next read. After these the interval, until `STARTED`.
STEPS = ((3.0, 0.02), (20.0, 0.1))
#: If each slot is right, the pause is this share of the time since the attachment, up to so many seconds.
_GROWTH, _GROWN = 1 / 2, 4.0
#: Seconds after which a process that attached has surely started.
STARTED = 60.0
#: Seconds between two reads of one region, whatever its tenant does; the first one after an attachment comes at once.
_SHORTEST = 0.004
#: Intervals between reads of a right region whose changes the kernel reports.
QUIET_INTERVALS = 16


def aligned(now: float, pause: float) -> float:
    """Return the end of a pause of at most ``pause`` seconds, the same for all with this pause: they share a pass."""
    return (now // pause + 1) * pause


class Schedule:
    """Times of one region, monotonic: when it is ``due``, was read ``last``, and a process ``attached`` last."""

    __slots__ = ("attached", "due", "last")

    def __init__(self, attached: float) -> None:
        self.attached, self.due, self.last = attached, -inf, -inf

    def attach(self, now: float) -> None:
        self.by(max(now, self.last + _SHORTEST))
        self.attached = now

    def by(self, when: float) -> None:
        """Read the region by this time."""
        self.due = min(self.due, when)

    def put_off(self, when: float) -> None:
        """Read the region at this time, whatever happened."""
        self.due = when

    def taken(self, now: float) -> None:
        """Note a read; the next one is due after a later event, or as `looked` says."""
        self.due, self.last = inf, now

    def looked(
        self, interval: float, *, watched: bool, work_at: float, right: bool = False, started: bool = False
    ) -> None:
        """Schedule the next read after the last one and the turn that followed.

        ``watched``: the kernel reports attaching processes. Without such events there is no work before ``work_at``
        (0: now). ``right``: the slot of the last process is right, and only its guess may change that, unless it has
        ``started``.
        """
        now, age = self.last, self.last - self.attached
        quiet, rarely = max(interval, work_at - now), QUIET_INTERVALS * interval
        if watched and (started or age >= STARTED):
            self.by(now + quiet if quiet < rarely else aligned(now, rarely))
            return
        often = next((pause for until, pause in STEPS if age < until), interval)
        # At first the pause equals the time since the event: the slot is taken milliseconds later.
        regular = now + min(interval, often, max(_SHORTEST, age))
        if watched and right:
            _, exponent = frexp(max(_SHORTEST, min(_GROWN, _GROWTH * age)))
            shared = aligned(now, 2.0 ** (exponent - 1))
            regular = max(regular, min(shared, now + quiet))
        self.by(regular)
