"""What the answers of the API look like in JSON, and how they are made of the daemon's picture.

Containers, processes, samples, workers and settings are those of the picture itself (`resolver.state`, `resolver.gpu`);
regions, slots and GPUs are its records with what is only put together for an answer.

None (``null``) is "not known". Fields of a shared region carry their upstream C
names (``pid``, ``hostpid``, ``sm_util``). The schemas in ``/v1/openapi.json`` are made of these classes.
"""

from __future__ import annotations

import os
from operator import attrgetter
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from resolver import __version__
from resolver.config import Setting
from resolver.gpu.attribution import Sample
from resolver.gpu.inventory import GpuReport
from resolver.hami.placements import BARE
from resolver.log.event_log import Event
from resolver.reasons import RegionReason
from resolver.state import Container, PassSeconds, Process, RegionFacts, SlotFacts, Worker, tally

if TYPE_CHECKING:
    from resolver.gpu.inventory import Inventory
    from resolver.state import RegionReport, SlotReport, Snapshot


class Region(RegionFacts, frozen=True, kw_only=True):
    """One shared region: a cache file of HAMi's. ``slots`` is how many are in use, of which ``unresolved`` are.

    ``quarantined``: the slot writer died or hung on it, so it is skipped for a while. ``limit`` and ``sm_limit`` are
    the bytes of memory and the per cent of the cores that HAMi allows on each of ``device_uuids``; null without one.
    ``placement`` says which scheduler put it there. ``claim`` is the UID of the ResourceClaim whose it is; its slots
    may be those of several containers, and ``container_id`` is null if they are.
    """

    slots: int
    unresolved: int
    limit: list[int | None]
    sm_limit: list[int | None]

    @classmethod
    def of(cls, report: RegionReport) -> Region:
        """From the daemon's record."""
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
    """One device of a slot. ``sm_util`` is what the slot says, ``utilization`` the process's by NVML; per cent."""

    device_uuid: str
    sm_util: int | None
    utilization: int | None


class Slot(SlotFacts, frozen=True, kw_only=True):
    """One slot that is in use.

    ``path`` is its region's. ``pid`` and ``hostpid`` are what the slot says; ``host_pid`` is its verified owner, null
    while it is unresolved. ``repaired`` is why it was last written. ``stuck`` says why ``sm_util`` does not stay what
    NVML says though ``hostpid`` is right.
    """

    path: str
    container_id: str | None
    pod_uid: str | None
    container_name: str | None
    stuck: str | None
    device_util: list[DeviceUtil]

    @classmethod
    def of(cls, region: RegionReport, slot: SlotReport) -> Slot:
        """From the daemon's records."""
        return cls(
            *_slot_facts(slot),
            path=region.path,
            container_id=slot.container_id or region.container_id,
            pod_uid=region.pod_uid,
            container_name=region.container_name,
            stuck=slot.stuck or None,
            device_util=[
                DeviceUtil(uuid, _at(slot.sm_util, index), _at(slot.utilization, index))
                for index, uuid in enumerate(region.device_uuids)
            ],
        )


#: What of a record is sent as it is, in the order in which it is declared.
_region_facts, _slot_facts = (
    attrgetter(*RegionFacts.__struct_fields__),
    attrgetter(*SlotFacts.__struct_fields__),
)


class Gpu(GpuReport, frozen=True, kw_only=True):
    """One GPU. Memory in bytes, utilization in per cent, temperature in degrees Celsius, power in watts.

    ``samples`` is ``ok``, ``unsupported`` (MIG mode, for one) or ``failed``: whether NVML has the utilization of
    processes; ``samples_why`` says why not. It is healthy while ``illnesses`` is empty. ``pci_address`` is the
    kernel's name of it, ``pcie_root`` the PCI root complex that it hangs on. ``xids`` are the XID errors since the
    daemon started, ``details`` what the setting ``gpu_details`` adds; null without it.
    """

    healthy: bool

    @classmethod
    def of(cls, report: GpuReport) -> Gpu:
        """From the daemon's record."""
        return cls(**structs.asdict(report), healthy=not report.illnesses)


# ---- whole answers ------------------------------------------------------------------------------------------------


class Containers(Struct, frozen=True):
    """``/v1/containers``. ``at`` is when the daemon looked (Unix time), here and in every answer."""

    at: float
    containers: list[Container]


class Regions(Struct, frozen=True):
    """``/v1/regions``: those that are repaired, files that are ignored, directories that are not there."""

    at: float
    rejected: list[RejectedFile]
    missing_dirs: list[str]
    regions: list[Region]


class Slots(Struct, frozen=True):
    """``/v1/slots``: every slot in use."""

    at: float
    slots: list[Slot]


class Processes(Struct, frozen=True):
    """``/v1/processes``: every process on every GPU.

    ``collected_at`` is when NVML last answered (Unix time, null before the first time), ``error`` why it does not now.
    """

    at: float
    collected_at: float | None
    error: str | None
    processes: list[Process]


class Gpus(Struct, frozen=True):
    """``/v1/gpus``: ``version`` grows with each change, ``at`` is when they were read; also in the ``ETag``.

    ``version`` is 0 before NVML answered for the first time. ``error`` says why it does not answer now; the
    GPUs are then as they were last seen.
    """

    at: float
    version: int
    driver_version: str | None
    error: str | None
    gpus: list[Gpu]

    @classmethod
    def of(cls, inventory: Inventory, error: str) -> Gpus:
        """From the daemon's inventory, and what NVML fails with."""
        gpus = list(map(Gpu.of, inventory.gpus))
        return cls(
            at=inventory.at,
            version=inventory.version,
            driver_version=inventory.driver_version,
            error=error or None,
            gpus=gpus,
        )


