"""What is known of a region's slots, for the snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resolver.state import RegionReport, SlotReport, SlotReports

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from resolver.gpu.attribution import Joined
    from resolver.repair.plan import RegionRepairs
    from resolver.repair.slot_states import SlotState


def region_report(
    repairs: RegionRepairs, joined: Joined, container_id: Callable[[int], str], now: float
) -> RegionReport:
    """A region and every slot of it that is in use. ``container_id(owner)`` is that of a slot's owner."""
    region, view = repairs.region, repairs.view
    uuids = view.uuids if view else ()
    states = repairs.distinguished()
    claim = repairs.whose.claim
    for state in repairs.changed():
        of_owner = container_id(state.owner.process.host_pid) if claim and state.owner else ""
        state.shown = _slot_report(state, uuids, joined, of_owner)
    owned = tuple([state.shown for state in states if state.shown is not None])
    slots: Sequence[SlotReport] = owned
    if view is not None:
        slots = SlotReports(owned, view.slots, repairs.unowned_codes(), len(uuids))
    found = (container_id(state.owner.process.host_pid) for state in states if state.owner)
    # Only a ResourceClaim's file is several containers'; of another one's the first owner says it.
    first = next(filter(None, found), "")
    ids = sorted({slot.container_id for slot in owned} - {""}) if claim else [first] if first else []
    return RegionReport(
        path=region.path,
        pod_uid=repairs.whose.pod_uid or None,
        container_name=repairs.whose.container_name or None,
        layout=region.layout.name,
        device_uuids=uuids,
        slots=slots,
        container_id=ids[0] if len(ids) == 1 else None,
        quarantined=repairs.blame.quarantined(now),
        limit=view.limit if view else (),
        sm_limit=view.sm_limit if view else (),
        claim=claim or None,
        container_ids=tuple(ids),
        placement=repairs.whose.placement or None,
    )


def _slot_report(state: SlotState, uuids: tuple[str, ...], joined: Joined, container_id: str) -> SlotReport:
    slot, owner = state.slot, state.owner
    utilization: tuple[int | None, ...]
    if owner is not None:
        host_pid = owner.process.host_pid
        utilization = tuple([joined.utilization(host_pid, uuid) for uuid in uuids])
    else:
        utilization = (0 if state.dead else None,) * len(uuids)
    return SlotReport(
        pid=slot.pid,
        slot=slot.index,
        hostpid=slot.hostpid,
        host_pid=owner.process.host_pid if owner else None,
        dead=state.dead,
        unresolved=None if state.dead else state.reason,
        repaired=state.repaired,
        sm_util=slot.sm_util,
        utilization=utilization,
        stuck=state.stuck,
        container_id=container_id,
    )
