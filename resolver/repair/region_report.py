"""What is known of a region's slots, for the snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resolver.state import RegionReport, SlotReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from resolver.gpu.attribution import Joined
    from resolver.repair.plan import RegionRepairs, SlotState


def region_report(
    repairs: RegionRepairs, joined: Joined, container_id: Callable[[int], str], now: float
) -> RegionReport:
    """A region and every slot of it that is in use. ``container_id`` tells that of a slot's owner."""
    region, view = repairs.region, repairs.view
    uuids = view.uuids if view else ()
    slots = [_slot_report(state, uuids, joined) for state in repairs.told_apart()]
    for index, why in repairs.odd.items():
        slot = view.slots[index] if view else None
        if slot:
            slots.append(
                SlotReport(
                    ns_pid=slot.pid,
                    slot=index,
                    hostpid=slot.hostpid,
                    host_pid=None,
                    dead=False,
                    unresolved=why,
                    repaired=None,
                    sm_util=slot.sm_util,
                    utilization=(None,) * len(uuids),
                )
            )
    owned = (state.owner.process.host_pid for state in repairs.told_apart() if state.owner)
    return RegionReport(
        path=region.path,
        pod_uid=repairs.whose.pod_uid,
        container_name=repairs.whose.container_name,
        layout=region.layout.name,
        device_uuids=uuids,
        slots=tuple(slots),
        container_id=next(filter(None, map(container_id, owned)), ""),
        quarantined=repairs.blame.quarantined(now),
        limit=view.limit if view else (),
    )


def _slot_report(state: SlotState, uuids: tuple[str, ...], joined: Joined) -> SlotReport:
    slot, owner = state.slot, state.owner
    utilization: tuple[int | None, ...]
    if owner is None:
        utilization = ((0 if state.dead else None),) * len(uuids)
    else:
        utilization = tuple(joined.utilization(owner.process.host_pid, uuid) for uuid in uuids)
    return SlotReport(
        ns_pid=slot.pid,
        slot=slot.index,
        hostpid=slot.hostpid,
        host_pid=owner.process.host_pid if owner else None,
        dead=state.dead,
        unresolved=None if state.dead else state.reason,
        repaired=state.repaired,
        sm_util=slot.sm_util,
        utilization=utilization,
        stuck=state.stuck,
    )
