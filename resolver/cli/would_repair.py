"""Table of ``resolver run --dry-run --once``: each repair that a dry run leaves out, slot by slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resolver.cli.show import on_terminal, print_table
from resolver.state import LimitState

if TYPE_CHECKING:
    from resolver.hami.region import RegionView
    from resolver.repair.plan import Order, RegionRepairs
    from resolver.repair.slot_states import SlotState
    from resolver.state import Snapshot

COLUMNS = ("CONTAINER", "PID", "HOSTPID -> NEW", "REASON", "CORE LIMIT")
_BEGINS = "begins at"


class WouldRepair:
    """Collects them while the passes are made: pod's UID, container's name, path, and the cells beside them."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str, str, tuple[int, str, str, str]]] = []

    def add(self, repairs: RegionRepairs, order: Order) -> None:
        """Add a repair."""
        ownership, slot = repairs.ownership, order.state.slot
        change = f"{slot.hostpid} -> {order.new >> 32}"
        cells = (slot.pid, change, str(order.reason), _core_limit(repairs.view, order.state))
        self._rows.append((ownership.pod_uid, ownership.container_name, repairs.region.path, cells))

    def print(self, snapshot: Snapshot) -> None:
        """Print the table unless it is empty; names of pods are the snapshot's."""
        if not self._rows:
            return
        pods = {each.pod_uid: each for each in snapshot.containers if each.pod}
        rows = []
        for pod_uid, container_name, path, cells in self._rows:
            known = pods.get(pod_uid or None)
            pod = f"{known.namespace}/{known.pod}" if known else pod_uid[: 8 if on_terminal() else None]
            rows.append(("/".join(filter(None, (pod, container_name))) or path, *cells))
        rows.sort()
        print()
        print_table(COLUMNS, rows, right=("PID",), shorten="CONTAINER")
        limited = sum(row[-1].startswith(_BEGINS) for row in rows)
        if limited:
            print(f"\nIn {limited} of them a core limit begins to bite: HAMi needs the right hostpid for it.")


def _core_limit(view: RegionView | None, state: SlotState) -> str:
    """Return the core limit per device that HAMi will enforce with a right `hostpid`, if so; empty without one."""
    limits = view.sm_limit if view else ()
    if not any(0 < limit < 100 for limit in limits):
        return ""
    # One number where all devices have the same, as most do.
    shown = limits[:1] if len(set(limits)) == 1 else limits
    text = " ".join(str(limit) if 0 < limit < 100 else "-" for limit in shown)
    policy = state.variables[0] if state.variables else None
    decided = LimitState.of(policy, switch=view is not None and bool(view.utilization_switch))
    return (
        f"{_BEGINS} {text} %" if decided is LimitState.IN_FORCE else f"{text} %, {decided.replace('_', ' ')}"
    )
