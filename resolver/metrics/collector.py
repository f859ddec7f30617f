"""The metric families of one snapshot, one after the other. Nothing here waits for anything."""

from __future__ import annotations

import platform
from collections import Counter
from typing import TYPE_CHECKING, Any

from resolver import __version__
from resolver.counters import CounterByReason, CounterName
from resolver.gpu.health import REASONS
from resolver.gpu.inventory import OTHER, THROTTLE_REASONS
from resolver.gpu.sampler import FAILED, OK, UNSUPPORTED
from resolver.hami.hostpid_policy import Origin
from resolver.hami.layout import LAYOUTS
from resolver.hami.placements import PLACEMENTS
from resolver.metrics import families as f
from resolver.metrics.utilization import Names, Unknown, devices, names_of, nvml_trouble, usages
from resolver.reasons import BrokerRefusal, RegionReason, RepairReason, SampleReason, UnresolvedReason

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping
    from enum import StrEnum

    from prometheus_client.metrics_core import Metric

    from resolver.config import Settings
    from resolver.gpu.inventory import GpuDetails, GpuReport
    from resolver.metrics.utilization import Usage
    from resolver.state import Snapshot

#: Pairs of container or process and GPU that have series. More come only from somebody who wants to do harm.
MAX_SERIES = 4096
#: Values of NVML are believed for this many intervals, and for this many seconds at least.
_BELIEVED_INTERVALS, _BELIEVED_SECONDS = 2.5, 2.5
_SOURCES = ("bpf", "netlink", "scan")
_NAMESPACES = ("host", "container", "unknown")
COUNTERS = {  # of the daemon, that are a family of their own
    CounterName.CONFLICTS: f.CONFLICTS,
    CounterName.OVER_BUDGET: f.OVER_BUDGET,
    CounterName.WATCH_EVENTS: f.WATCH_EVENTS,
    CounterName.WATCH_OVERFLOWS: f.WATCH_OVERFLOWS,
    CounterName.WATCH_FLOODS: f.WATCH_FLOODS,
    CounterName.SLOTS_STUCK: f.STUCK,
    CounterName.UTILIZATION_WRITES: f.UTILIZATION_WRITES,
    CounterName.WRITES_UNDONE: f.UNDONE_WRITES,
    CounterName.WRITES_MISSED: f.MISSED_WRITES,
    CounterName.QUARANTINES: f.QUARANTINES,
    CounterName.WRITER_FAILURES: f.WRITER_FAILURES,
    CounterName.IMPLAUSIBLE_SAMPLES: f.IMPLAUSIBLE_SAMPLES,
    CounterName.INTERNAL_ERRORS: f.INTERNAL_ERRORS,
    CounterName.OUT_OF_DESCRIPTORS: f.OUT_OF_DESCRIPTORS,
    CounterName.DRIVER_PROBES: f.PROBES,
    CounterName.DRIVER_PROBES_REFUSED: f.PROBES_REFUSED,
    CounterName.DRIVER_PROBES_FAILED: f.PROBES_FAILED,
}
BROKER_COUNTERS = {
    CounterName.BROKER_ANSWERS: f.BROKER_ANSWERS,
    CounterName.BROKER_TIMEOUTS: f.BROKER_TIMEOUTS,
    CounterName.BROKER_BUSY: f.BROKER_BUSY,
}
COUNTERS_BY_REASON: dict[CounterByReason, tuple[f.Family, type[StrEnum]]] = {
    CounterByReason.REPAIRS: (f.REPAIRS, RepairReason),
    CounterByReason.WOULD_REPAIR: (f.DRY_RUN_REPAIRS, RepairReason),
    CounterByReason.REJECTED: (f.REJECTIONS, RegionReason),
}


def believed_seconds(settings: Settings) -> float:
    """How old NVML's last answer may be."""
    return max(_BELIEVED_SECONDS, _BELIEVED_INTERVALS * settings.nvml_interval)


