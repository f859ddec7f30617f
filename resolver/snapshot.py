"""One immutable picture of what the daemon knows, swapped whole after a pass.

The API, the metrics and the command line read this and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resolver.join import Joined
    from resolver.types import RegionReason, RepairReason, UnresolvedReason


class SlotReport(NamedTuple):
    """One slot that is in use.

    ``host_pid`` is the verified owner's, None while unresolved. ``repaired`` is why it was last written.
    ``utilization`` is per used device, in per cent, None where it is not known; ``sm_util`` is what the slot says.
    """

    ns_pid: int
    slot: int
    hostpid: int
    host_pid: int | None
    dead: bool
    unresolved: UnresolvedReason | None
    repaired: RepairReason | None
    sm_util: tuple[int, ...]
    utilization: tuple[int | None, ...]


class RegionReport(NamedTuple):
    """One shared region with its slots."""

    path: str
    pod_uid: str
    container_name: str
    layout: str
    device_uuids: tuple[str, ...]
    slots: tuple[SlotReport, ...]


class Snapshot(NamedTuple):
    """Everything, as of Unix time ``at``. Counters only ever grow."""

    at: float
    passes: int
    source: str
    sources_not_used: Mapping[str, str]  # why
    source_counters: Mapping[str, int]
    incomplete: str  # why the source alone does not know every process; empty while it does
    processes: int
    policy: str
    policy_why: str
    driver_version: str | None
    regions: tuple[RegionReport, ...]
    rejected: Mapping[str, RegionReason]
    missing_dirs: tuple[str, ...]
    joined: Joined
    counters: Mapping[str, int]

    def unresolved(self) -> list[tuple[RegionReport, SlotReport]]:
        """Every slot that nothing can be said about, with its region."""
        return [
            (region, slot) for region in self.regions for slot in region.slots if slot.unresolved is not None
        ]
