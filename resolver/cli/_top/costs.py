"""Owner, command line and cost of the processes on the screen; read only while visible."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resolver.cli.process_summary import ProcessSummary, facts_of

if TYPE_CHECKING:
    from resolver.cli._top.rows import Row

_YOUNG = 5.0  # seconds: longer than a reading is behind


class Costs:
    """Costs of the processes requested in this reading or the one before; all others are forgotten."""

    def __init__(self) -> None:
        self._read_at = self._before_at = 0.0
        self._now: dict[int, ProcessSummary] = {}
        self._before: dict[int, ProcessSummary] = {}

    def of(self, row: Row, read_at: float) -> tuple[ProcessSummary, str] | None:
        """Return facts and CPU use of a row's process; None without one, or if its PID may have been reused."""
        if row.kind != "process" or not row.host_pid.isdigit():
            return None
        if read_at != self._read_at:
            self._before_at, self._read_at = self._read_at, read_at
            self._before, self._now = self._now, {}
        host_pid = int(row.host_pid)
        facts = self._now.get(host_pid) or self._now.setdefault(host_pid, facts_of(host_pid))
        # A younger one may have its number by now; what started before was the one that the daemon saw.
        if facts.started_at is None or facts.started_at > read_at - _YOUNG:
            return None
        before = self._before.get(host_pid, ProcessSummary())
        if before.started_at != facts.started_at or None in (before.cpu_seconds, facts.cpu_seconds):
            return facts, ""
        used = (facts.cpu_seconds or 0.0) - (before.cpu_seconds or 0.0)
        return facts, f"CPU {round(max(used, 0.0) * 100 / max(read_at - self._before_at, 0.1))}%"