def collect(snapshot: Snapshot, settings: Settings, now: float) -> Iterator[Metric]:
    """Every family, at Unix time ``now``."""
    trouble = nvml_trouble(snapshot, now, believed_seconds(settings))
    every = list(usages(snapshot, trouble))
    # A file may name GPUs that nobody has: these take no place away from others.
    used = [usage for usage in every if usage.utilization is not Unknown.UNKNOWN_DEVICE]
    left_out = max(0, len(used) - MAX_SERIES)
    del used[MAX_SERIES:]
    yield from _containers(used, len(every) - len(used) - left_out)
    yield from _limits(used, devices(snapshot))
    if settings.metrics_per_process:
        processes = list(_processes(snapshot)) if trouble is None else []
        left_out += max(0, len(processes) - MAX_SERIES)
        yield f.PROCESS_UTILIZATION.metric(_known(processes[:MAX_SERIES], 1, 100))
        yield f.PROCESS_MEMORY.metric(_known(processes[:MAX_SERIES], 2, 1))
    if settings.hami_metrics:
        from resolver.metrics import hami_names

        yield from hami_names.collect(snapshot, used, known=trouble is None)
    yield f.CONTAINERS.metric([((), len(snapshot.containers))])
    yield f.SERIES_LEFT_OUT.metric([((), left_out)])
    yield from _slots(snapshot)
    yield from _counters(snapshot, settings)
    yield from _nvml(snapshot, trouble, now)
    yield from _gpus(snapshot, known=trouble is None, details=settings.gpu_details)
    yield from _daemon(snapshot)


def _containers(used: list[Usage], unknown_devices: int) -> Iterator[Metric]:
    unknown = {(value, reason.value): 0 for value in ("utilization", "memory") for reason in Unknown}
    for value in ("utilization", "memory"):
        unknown[value, Unknown.UNKNOWN_DEVICE.value] = unknown_devices
    utilization, memory = [], []
    for usage in used:
        labels = (*usage.names, *usage.device[:2])
        if isinstance(usage.utilization, Unknown):
            unknown["utilization", usage.utilization.value] += 1
        else:
            utilization.append((labels, usage.utilization))
        if isinstance(usage.memory, Unknown):
            unknown["memory", usage.memory.value] += 1
        else:
            memory.append((labels, usage.memory))
    yield f.CONTAINER_UTILIZATION.metric(utilization)
    yield f.CONTAINER_MEMORY.metric(memory)
    yield f.UNKNOWN_VALUES.metric(unknown.items())


def _limits(used: list[Usage], known: Container[str]) -> Iterator[Metric]:
    """What HAMi allows, on the GPUs that are ``known``: a file may name others, and its word is no label."""
    rows = [((*usage.names, *usage.device[:2]), usage) for usage in used if usage.device.uuid in known]
    memory = ((labels, usage.limit) for labels, usage in rows)
    yield f.CONTAINER_MEMORY_LIMIT.metric((labels, limit) for labels, limit in memory if limit is not None)
    cores = ((labels, usage.core_limit) for labels, usage in rows)
    yield f.CONTAINER_CORE_LIMIT.metric((labels, limit / 100) for labels, limit in cores if limit is not None)


def _processes(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], int | None, int | None]]:
    """Labels, utilization in per cent and memory of every process on every GPU, once."""
    index = {gpu.uuid: str(gpu.device_index) for gpu in snapshot.inventory.gpus}
    seen = set()
    for process in snapshot.gpu_processes:
        ended = process.no_slot in (SampleReason.PROCESS_ENDED, SampleReason.PID_UNKNOWN)
        if ended or (process.host_pid, process.device_uuid) in seen:
            continue
        seen.add((process.host_pid, process.device_uuid))
        ns_pid = "" if process.ns_pid is None else str(process.ns_pid)
        device = (process.device_uuid, index.get(process.device_uuid, ""))
        labels = (*names_of(process), *device, str(process.host_pid), ns_pid)
        yield labels, process.sm_util, process.memory


def _known(rows: Iterable[tuple[Any, ...]], column: int, unit: int) -> Iterator[f.Row]:
    for row in rows:
        if row[column] is not None:
            yield row[0], row[column] / unit


def _by(family: f.Family, reasons: Iterable[str], counted: Counter[str]) -> Metric:
    """A series for each reason, 0 too, so that a rate is known from the first one on."""
    values = {str(reason): 0 for reason in reasons} | counted
    return family.metric(((reason,), count) for reason, count in values.items())


def _claims(snapshot: Snapshot) -> Iterator[f.Row]:
    """Which containers use the file of each ResourceClaim."""
    containers = {container.container_id: container for container in snapshot.containers}
    pairs = {
        (region.claim, each) for region in snapshot.regions if region.claim for each in region.container_ids
    }
    for claim, container_id in sorted(pairs)[:MAX_SERIES]:
        container = containers.get(container_id)
        names = (
            names_of(container)
            if container
            else Names(namespace="", pod="", container="", pod_uid="", container_id=container_id)
        )
        yield (claim, *names), 1


