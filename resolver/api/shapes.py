"""JSON shapes of the API's answers, and their construction from the daemon's snapshot.

The snapshot's own records are sent as they are; regions and slots get the fields that only an answer needs. None means
unknown. Fields of a shared region carry their upstream C names. ``/v1/openapi.json`` is made from these classes.
"""

from collections import Counter
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from msgspec import Struct, structs

from resolver.base.event_log import Event
from resolver.base.reasons import RegionReason
from resolver.gpu.inventory import Gpu, Sample
from resolver.state import (
    Container,
    ContainerUse,
    Process,
    RegionFacts,
    RegionReport,
    SlotFacts,
    SlotReport,
    Snapshot,
    WithoutSlot,
    tally,
)


class Region(RegionFacts, frozen=True, kw_only=True):
    """One shared region: a cache file of HAMi's. ``slots`` counts used slots, ``unresolved`` those without an owner.

    It is skipped while ``quarantined``: the slot writer died or hung on it. ``limit`` (bytes of memory) and
    ``sm_limit`` (per cent of the cores) are HAMi's limits on each of ``device_uuids``, null without one. Slots of a
    ResourceClaim (``claim`` is its UID) may belong to several containers; ``container_id`` is null then. ``ended`` and
    ``moved`` are values left behind on each device, in per cent, empty if all are 0. ``ended``: in slots without
    a process below ``proc_num``; monitors up to HAMi 2.9 count them. ``moved``: above it; monitors up to 2.6 do.
    """

    slots: int
    unresolved: int
    limit: list[int | None]
    sm_limit: list[int | None]

    @classmethod
    def of(cls, report: RegionReport) -> "Region":
        counted, devices = tally(report.slots), range(len(report.device_uuids))
        return cls(
            *_region_facts(report),
            slots=counted.in_use,
            unresolved=sum(counted.unresolved.values()),
            limit=[report.memory_limit(device) for device in devices],
            sm_limit=[report.core_limit(device) for device in devices],
        )


class RejectedFile(Struct, frozen=True):
    """A file in a containers directory that is skipped."""

    path: str
    reason: RegionReason


class DeviceUtil(Struct, frozen=True):
    """One device of a slot. ``sm_util`` is the slot's value, ``utilization`` NVML's; per cent."""

    device_uuid: str
    sm_util: int | None
    utilization: int | None


class Slot(SlotFacts, frozen=True, kw_only=True):
    """One slot that is in use, of the region ``path``.

    ``pid`` and ``hostpid`` are the values in the slot; ``host_pid`` is its verified owner's, null while unresolved.
    ``repaired`` is the reason of the last repair. ``stuck`` explains why ``sm_util`` doesn't stay at NVML's value.
    """

    path: str
    container_id: str | None
    pod_uid: str | None
    container_name: str | None
    stuck: str | None
    device_util: list[DeviceUtil]

    @classmethod
    def of(cls, region: RegionReport, slot: SlotReport, owner: Container | None = None) -> "Slot":
        """Convert the daemon's records; ``owner`` is the container of a slot in a claim's file, if it is known."""
        return cls(
            *_slot_facts(slot),
            path=region.path,
            container_id=slot.container_id or (None if region.claim else region.container_id),
            pod_uid=owner.pod_uid if owner else region.pod_uid,
            container_name=owner.container_name if owner else region.container_name,
            stuck=slot.stuck or None,
            device_util=device_utils(region, slot),
        )


def device_utils(region: RegionReport, slot: SlotReport) -> list[DeviceUtil]:
    """Return a slot's values for each of its region's devices."""
    return [
        DeviceUtil(uuid, _at(slot.sm_util, index), _at(slot.utilization, index))
        for index, uuid in enumerate(region.device_uuids)
    ]


#: Getters of the fields that are sent unchanged, in the order of their declaration.
_region_facts, _slot_facts = (
    attrgetter(*RegionFacts.__struct_fields__),
    attrgetter(*SlotFacts.__struct_fields__),
)


class Containers(Struct, frozen=True):
    """``/v1/containers``. ``at`` is the snapshot's Unix time, as in every answer."""

    at: float
    containers: list[Container]


class Regions(Struct, frozen=True):
    """``/v1/regions``: repaired files, skipped files, and missing directories."""

    at: float
    rejected: list[RejectedFile]
    missing_dirs: list[str]
    regions: list[Region]


