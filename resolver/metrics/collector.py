"""The metric families of one snapshot, one after the other. Nothing here waits for anything."""

from __future__ import annotations

import platform
from collections import Counter
from typing import TYPE_CHECKING, Any

from resolver.base.counters import CounterByReason
from resolver.base.reasons import GpuReason, RegionReason, SampleReason, UnresolvedReason
from resolver.base.source_records import SOURCE_RECORDS
from resolver.base.version import VERSION
from resolver.gpu.inventory import OTHER, THROTTLE_REASONS
from resolver.gpu.sampler import FAILED, OK, UNSUPPORTED
from resolver.hami.hostpid_policy import Origin, WatcherFinding
from resolver.hami.layout import LAYOUTS
from resolver.hami.placements import PLACEMENTS
from resolver.metrics import families as f
from resolver.metrics.utilization import Names, Unknown, devices, names_of, nvml_trouble, usages
from resolver.state import LimitState

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping

    from prometheus_client.metrics_core import Metric

    from resolver.config import Settings
    from resolver.metrics.family import Family, Row
    from resolver.metrics.utilization import Usage
    from resolver.state import ContainerUse, Process, Snapshot

#: Pairs of container or process and GPU that have series. More come only from an attack.
MAX_SERIES = 4096
#: Values of NVML are believed for this many intervals, and for this many seconds at least.
_BELIEVED_INTERVALS, _BELIEVED_SECONDS = 2.5, 2.5
_NAMESPACES = ("host", "container", "unknown")


def collect(snapshot: Snapshot, settings: Settings, now: float) -> Iterator[Metric]:
    """Yield every family, at Unix time ``now``."""
    believed = max(_BELIEVED_SECONDS, _BELIEVED_INTERVALS * settings.nvml_interval)
    trouble = nvml_trouble(snapshot, now, believed)
    every = list(usages(snapshot, trouble))
    # A file may name GPUs that don't exist: these take no place away from others.
    used = [usage for usage in every if usage.utilization is not Unknown.UNKNOWN_DEVICE]
    left_out = max(0, len(used) - MAX_SERIES)
    del used[MAX_SERIES:]
    yield from _containers(used, len(every) - len(used) - left_out)
    yield from _limits(used, devices(snapshot))
    index = {gpu.uuid: str(gpu.device_index) for gpu in snapshot.inventory.gpus}
    yield from _accounts(snapshot, index)
    if settings.metrics_per_process:
        processes = list(_processes(snapshot, index)) if trouble is None else []
        left_out += max(0, len(processes) - MAX_SERIES)
        del processes[MAX_SERIES:]
        yield f.PROCESS_UTILIZATION.metric((labels, _times(util, 0.01)) for labels, util, _ in processes)
        yield f.PROCESS_MEMORY.metric((labels, memory) for labels, _, memory in processes)
    if settings.hami_metrics:
        from resolver.metrics import hami_names

        yield from hami_names.collect(snapshot, used, known=trouble is None)
    yield f.CONTAINERS.single(len(snapshot.containers))
    yield f.SERIES_LEFT_OUT.single(left_out)
    yield from _slots(snapshot)
    for counter, family in f.COUNTERS.items():
        if settings.broker or not counter.startswith("broker_"):
            yield family.single(snapshot.counters.get(counter, 0))
    for counted, (family, reasons) in f.COUNTERS_BY_REASON.items():
        if settings.broker or counted is not CounterByReason.BROKER_REFUSED:
            counts = counted.counts(snapshot.counters, reasons)
            yield family.metric(((reason,), count) for reason, count in counts.items())
    yield from _nvml(snapshot, trouble, now)
    yield from _gpus(snapshot, known=trouble is None, details=settings.gpu_details)
    yield from _daemon(snapshot)


def _containers(used: list[Usage], unknown_devices: int) -> Iterator[Metric]:
    unknown = {(value, reason.value): 0 for value in ("utilization", "memory") for reason in Unknown}
    for value, family in (("utilization", f.CONTAINER_UTILIZATION), ("memory", f.CONTAINER_MEMORY)):
        unknown[value, Unknown.UNKNOWN_DEVICE.value] = unknown_devices
        rows = []
        for usage in used:
            number = getattr(usage, value)
            if isinstance(number, Unknown):
                unknown[value, number.value] += 1
            else:
                rows.append((usage.labels, number))
        yield family.metric(rows)
    wrapped = sum(isinstance(usage.counted, Unknown) for usage in used)
    yield f.UNKNOWN_VALUES.metric({**unknown, ("hami_memory", Unknown.IMPLAUSIBLE.value): wrapped}.items())


def _limits(used: list[Usage], known: Container[str]) -> Iterator[Metric]:
    """Yield HAMi's limits on the ``known`` GPUs: a file may name others, and its text is no label."""
    its = [usage for usage in used if usage.device.uuid in known]
    yield f.CONTAINER_MEMORY_LIMIT.metric((usage.labels, usage.limit) for usage in its)
    yield f.CONTAINER_CORE_LIMIT.metric((usage.labels, _times(usage.core_limit, 0.01)) for usage in its)


