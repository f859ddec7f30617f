"""What is known of a region's slots, for the snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resolver.state import RegionReport, SlotReport

_Values = tuple[int | None, ...]

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
    nothing: _Values = (None,) * len(uuids)  # one for all: a tenant can claim 1,024 slots
    idle: _Values = (0,) * len(uuids)
    slots = [
        _slot_report(state, _values(state, uuids, joined) or (idle if state.dead else nothing))
        for state in repairs.told_apart()
    ]
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
                    utilization=nothing,
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


def _values(state: SlotState, uuids: tuple[str, ...], joined: Joined) -> _Values:
    """Those of its owner; empty without one."""
    if state.owner is None:
        return ()
    host_pid = state.owner.process.host_pid
    return tuple(joined.utilization(host_pid, uuid) for uuid in uuids)


def _slot_report(state: SlotState, utilization: _Values) -> SlotReport:
    slot, owner = state.slot, state.owner
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
