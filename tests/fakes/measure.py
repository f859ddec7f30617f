"""Watches slots from outside, by reading the cache files as HAMi's monitor does."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.fakes.daemon import Daemon
from tests.fakes.regions import ProcSlot
from tests.fakes.scene import STEADY_S, Case

POLL_S: Final = 0.005
TIMEOUT_S: Final = 180.0  # ample even on an overloaded machine
SETTLED_S: Final = 6.0
LOOKS: Final = 8


@dataclass(slots=True)
class Row:
    """One slot before and after. Utilization in percent, None where the layout has none."""

    case: Case
    hostpid_before: int
    sm_before: int | None
    hostpid_after: int = 0
    sm_after: int | None = None
    repaired_ms: float | None = None  # until hostpid was right
    true_ms: float | None = None  # until sm_util was true, too
    reason: str = ""
    wrong: list[str] = field(default_factory=list)
    waited_s: float = TIMEOUT_S
    truth: tuple[int, int] = (0, 0)  # the least and the most

    @property
    def ok(self) -> bool:
        return not self.wrong


def look(case: Case) -> tuple[ProcSlot, int | None]:
    """Return a case's present slot, and its utilization on its device. Raises LookupError without a slot."""
    region = case.container.region()
    slot = region.slot(case.tenant.ns_pid)
    if slot is None:
        raise LookupError(f"no slot with pid {case.tenant.ns_pid} in {case.container.cache}")
    if region.layout.device_util is None:
        return slot, None
    return slot, slot.sm_util[region.uuids.index(case.device.uuid)]


def steady(cases: Sequence[Case]) -> list[tuple[int, int | None]]:
    """Each slot's hostpid, and its utilization over two ticks of the watchers.

    A watcher zeroes before it fills, so the largest of many looks is what it maintains.
    """
    seen: list[tuple[int, int | None]] = [(0, None)] * len(cases)
    deadline = time.monotonic() + STEADY_S
    while time.monotonic() < deadline:
        for number, case in enumerate(cases):
            slot, sm = look(case)
            seen[number] = slot.hostpid, sm if sm is None else max(sm, seen[number][1] or 0)
        time.sleep(POLL_S)
    return seen


def before(cases: Sequence[Case], progress: Callable[[str], None]) -> list[Row]:
    rows = [Row(case, *values) for case, values in zip(cases, steady(cases), strict=True)]
    wrong = [
        row for row in rows if row.hostpid_before != row.case.wanted or not row.case.right(row.sm_before)
    ]
    progress(f"{len(rows)} slots, {len(wrong)} of them wrong; starting `resolver run`")
    return rows


def until_true(rows: Sequence[Row], since: float, daemon: Daemon) -> None:
    """Poll until every slot is right, and note when each became so (milliseconds after `since`).

    That is TIMEOUT_S at most, and SETTLED_S once the daemon has said of every slot that it repairs it, or would.
    """
    began = time.monotonic()
    limit = began + TIMEOUT_S
    waiting = list(rows)
    while waiting and daemon.alive and time.monotonic() < limit:
        for row in waiting:
            slot, sm = look(row.case)
            now_ms = (time.monotonic() - since) * 1000
            if slot.hostpid == row.case.wanted:
                row.repaired_ms = row.repaired_ms or now_ms
                if row.case.right(sm) and (sm or not row.case.load):
                    row.true_ms = now_ms
        waiting = [row for row in waiting if row.true_ms is None]
        if announced(rows, daemon):
            limit = min(limit, time.monotonic() + SETTLED_S)
        time.sleep(POLL_S)
    for row in waiting:
        row.waited_s = time.monotonic() - began


def announced(rows: Sequence[Row], daemon: Daemon) -> bool:
    """Tell if the daemon logged a repair, or in a dry run an intended one, for each slot that needs it."""
    events = (*daemon.said("repair"), *daemon.said("would_repair"))
    repaired = {(event["container"], event["ns_pid"]) for event in events}
    return all((r.case.container.known_as, r.case.tenant.ns_pid) in repaired for r in rows if r.case.reason)


def verdict(rows: Sequence[Row], daemon: Daemon) -> None:
    """Fill in each slot's present values and faults; without a fault all is right."""
    for _ in range(LOOKS):  # a stalled machine delays a watcher's tick, and the reader of the log
        for row, values in zip(rows, steady([row.case for row in rows]), strict=True):
            row.hostpid_after, row.sm_after = values
        right = all(r.hostpid_after == r.case.wanted and r.case.right(r.sm_after) for r in rows)
        if right and announced(rows, daemon):
            break
    reasons = {(event["container"], event["ns_pid"]): event["reason"] for event in daemon.said("repair")}
    for row in rows:
        case = row.case
        row.reason = reasons.get((case.container.known_as, case.tenant.ns_pid), "")
        if row.hostpid_after != case.wanted:
            row.wrong.append(f"hostpid is {row.hostpid_after}, must be {case.wanted}")
        row.truth = case.span()
        if not case.right(row.sm_after):
            low, high = row.truth
            true = case.load if low == high else f"{low} to {high}"
            row.wrong.append(f"sm_util is {row.sm_after}, the true load is {true}")
        if row.reason != case.reason:
            row.wrong.append(
                f"the repair's reason is {row.reason or 'none'}, must be {case.reason or 'none'}"
            )
        if row.true_ms is None:
            row.wrong.append(f"it was not right within {row.waited_s:.0f} s")