def _accounts(snapshot: Snapshot, indexes: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the counters of each container on each GPU, and the processes that HAMi-core doesn't know."""
    used = snapshot.used()
    its = [((*names_of(each), *_device(each, indexes)), each) for each in used.containers[:MAX_SERIES]]
    yield f.CONTAINER_GPU_SECONDS.metric((labels, each.gpu_seconds) for labels, each in its)
    yield f.CONTAINER_GPU_SINCE.metric((labels, each.since) for labels, each in its)
    yield f.CONTAINER_MEMORY_SECONDS.metric((labels, each.memory_byte_seconds) for labels, each in its)
    yield f.CONTAINER_UNKNOWN_SECONDS.metric((labels, each.unknown_seconds) for labels, each in its)
    yield f.CONTAINER_ESTIMATED_SECONDS.metric((labels, each.estimated_seconds) for labels, each in its)
    yield f.CONTAINER_IDLE_SECONDS.metric(
        (labels, max(0.0, snapshot.at - each.idle_since))
        for labels, each in its
        if each.idle_since is not None
    )
    yield f.CONTAINER_ENERGY.metric((labels, each.energy) for labels, each in its)
    yield f.UNUSED_ENERGY.metric(((uuid,), joules) for uuid, joules in used.unused_joules.items())
    yield f.CONTAINER_XIDS.metric((labels, each.xids) for labels, each in its)
    yield f.CORE_LIMIT_STATE.metric(
        row for labels, each in its for row in _state(LimitState, each.limit_state, *labels)
    )
    counts: Counter[tuple[str, ...]] = Counter()
    memory: Counter[tuple[str, ...]] = Counter()
    for process in (each.process for each in used.without_slot):
        labels = (*names_of(process), *_device(process, indexes), process.no_slot or "")
        counts[labels] += 1
        memory[labels] += process.memory or 0
    yield f.WITHOUT_SLOT.metric(list(counts.items())[:MAX_SERIES])
    yield f.WITHOUT_SLOT_MEMORY.metric(list(memory.items())[:MAX_SERIES])


def _processes(
    snapshot: Snapshot, indexes: Mapping[str, str]
) -> Iterator[tuple[tuple[str, ...], int | None, int | None]]:
    """Labels, utilization in per cent and memory of every process on every GPU, once."""
    seen = set()
    for process in snapshot.gpu_processes:
        ended = process.no_slot in (SampleReason.PROCESS_ENDED, SampleReason.PID_UNKNOWN)
        if ended or (process.host_pid, process.device_uuid) in seen:
            continue
        seen.add((process.host_pid, process.device_uuid))
        ns_pid = "" if process.ns_pid is None else str(process.ns_pid)
        labels = (*names_of(process), *_device(process, indexes), str(process.host_pid), ns_pid)
        yield labels, process.sm_util, process.memory


def _device(record: Process | ContainerUse, indexes: Mapping[str, str]) -> tuple[str, str]:
    return record.device_uuid, indexes.get(record.device_uuid, "")


def _times(number: float | None, factor: float) -> float | None:
    return None if number is None else number * factor


def _by(family: Family, reasons: Iterable[str], counted: Mapping[Any, int]) -> Metric:
    """Give each reason a series, including 0, so that a rate sees the first increment."""
    values = {str(reason): 0 for reason in reasons} | {str(reason): n for reason, n in counted.items()}
    return family.metric(((reason,), count) for reason, count in values.items())


def _claims(snapshot: Snapshot) -> Iterator[Row]:
    """Yield the containers that use the file of each ResourceClaim."""
    containers = {container.container_id: container for container in snapshot.containers}
    pairs = {
        (region.claim, each) for region in snapshot.regions if region.claim for each in region.container_ids
    }
    for claim, container_id in sorted(pairs)[:MAX_SERIES]:
        container = containers.get(container_id)
        yield (claim, *(names_of(container) if container else Names(container_id=container_id))), 1


def _slots(snapshot: Snapshot) -> Iterator[Metric]:
    counts = snapshot.slot_counts()
    unresolved = counts.unresolved.total()
    states = {
        "resolved": counts.in_use - counts.dead - unresolved,
        "unresolved": unresolved,
        "dead": counts.dead,
    }
    regions = snapshot.regions
    yield _by(f.REGIONS, LAYOUTS, Counter(region.layout for region in regions))
    placements = Counter(region.placement or "" for region in regions)
    yield _by(f.PLACEMENT_REGIONS, [row.name for row in PLACEMENTS], placements)
    yield f.CLAIM.metric(_claims(snapshot))
    yield _by(f.SLOTS, (), states)
    yield _by(f.UNRESOLVED_SLOTS, UnresolvedReason, counts.unresolved)
    yield f.STUCK_SLOTS.single(counts.stuck)
    yield _by(f.REJECTED_REGIONS, RegionReason, Counter(snapshot.rejected.values()))
    yield f.QUARANTINED_REGIONS.single(sum(region.quarantined for region in regions))
    yield f.UNWATCHED_REGIONS.single(snapshot.unwatched)
    yield f.MISSING_DIRECTORIES.single(len(snapshot.missing_dirs))


def _nvml(snapshot: Snapshot, trouble: Unknown | None, now: float) -> Iterator[Metric]:
    yield f.NVML_SECONDS.histogram(snapshot.nvml_seconds)
    yield f.NVML_UP.single(trouble is None)
    at = snapshot.collected_at or None
    yield f.NVML_AGE.single(None if at is None else max(0.0, now - at))
    orphans = snapshot.joined.orphan_reasons()
    yield f.UNRESOLVED_SAMPLES.metric([]) if trouble else _by(f.UNRESOLVED_SAMPLES, SampleReason, orphans)
    version = snapshot.driver_version
    yield f.DRIVER.metric([((version,), 1)] if version else [])
    yield f.NAMESPACE.metric(_state(_NAMESPACES, snapshot.policy.namespace))
    yield f.NAMESPACE_ORIGIN.metric(_state(Origin, snapshot.policy.origin))
    yield _by(f.WATCHERS, WatcherFinding, snapshot.policy.watchers)


def _state(states: Iterable[str], present: str, *labels: str) -> Iterator[Row]:
    return (((*labels, _word(state)), state == present) for state in states)


def _word(name: str) -> str:
    """Replace the spaces in an internal name, so that queries need not quote the label value."""
    return name.replace(" ", "_")


def _gpus(snapshot: Snapshot, *, known: bool, details: bool) -> Iterator[Metric]:
    """Yield the GPUs' families; ``known`` means that NVML answers, because earlier values aren't current."""
    every = [((gpu.uuid, str(gpu.device_index)), gpu) for gpu in snapshot.inventory.gpus]
    gpus = every if known else []
    minors = {labels: "" if gpu.minor is None else str(gpu.minor) for labels, gpu in every}
    yield f.GPU.metric(((*labels, minors[labels], gpu.name), 1) for labels, gpu in every)
    yield from _values(f.GPU_VALUES, gpus)
    ill = [(labels, illness) for labels, gpu in gpus for illness in gpu.illnesses]
    has = {(*labels, illness.reason) for labels, illness in ill}
    reasons = [(*labels, reason) for labels, _ in gpus for reason in GpuReason]
    yield f.GPU_UNHEALTHY.metric((labels, labels in has) for labels in dict.fromkeys((*reasons, *has)))
    yield f.GPU_UNHEALTHY_SINCE.metric(((*labels, illness.reason), illness.since) for labels, illness in ill)
    yield f.GPU_NVLINKS.metric(
        ((*labels, remote), count) for labels, gpu in gpus for remote, count in (gpu.nvlinks or {}).items()
    )
    yield f.GPU_XIDS.metric(
        ((*labels, str(each.xid)), each.count) for labels, gpu in gpus for each in gpu.xids
    )
    if details:
        detailed = [(labels, gpu.details) for labels, gpu in gpus if gpu.details]
        yield from _values(f.GPU_DETAILS, detailed)
        yield f.GPU_THROTTLED.metric(
            ((*labels, reason), reason in each.throttle_reasons)
            for labels, each in detailed
            if each.throttle_reasons is not None
            for reason in (*THROTTLE_REASONS, OTHER)
        )
    states = (OK, UNSUPPORTED, FAILED)
    yield f.GPU_SAMPLES.metric(row for labels, gpu in gpus for row in _state(states, gpu.samples, *labels))
    instances = [
        ((*labels, each.uuid, str(each.gpu_instance), str(each.compute_instance)), each)
        for labels, gpu in gpus
        for each in gpu.mig_instances
    ]
    yield f.MIG_MEMORY.metric((labels, each.memory_total) for labels, each in instances)
    yield f.MIG_MEMORY_USED.metric((labels, each.memory_used) for labels, each in instances)


def _values(values: Iterable[f.GpuValue], records: list[tuple[tuple[str, str], Any]]) -> Iterator[Metric]:
    for family, attribute, factor in values:
        yield family.metric((labels, _times(getattr(each, attribute), factor)) for labels, each in records)


def _daemon(snapshot: Snapshot) -> Iterator[Metric]:
    from resolver.metrics import own

    source = snapshot.source
    yield f.BUILD.metric([((VERSION, platform.python_version()), 1)])
    yield f.READY.single(not source.not_ready)
    yield f.SOURCE.metric(_state(SOURCE_RECORDS, source.name))
    yield f.SOURCE_FAILED.metric(((name,), name in source.not_used) for name in SOURCE_RECORDS)
    yield f.SOURCE_COMPLETE.single(not source.incomplete)
    yield f.MAP_EVENTS.metric(((name,), count) for name, count in source.counters.items())
    yield f.PROCESSES.single(source.processes)
    yield f.MAP_SIZE.single(source.map_size or None)
    yield f.PASSES.histogram(snapshot.pass_seconds)
    yield f.WORKER_STARTS.metric(((_word(each.name),), each.starts) for each in snapshot.workers)
    yield f.WORKER_FAILURES.metric(((_word(each.name),), each.failures) for each in snapshot.workers)
    yield f.DRY_RUN.single(snapshot.dry_run)
    yield f.STANDBY.single(bool(snapshot.holder))
    yield from own.collect()