class UnresolvedCounts(Struct, frozen=True):
    """How many, by reason."""

    slots: dict[str, int]
    samples: dict[str, int]


class Unresolved(Struct, frozen=True):
    """``/v1/unresolved``: slots and utilization samples that could not be resolved, each with its reason."""

    at: float
    by_reason: UnresolvedCounts
    samples: list[Sample]
    slots: list[Slot]


class Driver(Struct, frozen=True):
    """NVML: ``version`` is the driver's, ``collected_at`` when it last answered, ``error`` why it does not now."""

    version: str | None
    collected_at: float | None
    error: str | None
    gpus: int
    gpus_unhealthy: int


class Source(Struct, frozen=True):
    """Where PIDs come from. ``not_used`` says why the others are not; ``incomplete`` why it needs help.

    ``not_ready`` says why it is not known to find what it should; null while it does.
    """

    name: str
    not_used: dict[str, str]
    incomplete: str | None
    not_ready: str | None
    processes: int
    map_size: int
    counters: dict[str, int]


class Policy(Struct, frozen=True):
    """Which number ``hostpid`` must be: ``namespace`` is ``host``, ``container`` or ``unknown``.

    ``origin`` is ``measured``, ``by version``, ``forced`` or ``unknown``; ``not_measured`` is why it is not the first.
    """

    namespace: str
    why: str
    origin: str
    not_measured: str | None


class Totals(Struct, frozen=True):
    """How many there are now."""

    containers: int
    regions: int
    regions_rejected: int
    slots: int
    slots_dead: int
    slots_repaired: int
    slots_unresolved: int
    samples_unresolved: int
    processes: int


class Found(Struct, frozen=True):
    """How many cache files of one scheduler are repaired in one directory; null for those inside containers."""

    placement: str
    directory: str | None
    regions: int


class Status(Struct, frozen=True):
    """``/v1/status``: how the daemon is. ``counters`` and ``api`` only ever grow, but ``connected`` in ``api``."""

    at: float
    version: str
    started_at: float
    host_pid: int
    dry_run: bool
    passes: int
    pass_seconds: PassSeconds
    source: Source
    policy: Policy
    driver: Driver
    totals: Totals
    found: list[Found]
    workers: list[Worker]
    counters: dict[str, int]
    api: dict[str, int]
    settings: list[Setting]


class Events(Struct, frozen=True):
    """``/v1/events`` for who accepts JSON: those that are still kept."""

    at: float
    events: list[Event]


def status(picture: Snapshot, api: dict[str, int]) -> Status:
    """How the daemon is. ``api`` is what the API counts of itself."""
    slots = list(picture.tallies())
    gpus, joined = picture.inventory.gpus, picture.joined
    return Status(
        at=picture.at,
        version=__version__,
        started_at=picture.started_at,
        host_pid=os.getpid(),
        dry_run=picture.dry_run,
        passes=picture.passes,
        pass_seconds=picture.pass_seconds,
        source=Source(
            name=picture.source,
            not_used=dict(picture.sources_not_used),
            incomplete=picture.incomplete or None,
            not_ready=picture.not_ready or None,
            processes=picture.processes,
            map_size=picture.map_size,
            counters=dict(picture.source_counters),
        ),
        policy=Policy(
            namespace=picture.policy,
            why=picture.policy_why,
            origin=picture.policy_origin,
            not_measured=picture.not_measured or None,
        ),
        driver=Driver(
            version=picture.driver_version,
            collected_at=picture.collected_at or None,
            error=joined.error or None,
            gpus=len(gpus),
            gpus_unhealthy=sum(bool(gpu.illnesses) for gpu in gpus),
        ),
        totals=Totals(
            containers=len(picture.containers),
            regions=len(picture.regions),
            regions_rejected=len(picture.rejected),
            slots=sum(each.in_use for each in slots),
            slots_dead=sum(each.dead for each in slots),
            slots_repaired=sum(each.repaired for each in slots),
            slots_unresolved=sum(sum(each.unresolved.values()) for each in slots),
            samples_unresolved=len(joined.orphans),
            processes=len(picture.gpu_processes),
        ),
        found=found(picture),
        workers=list(picture.workers),
        counters=dict(picture.counters),
        api=api,
        settings=list(picture.settings),
    )


def found(picture: Snapshot) -> list[Found]:
    """Which scheduler's files were found where."""
    counts: dict[tuple[str, str], int] = {}
    for region in picture.regions:
        inside = region.placement == BARE.name
        key = region.placement or "", "" if inside else os.path.dirname(os.path.dirname(region.path))
        counts[key] = counts.get(key, 0) + 1
    return [Found(name, where or None, count) for (name, where), count in sorted(counts.items())]


def unresolved_counts(picture: Snapshot) -> UnresolvedCounts:
    """How many slots and samples could not be resolved."""
    slots: dict[str, int] = {}
    for each in picture.tallies():
        for why, count in each.unresolved.items():
            slots[str(why)] = slots.get(str(why), 0) + count
    samples = {str(reason): count for reason, count in picture.joined.orphan_reasons().items()}
    return UnresolvedCounts(slots, samples)


def _at(values: tuple[int | None, ...] | tuple[int, ...], index: int) -> int | None:
    """A layout may have no utilization at all."""
    return values[index] if index < len(values) else None
