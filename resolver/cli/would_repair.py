"""What a dry run would write, slot by slot: the table of ``resolver run --dry-run --once``."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, NamedTuple

from resolver.cli.show import on_terminal, print_table, shorten

if TYPE_CHECKING:
    from resolver.hami.region import RegionView
    from resolver.repair.plan import Order, RegionRepairs
    from resolver.state import Snapshot

COLUMNS = ("CONTAINER", "PID", "HOSTPID -> NEW", "REASON", "CORE LIMIT")
#: A terminal leaves at least so much of a container's name.
_SHORTEST_NAME = 16
_BEGINS = "begins at"


class _Row(NamedTuple):
    """One `hostpid` that would be written, and whose it is."""

    pod_uid: str
    container_name: str
    path: str
    ns_pid: int
    change: str
    reason: str
    core_limit: str


class WouldRepair:
    """Collects them while the passes are made."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []

    def add(self, repairs: RegionRepairs, order: Order) -> None:
        """One more."""
        whose, slot = repairs.whose, order.state.slot
        self._rows.append(
            _Row(
                pod_uid=whose.pod_uid,
                container_name=whose.container_name,
                path=repairs.region.path,
                ns_pid=slot.pid,
                change=f"{slot.hostpid} -> {order.new >> 32}",
                reason=str(order.reason),
                core_limit=_core_limit(repairs.view),
            )
        )

    def print(self, snapshot: Snapshot) -> None:
        """The table, if there is anything in it; names of pods are the snapshot's."""
        if not self._rows:
            return
        person = on_terminal()
        pods = {each.pod_uid: each for each in snapshot.containers if each.pod}
        rows = []
        for row in self._rows:
            known = pods.get(row.pod_uid or None)
            pod = f"{known.namespace}/{known.pod}" if known else row.pod_uid[: 8 if person else None]
            name = "/".join(filter(None, (pod, row.container_name))) or row.path
            rows.append((name, row.ns_pid, row.change, row.reason, row.core_limit))
        rows.sort()
        if person:
            rest = [max(len(str(each)) for each in cells) for cells in zip(COLUMNS, *rows, strict=True)][1:]
            room = shutil.get_terminal_size().columns - sum(rest) - 2 * len(rest)
            width = max(room, _SHORTEST_NAME)
            rows = [(shorten(row[0], width), *row[1:]) for row in rows]
        print()
        print_table(COLUMNS, rows, right=("PID",))
        limited = sum(row.core_limit.startswith(_BEGINS) for row in self._rows)
        if limited:
            print(f"\nIn {limited} of them a core limit begins to bite: HAMi needs the right hostpid for it.")


def _core_limit(view: RegionView | None) -> str:
    """What a right `hostpid` makes HAMi enforce, per device; empty where it is nothing."""
    limits = view.sm_limit if view else ()
    if not any(0 < limit < 100 for limit in limits):
        return ""
    # One number where all devices have the same, as most do.
    shown = limits[:1] if len(set(limits)) == 1 else limits
    text = " ".join(str(limit) if 0 < limit < 100 else "-" for limit in shown)
    # While this word of the region is 0, the tenant's library does not limit at all.
    return f"{_BEGINS} {text} %" if view and view.utilization_switch else f"{text} %, switched off"
