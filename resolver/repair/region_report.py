"""Report of a region's slots, for the snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resolver.hami.hostpid_policy import WatcherFinding
from resolver.state import LimitState, RegionReport, SlotReport, SlotReports

if TYPE_CHECKING:
    from collections.abc import Callable

    from resolver.gpu.attribution import Joined
    from resolver.repair.region import RegionRepairs
    from resolver.repair.slot_states import OwnedSlot


def region_report(
    repairs: RegionRepairs, joined: Joined, container_id: Callable[[int], str], now: float
) -> RegionReport:
    """Report a region's used slots; ``container_id`` maps host PIDs to containers."""
    region, view = repairs.region, repairs.view
    uuids = view.uuids
    states = repairs.slots.distinguished()
    claim = repairs.ownership.claim
    owned = tuple([_slot_report(state, uuids, joined, container_id if claim else None) for state in states])
    container_ids = (container_id(state.owner.process.host_pid) for state in states)
    # Only a ResourceClaim's file has several containers; any other has its first owner's.
    first = next(filter(None, container_ids), "")
    ids = sorted({slot.container_id for slot in owned} - {""}) if claim else [first] if first else []
    named = "" if claim else next((state.names[1] for state in states if state.names[1]), "")
    ended, moved = view.slots.left_behind()
    return RegionReport(
        path=region.path,
        pod_uid=repairs.ownership.pod_uid or None,
        container_name=named or repairs.ownership.container_name or None,
        layout=region.layout.name,
        device_uuids=uuids,
        slots=SlotReports(owned, view.slots, *repairs.slots.unowned.states(), len(uuids)),
        container_id=ids[0] if len(ids) == 1 else None,
        quarantined=repairs.record.quarantined(now),
        limit=view.limit,
        sm_limit=view.sm_limit,
        limiting=view.utilization_switch != 0,
        claim=claim or None,
        container_ids=tuple(ids),
        placement=repairs.ownership.placement or None,
        ended=ended,
        moved=moved,
        limits=tuple(_limit(uuid, joined, repairs.finding) for uuid in uuids) if joined.refused else (),
    )


def _limit(uuid: str, joined: Joined, finding: WatcherFinding | None) -> LimitState | None:
    """Return why HAMi-core can't enforce a limit on a device; None if it can."""
    if uuid not in joined.refused or finding is WatcherFinding.CONFIRMS:
        return None
    return LimitState.NO_EFFECT if finding is WatcherFinding.UNABLE else LimitState.UNKNOWN


def _slot_report(
    state: OwnedSlot, uuids: tuple[str, ...], joined: Joined, container_id: Callable[[int], str] | None
) -> SlotReport:
    """Report a slot; ``container_id`` adds the owner's container."""
    slot, host_pid, disputed = state.slot, state.owner.process.host_pid, state.evidence.disputed()
    return SlotReport(
        pid=slot.pid,
        slot=slot.index,
        hostpid=slot.hostpid,
        host_pid=host_pid,
        dead=False,
        unresolved=state.reason,
        repaired=state.repaired,
        sm_util=slot.sm_util,
        utilization=tuple(
            None if device in disputed else joined.utilization(host_pid, uuid)
            for device, uuid in enumerate(uuids)
        ),
        stuck=state.stuck,
        container_id=container_id(host_pid) if container_id else "",
        core_policy=state.variables[0] if state.variables else None,
    )
