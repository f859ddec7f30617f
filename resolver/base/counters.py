"""The daemon's counters since its start, named as in ``/v1/status``."""

from collections.abc import Iterable, Mapping
from enum import StrEnum


class CounterName(StrEnum):
    """Counters with one value."""

    CONFLICTS = "conflicts"  # repairs that another writer changed back
    OVER_BUDGET = "over_budget"
    TOO_SLOW = "too_slow"  # reads of `/proc` that the kernel did not answer in time
    WATCH_EVENTS = "watch_events"
    WATCH_OVERFLOWS = "watch_overflows"
    WATCH_FLOODS = "watch_floods"
    SLOTS_STUCK = "slots_stuck"
    ZEROS_DISPUTED = "zeros_disputed"  # zeros that watchers overwrote with the earlier value
    UTILIZATION_WRITES = "utilization_writes"
    WRITES_UNDONE = "writes_undone"  # because the slot had moved, or its owner had ended
    WRITES_MISSED = "writes_missed"  # because the slot had changed
    QUARANTINES = "quarantines"
    WRITER_FAILURES = "writer_failures"
    IMPLAUSIBLE_SAMPLES = "implausible_samples"
    INTERNAL_ERRORS = "internal_errors"
    BROKER_ANSWERS = "broker_answers"
    BROKER_TIMEOUTS = "broker_timeouts"
    BROKER_BUSY = "broker_busy"


class CounterByReason(StrEnum):
    """Counters with a value for each reason."""

    REPAIRS = "repairs"
    WOULD_REPAIR = "would_repair"
    REJECTED = "rejected"
    BROKER_REFUSED = "broker_refused"
    SHORTAGES = "shortages"

    def of(self, reason: StrEnum) -> str:
        return f"{self}_{reason}"

    def counts(self, counters: Mapping[str, int], reasons: Iterable[StrEnum]) -> dict[str, int]:
        return {reason.value: counters.get(self.of(reason), 0) for reason in reasons}


class Shortage(StrEnum):
    """Resource that the kernel refused the daemon; counted as ``shortages_<kind>``."""

    IN_FLIGHT = "in_flight"  # ETOOMANYREFS: too many descriptors queued in sockets
    DESCRIPTORS = "descriptors"  # EMFILE, ENFILE
    MEMORY = "memory"  # ENOMEM, ENOBUFS
    PROCESSES = "processes"  # EAGAIN: no further process or thread is allowed
    WATCHES = "watches"  # ENOSPC: no further epoll or inotify watch is allowed
    KILLED = "killed"  # a child got SIGKILL from outside, for example by the OOM killer
