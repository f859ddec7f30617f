"""Owner, command line and cost of the processes on the screen; read only while they are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from resolver.cli.process_summary import ProcessSummary, facts_of

if TYPE_CHECKING:
    from resolver.cli._top.rows import Row

_YOUNG = 5.0  # seconds: longer than a reading is behind


class Cost(NamedTuple):
    """A process's facts at a time, and how much of one core it used since the time before, in per cent."""

    facts: ProcessSummary
    at: float
    cpu_percent: int | None = None

    def in_a_line(self) -> str:
        """What is known, for people."""
        now = "" if self.cpu_percent is None else f"CPU {self.cpu_percent}%"
        return ", ".join(filter(None, (self.facts.in_a_line(), now)))


class Costs:
    """Of the processes that were asked for in this reading or the one before; all others are forgotten."""

    def __init__(self) -> None:
        self._read_at = 0.0
        self._now: dict[int, Cost] = {}
        self._before: dict[int, Cost] = {}

    def of(self, row: Row, read_at: float) -> Cost | None:
        """Of a row's process; None where there is none, or it may be another process than the daemon saw."""
        if row.kind != "process" or not row.host_pid.isdigit():
            return None
        if read_at != self._read_at:
            self._read_at, self._before, self._now = read_at, self._now, {}
        host_pid = int(row.host_pid)
        cost = self._now.get(host_pid)
        if cost is None:
            cost = self._now[host_pid] = self._ask(host_pid, read_at)
        # A younger one may have its number by now; what started before was the one that the daemon saw.
        started = cost.facts.started_at
        return cost if started is not None and started < read_at - _YOUNG else None

    def _ask(self, host_pid: int, read_at: float) -> Cost:
        facts, before = facts_of(host_pid), self._before.get(host_pid)
        if before is None or before.facts.started_at != facts.started_at or read_at <= before.at:
            return Cost(facts, read_at)
        used, used_before = facts.cpu_seconds, before.facts.cpu_seconds
        if used is None or used_before is None:
            return Cost(facts, read_at)
        return Cost(facts, read_at, round(max(used - used_before, 0.0) * 100 / (read_at - before.at)))