def _slots(snapshot: Snapshot) -> Iterator[Metric]:
    states, reasons, stuck = Counter[str](), Counter[str](), 0
    for each in snapshot.tallies():
        unresolved = sum(each.unresolved.values())
        states += {
            "unresolved": unresolved,
            "dead": each.dead,
            "resolved": each.in_use - each.dead - unresolved,
        }
        reasons += {why.value: count for why, count in each.unresolved.items()}
        stuck += each.stuck
    yield _by(f.REGIONS, LAYOUTS, Counter(region.layout for region in snapshot.regions))
    placements = Counter(region.placement or "" for region in snapshot.regions)
    yield _by(f.PLACEMENT_REGIONS, [row.name for row in PLACEMENTS], placements)
    yield f.CLAIM.metric(_claims(snapshot))
    yield _by(f.SLOTS, ("resolved", "unresolved", "dead"), states)
    yield _by(f.UNRESOLVED_SLOTS, UnresolvedReason, reasons)
    yield f.STUCK_SLOTS.metric([((), stuck)])
    yield _by(
        f.REJECTED_REGIONS, RegionReason, Counter(reason.value for reason in snapshot.rejected.values())
    )
    yield f.QUARANTINED_REGIONS.metric([((), sum(region.quarantined for region in snapshot.regions))])
    yield f.UNWATCHED_REGIONS.metric([((), snapshot.unwatched)])
    yield f.MISSING_DIRECTORIES.metric([((), len(snapshot.missing_dirs))])


def _counters(snapshot: Snapshot, settings: Settings) -> Iterator[Metric]:
    counters = snapshot.counters
    for name, family in COUNTERS.items():
        yield family.metric([((), counters.get(name, 0))])
    for counted, (family, reasons) in COUNTERS_BY_REASON.items():
        yield _by_reason(family, counted, reasons, counters)
    if settings.broker:
        for name, family in BROKER_COUNTERS.items():
            yield family.metric([((), counters.get(name, 0))])
        yield _by_reason(f.BROKER_REFUSED, CounterByReason.BROKER_REFUSED, BrokerRefusal, counters)


def _by_reason(
    family: f.Family, counted: CounterByReason, reasons: type[StrEnum], counters: Mapping[str, int]
) -> Metric:
    return family.metric(((reason,), n) for reason, n in counted.counts(counters, reasons).items())


def _nvml(snapshot: Snapshot, trouble: Unknown | None, now: float) -> Iterator[Metric]:
    yield f.NVML_UP.metric([((), trouble is None)])
    answered = snapshot.collected_at > 0
    yield f.NVML_LAST_SUCCESS.metric([((), snapshot.collected_at)] if answered else [])
    yield f.NVML_AGE.metric([((), max(0.0, now - snapshot.collected_at))] if answered else [])
    orphans = Counter({reason.value: n for reason, n in snapshot.joined.orphan_reasons().items()})
    yield f.UNRESOLVED_SAMPLES.metric([]) if trouble else _by(f.UNRESOLVED_SAMPLES, SampleReason, orphans)
    version = snapshot.driver_version
    yield f.DRIVER.metric([((version,), 1)] if version else [])
    yield f.NAMESPACE.metric(_state(_NAMESPACES, snapshot.policy))
    yield f.NAMESPACE_ORIGIN.metric(_state(Origin, snapshot.policy_origin))


def _state(states: Iterable[str], present: str, *labels: str) -> list[f.Row]:
    return [((*labels, _word(state)), state == present) for state in states]


def _word(name: str) -> str:
    """A name of ours as a label's value: nobody wants to quote blanks in a query."""
    return name.replace(" ", "_")