class Slots(Struct, frozen=True):
    """``/v1/slots``: every slot in use."""

    at: float
    slots: list[Slot]


class NvmlState(Struct, frozen=True):
    """``collected_at`` is the Unix time of NVML's last answer, null before the first; ``error`` why it fails now."""

    at: float
    collected_at: float | None
    error: str | None


class Processes(NvmlState, frozen=True):
    """``/v1/processes``: every process on every GPU."""

    processes: list[Process]


class ContainerUses(Struct, frozen=True):
    """``/v1/usage``: use of each GPU by each container since the daemon's start, and processes without a slot.

    ``unused_energy`` has the joules that each GPU, by UUID, took while no process used it.
    """

    at: float
    unused_energy: dict[str, float]
    without_slot: list[WithoutSlot]
    containers: list[ContainerUse]


class Gpus(Struct, frozen=True):
    """``/v1/gpus``: ``version`` grows with each change, 0 before NVML first answered; also in the ``ETag``.

    ``error`` is why NVML fails now; the GPUs are then as last seen, at ``at``. ``cordoned`` has the
    UUIDs that an operator has marked in Kubernetes (``*``: all), as the reporter last sent them.
    """

    at: float
    version: int
    driver_version: str | None
    error: str | None
    cordoned: list[str]
    gpus: list[Gpu]


class UnresolvedCounts(Struct, frozen=True):
    """Counts by reason."""

    slots: dict[str, int]
    samples: dict[str, int]


class Unresolved(Struct, frozen=True):
    """``/v1/unresolved``: unresolved slots and utilization samples, each with its reason."""

    at: float
    by_reason: UnresolvedCounts
    samples: list[Sample]
    slots: list[Slot]


class Events(Struct, frozen=True):
    """``/v1/events`` as JSON: the events that are still kept."""

    at: float
    events: list[Event]


#: An answer whose last field, a list, is still empty; and the items of that list.
Parts = tuple[Struct, Iterable[Any]]


def whole(parts: Parts) -> Struct:
    """Return a list with its items in it."""
    head, items = parts
    return structs.replace(head, **{head.__struct_fields__[-1]: list(items)})


def containers(snapshot: Snapshot) -> Parts:
    """``/v1/containers``."""
    return Containers(snapshot.at, []), snapshot.containers


def usage(snapshot: Snapshot) -> Parts:
    """``/v1/usage``."""
    used = snapshot.used()
    return ContainerUses(snapshot.at, dict(used.unused_joules), list(used.without_slot), []), used.containers


def regions(snapshot: Snapshot) -> Parts:
    """``/v1/regions``."""
    rejected = [RejectedFile(path, reason) for path, reason in snapshot.rejected.items()]
    missing = list(snapshot.missing_dirs)
    return Regions(snapshot.at, rejected, missing, []), map(Region.of, snapshot.regions)


def slots(snapshot: Snapshot) -> Parts:
    """``/v1/slots``."""
    by_id = {container.container_id: container for container in snapshot.containers}
    items = (Slot.of(region, slot, by_id.get(slot.container_id)) for region, slot in snapshot.slots())
    return Slots(snapshot.at, []), items


def processes(snapshot: Snapshot) -> Parts:
    """``/v1/processes``."""
    return Processes(*nvml_state(snapshot), []), snapshot.gpu_processes


def nvml_state(snapshot: Snapshot) -> tuple[float, float | None, str | None]:
    """Return the fields of `NvmlState`."""
    return snapshot.at, snapshot.collected_at or None, snapshot.joined.error or None


def gpus(snapshot: Snapshot) -> Parts:
    """``/v1/gpus``."""
    inventory, error = snapshot.inventory, snapshot.joined.error or None
    return Gpus(inventory.at, inventory.version, inventory.driver_version, error, [], []), inventory.gpus


def unresolved(snapshot: Snapshot) -> Parts:
    """``/v1/unresolved``."""
    counts = UnresolvedCounts(
        Counter(snapshot.slot_counts().unresolved), Counter(snapshot.joined.orphan_reasons())
    )
    head = Unresolved(snapshot.at, counts, list(snapshot.joined.orphans), [])
    return head, (Slot.of(region, slot) for region, slot in snapshot.unresolved())


def _at(values: tuple[int | None, ...] | tuple[int, ...], index: int) -> int | None:
    """Return a value, or None for a layout without utilization."""
    return values[index] if index < len(values) else None
