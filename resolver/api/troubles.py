"""The daemon's problems, in one place: ``/v1/status`` serves them, and commands, doctor and systemd show them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from msgspec import Struct

from resolver.base.counters import CounterName
from resolver.base.reasons import TroubleReason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resolver.state import Snapshot


class DaemonTrouble(Struct, frozen=True):
    """Problem of the daemon: a fixed ``reason``, its meaning ``what``, the cause ``why``, and the ``fix``.

    ``grave``: some of the daemon's work isn't done because of it.
    """

    reason: str
    grave: bool
    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


def troubles(snapshot: Snapshot) -> list[DaemonTrouble]:
    """Return all current problems, gravest first."""
    why_by_reason = dict(_wrong(snapshot))
    found = []
    for reason in TroubleReason:
        if why := why_by_reason.get(reason):
            what, fix = reason.for_terminal()
            fix = fix.replace("SOURCE", snapshot.source).replace("/PID/", f"/{os.getpid()}/")
            found.append(DaemonTrouble(reason=reason, grave=reason.grave, what=what, why=why, fix=fix))
    return found


def _wrong(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """Yield each reason with its cause; an empty cause is no problem."""
    yield from snapshot.standing.items()
    yield TroubleReason.STALLED, snapshot.standstill()
    yield TroubleReason.NOT_READY, snapshot.not_ready
    yield TroubleReason.NVML_UNAVAILABLE, snapshot.joined.error
    yield TroubleReason.SOURCE_INCOMPLETE, snapshot.incomplete
    yield TroubleReason.DRY_RUN, "so it writes nothing" if snapshot.dry_run else ""
    unresolved = snapshot.slot_counts().unresolved.most_common()
    yield TroubleReason.SLOTS_UNRESOLVED, ", ".join(f"{count} {why}" for why, count in unresolved)
    for reason, name in (
        (TroubleReason.OVER_BUDGET, CounterName.OVER_BUDGET),
        (TroubleReason.INTERNAL_ERRORS, CounterName.INTERNAL_ERRORS),
    ):
        count = snapshot.counters.get(name, 0)
        yield reason, f"{count} time{'s' if count > 1 else ''} since its start" if count else ""