def _gpus(snapshot: Snapshot, *, known: bool, details: bool) -> Iterator[Metric]:
    """``known``: NVML answers. What it said before it stopped is not what is."""
    gpus = [(gpu, (gpu.uuid, str(gpu.device_index))) for gpu in snapshot.inventory.gpus]

    def values(family: f.Family, value: Callable[[GpuReport], float | None], unit: int = 1) -> Metric:
        numbers = ((labels, value(gpu)) for gpu, labels in gpus if known)
        return family.metric((labels, number / unit) for labels, number in numbers if number is not None)

    yield f.GPU.metric(
        ((*labels, "" if gpu.minor is None else str(gpu.minor), gpu.name), 1) for gpu, labels in gpus
    )
    yield values(f.GPU_MEMORY, lambda gpu: gpu.memory_total)
    yield values(f.GPU_MEMORY_USED, lambda gpu: gpu.memory_used)
    yield values(f.GPU_UTILIZATION, lambda gpu: gpu.utilization, 100)
    yield values(f.GPU_TEMPERATURE, lambda gpu: gpu.temperature)
    yield values(f.GPU_POWER, lambda gpu: gpu.power)
    yield values(f.GPU_ECC, lambda gpu: gpu.ecc_uncorrected)
    yield values(f.GPU_HEALTHY, lambda gpu: not gpu.illnesses)
    yield values(f.GPU_MIG, lambda gpu: gpu.mig)
    ill = [(labels, illness) for gpu, labels in gpus if known for illness in gpu.illnesses]
    has = {(*labels, illness.reason) for labels, illness in ill}
    reasons = [(*labels, reason) for _, labels in gpus if known for reason in REASONS]
    yield f.GPU_UNHEALTHY.metric((labels, labels in has) for labels in dict.fromkeys((*reasons, *has)))
    yield f.GPU_UNHEALTHY_SINCE.metric(((*labels, illness.reason), illness.since) for labels, illness in ill)
    yield f.GPU_XIDS.metric(
        ((*labels, str(each.xid)), each.count) for gpu, labels in gpus if known for each in gpu.xids
    )
    if details:
        yield from _gpu_details([(gpu.details, labels) for gpu, labels in gpus if known and gpu.details])
    states = (OK, UNSUPPORTED, FAILED)
    yield f.GPU_SAMPLES.metric(
        row for gpu, labels in gpus if known for row in _state(states, gpu.samples, *labels)
    )
    instances = [
        ((*labels, each.uuid, str(each.gpu_instance), str(each.compute_instance)), each)
        for gpu, labels in gpus
        if known
        for each in gpu.mig_instances
    ]
    for family, attribute in ((f.MIG_MEMORY, "memory_total"), (f.MIG_MEMORY_USED, "memory_used")):
        numbers = ((labels, getattr(each, attribute)) for labels, each in instances)
        yield family.metric((labels, number) for labels, number in numbers if number is not None)


def _gpu_details(gpus: list[tuple[GpuDetails, tuple[str, str]]]) -> Iterator[Metric]:
    for family, value, factor in (
        (f.GPU_SM_CLOCK, "sm_clock", 1e6),
        (f.GPU_MEMORY_CLOCK, "memory_clock", 1e6),
        (f.GPU_POWER_LIMIT, "power_limit", 1),
        (f.GPU_ENERGY, "energy", 1),
        (f.GPU_PCIE_GENERATION, "pcie_generation", 1),
        (f.GPU_PCIE_WIDTH, "pcie_width", 1),
        (f.GPU_PCIE_REPLAYS, "pcie_replays", 1),
        (f.GPU_ECC_CORRECTED, "ecc_corrected", 1),
        (f.GPU_ENCODER, "encoder", 0.01),
        (f.GPU_DECODER, "decoder", 0.01),
    ):
        values = ((labels, getattr(details, value)) for details, labels in gpus)
        yield family.metric((labels, number * factor) for labels, number in values if number is not None)
    yield f.GPU_THROTTLED.metric(
        ((*labels, reason), reason in details.throttle_reasons)
        for details, labels in gpus
        if details.throttle_reasons is not None
        for reason in (*THROTTLE_REASONS, OTHER)
    )


def _daemon(snapshot: Snapshot) -> Iterator[Metric]:
    from resolver.metrics import own

    yield f.BUILD.metric([((__version__, platform.python_version()), 1)])
    yield f.READY.metric([((), not snapshot.not_ready)])
    yield f.SOURCE.metric(_state(_SOURCES, snapshot.source))
    unused = snapshot.sources_not_used
    yield f.SOURCE_FAILED.metric(((name,), name in unused) for name in _SOURCES)
    yield f.SOURCE_COMPLETE.metric([((), not snapshot.incomplete)])
    yield f.MAP_EVENTS.metric(((name,), count) for name, count in snapshot.source_counters.items())
    yield f.PROCESSES.metric([((), snapshot.processes)])
    yield f.MAP_SIZE.metric([((), snapshot.map_size)])
    yield f.PASSES.histogram(snapshot.pass_seconds)
    workers = snapshot.workers
    yield f.WORKER_STARTS.metric(((_word(worker.name),), worker.starts) for worker in workers)
    yield f.WORKER_FAILURES.metric(((_word(worker.name),), worker.failures) for worker in workers)
    yield f.DRY_RUN.metric([((), snapshot.dry_run)])
    yield f.STANDBY.metric([((), bool(snapshot.holder))])
    yield from own.collect()
