"""The metric families of one snapshot, one after the other. No function here waits."""

import contextlib
import os
import platform
import resource
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any, Final

from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector

from resolver.base.counters import CounterByReason, Shortage
from resolver.base.reasons import (
    BrokerRefusal,
    GpuReason,
    RegionReason,
    RepairReason,
    SampleReason,
    UnresolvedReason,
)
from resolver.base.source_records import SOURCE_RECORDS
from resolver.base.version import VERSION
from resolver.config import Settings
from resolver.gpu.sampler import FAILED, OK, UNSUPPORTED
from resolver.hami.hostpid_policy import Origin, WatcherFinding
from resolver.hami.layout import LAYOUTS
from resolver.hami.placements import PLACEMENTS
from resolver.linux import procfs
from resolver.metrics.family import FAMILIES, Row, histogram, metric, values
from resolver.metrics.utilization import Names, Unknown, Usage, devices, names_of, nvml_trouble, usages
from resolver.state import ContainerUse, LimitState, Process, Snapshot

#: Pairs of container or process and GPU that have series. More come only from an attack.
MAX_SERIES = 4096
#: NVML's values are valid for this many intervals, and for this many seconds at least.
_BELIEVED_INTERVALS, _BELIEVED_SECONDS = 2.5, 2.5
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_REASONS: Final[dict[CounterByReason, type[StrEnum]]] = {
    CounterByReason.REPAIRS: RepairReason,
    CounterByReason.WOULD_REPAIR: RepairReason,
    CounterByReason.REJECTED: RegionReason,
    CounterByReason.SHORTAGES: Shortage,
    CounterByReason.BROKER_REFUSED: BrokerRefusal,
}
_own_process = ProcessCollector(registry=None)
children_cpu = [0.0]  # seconds: a child that ends between two reads must not make a counter fall


def collect(snapshot: Snapshot, settings: Settings, now: float) -> Iterator[Metric]:
    """Yield every family, at Unix time ``now``."""
    believed = max(_BELIEVED_SECONDS, _BELIEVED_INTERVALS * settings.nvml_interval)
    trouble = nvml_trouble(snapshot, now, believed)
    every = list(usages(snapshot, trouble))
    # A file may name GPUs that don't exist: these take no place away from others.
    used = [usage for usage in every if usage.utilization is not Unknown.UNKNOWN_DEVICE]
    left_out = max(0, len(used) - MAX_SERIES)
    del used[MAX_SERIES:]
    yield from _containers(used, len(every) - len(used) - left_out, devices(snapshot))
    index = {gpu.uuid: str(gpu.device_index) for gpu in snapshot.inventory.gpus}
    yield from _accounts(snapshot, index)
    if settings.metrics_per_process:
        processes = list(_processes(snapshot, index)) if trouble is None else []
        left_out += max(0, len(processes) - MAX_SERIES)
        yield from values("process", processes[:MAX_SERIES])
    if settings.hami_metrics:
        from resolver.metrics import hami_names

        yield from hami_names.collect(snapshot, used, known=trouble is None)
    yield metric("resolver_series_left_out", left_out)
    yield from _slots(snapshot)
    yield from _counters(snapshot.counters, broker=bool(settings.broker))
    yield from _nvml(snapshot, trouble, now)
    yield from _gpus(snapshot, known=trouble is None)
    yield from _daemon(snapshot)
    yield from _own_process.collect()
    yield from _children()


def _containers(used: list[Usage], unknown_devices: int, listed: Container[str]) -> Iterator[Metric]:
    """Yield the use now, and HAMi's limits on GPUs that NVML has ``listed``: a file's text is no label."""
    unknown = {(value, reason.value): 0 for value in ("utilization", "memory") for reason in Unknown}
    for value, name in (("utilization", "utilization_ratio"), ("memory", "memory_bytes")):
        unknown[value, Unknown.UNKNOWN_DEVICE.value] = unknown_devices
        rows: list[Row] = []
        for usage in used:
            number = getattr(usage, value)
            if isinstance(number, Unknown):
                unknown[value, number.value] += 1
            else:
                rows.append((usage.labels, number))
        yield metric(f"resolver_container_{name}", rows)
    wrapped = sum(isinstance(usage.counted, Unknown) for usage in used)
    unknown["hami_memory", Unknown.IMPLAUSIBLE.value] = wrapped
    yield metric("resolver_container_unknown_values", unknown.items())
    yield from values("limited", [(usage.labels, usage) for usage in used if usage.device.uuid in listed])


def _accounts(snapshot: Snapshot, indexes: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the counters of each container on each GPU, and the processes that HAMi-core doesn't know."""
    report = snapshot.used()
    uses = [((*names_of(use), *_device(use, indexes)), use) for use in report.containers[:MAX_SERIES]]
    yield from values("use", uses)
    idle = ((labels, snapshot.at - use.idle_since) for labels, use in uses if use.idle_since is not None)
    yield metric(
        "resolver_container_gpu_idle_seconds", ((labels, max(0.0, seconds)) for labels, seconds in idle)
    )
    states = ((labels, _state(LimitState, use.limit_state)) for labels, use in uses)
    yield metric("resolver_container_core_limit_state", states)
    unused = (((uuid,), joules) for uuid, joules in report.unused_joules.items())
    yield metric("resolver_gpu_unused_energy_joules_total", unused)
    counts, memory = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for process in (without.process for without in report.without_slot):
        labels = (*names_of(process), *_device(process, indexes), process.no_slot or "")
        counts[labels] += 1
        memory[labels] += process.memory or 0
    yield metric("resolver_processes_without_slot", list(counts.items())[:MAX_SERIES])
    yield metric("resolver_processes_without_slot_memory_bytes", list(memory.items())[:MAX_SERIES])


def _processes(snapshot: Snapshot, indexes: Mapping[str, str]) -> Iterator[tuple[tuple[str, ...], Process]]:
    seen = set()
    for process in snapshot.gpu_processes:
        ended = process.no_slot in (SampleReason.PROCESS_ENDED, SampleReason.PID_UNKNOWN)
        if ended or (process.host_pid, process.device_uuid) in seen:
            continue
        seen.add((process.host_pid, process.device_uuid))
        ns_pid = "" if process.ns_pid is None else str(process.ns_pid)
        labels = (*names_of(process), *_device(process, indexes), str(process.host_pid), ns_pid)
        yield labels, process


def _device(record: Process | ContainerUse, indexes: Mapping[str, str]) -> tuple[str, str]:
    return record.device_uuid, indexes.get(record.device_uuid, "")


def _by(reasons: Iterable[str], counted: Mapping[Any, int]) -> Iterator[Row]:
    """Give each reason a series, including 0, so that a rate sees the first increment."""
    values = {str(reason): 0 for reason in reasons} | {str(reason): n for reason, n in counted.items()}
    return (((reason,), count) for reason, count in values.items())


def _state(states: Iterable[str], present: str) -> dict[str, bool]:
    return {_word(state): state == present for state in states}


def _word(name: str) -> str:
    """Replace the spaces in an internal name, so that queries need not quote the label value."""
    return name.replace(" ", "_")


def _claims(snapshot: Snapshot) -> Iterator[Row]:
    containers = {container.container_id: container for container in snapshot.containers}
    pairs = {
        (region.claim, container_id)
        for region in snapshot.regions
        if region.claim
        for container_id in region.container_ids
    }
    for claim, container_id in sorted(pairs)[:MAX_SERIES]:
        container = containers.get(container_id)
        yield (claim, *(names_of(container) if container else Names(container_id=container_id))), {}


def _slots(snapshot: Snapshot) -> Iterator[Metric]:
    counts, regions = snapshot.slot_counts(), snapshot.regions
    unresolved = counts.unresolved.total()
    resolved = counts.in_use - counts.dead - unresolved
    states = {"resolved": resolved, "unresolved": unresolved, "dead": counts.dead}
    placements = Counter(region.placement or "" for region in regions)
    yield metric("resolver_containers", len(snapshot.containers))
    yield metric("resolver_regions", _by(LAYOUTS, Counter(region.layout for region in regions)))
    yield metric("resolver_placement_regions", _by([row.name for row in PLACEMENTS], placements))
    yield metric("resolver_claim_info", _claims(snapshot))
    yield metric("resolver_slots", _by((), states))
    yield metric("resolver_unresolved_slots", _by(UnresolvedReason, counts.unresolved))
    yield metric("resolver_stuck_slots", counts.stuck)
    yield metric("resolver_rejected_regions", _by(RegionReason, Counter(snapshot.rejected.values())))
    yield metric("resolver_quarantined_regions", sum(region.quarantined for region in regions))
    yield metric("resolver_missing_directories", len(snapshot.missing_dirs))


def _counters(counted: Mapping[str, int], *, broker: bool) -> Iterator[Metric]:
    for family in FAMILIES.values():
        if family.record == "counter" and (broker or not family.attribute.startswith("broker_")):
            if not family.labels:
                yield metric(family.name, counted.get(family.attribute, 0))
            else:
                counter = CounterByReason(family.attribute)
                yield metric(family.name, _by((), counter.counts(counted, _REASONS[counter])))


def _nvml(snapshot: Snapshot, trouble: Unknown | None, now: float) -> Iterator[Metric]:
    yield histogram("resolver_nvml_collection_seconds", snapshot.nvml_seconds)
    yield metric("resolver_nvml_up", trouble is None)
    age = max(0.0, now - snapshot.collected_at) if snapshot.collected_at else None
    yield metric("resolver_nvml_sample_age_seconds", age)
    orphans = () if trouble else _by(SampleReason, snapshot.joined.orphan_reasons())
    yield metric("resolver_unresolved_samples", orphans)
    version, policy = snapshot.driver_version, snapshot.policy
    yield metric("resolver_driver_info", [((version,), {})] if version else ())
    namespaces = _state(("host", "container", "unknown"), policy.namespace)
    yield metric("resolver_hostpid_namespace", [((), namespaces)])
    yield metric("resolver_hostpid_namespace_origin", [((), _state(Origin, policy.origin))])
    yield metric("resolver_hostpid_watchers", _by(WatcherFinding, policy.watchers))


def _gpus(snapshot: Snapshot, *, known: bool) -> Iterator[Metric]:
    """Yield the GPUs' families; ``known``: NVML answers now; if not, its values are outdated."""
    every = [((gpu.uuid, str(gpu.device_index)), gpu) for gpu in snapshot.inventory.gpus]
    gpus = every if known else []
    minors = {labels: "" if gpu.minor is None else str(gpu.minor) for labels, gpu in every}
    yield metric("resolver_gpu_info", (((*labels, minors[labels], gpu.name), {}) for labels, gpu in every))
    yield from values("gpu", gpus)
    ill = [((*labels, illness.reason), illness.since) for labels, gpu in gpus for illness in gpu.illnesses]
    reasons = {(*labels, reason): False for labels, _ in gpus for reason in GpuReason}
    yield metric("resolver_gpu_unhealthy", (reasons | {labels: True for labels, _ in ill}).items())
    yield metric("resolver_gpu_unhealthy_since_timestamp_seconds", ill)
    links = (((*labels, remote), n) for labels, gpu in gpus for remote, n in (gpu.nvlinks or {}).items())
    yield metric("resolver_gpu_nvlinks", links)
    xids = (((*labels, str(error.xid)), error.count) for labels, gpu in gpus for error in gpu.xids)
    yield metric("resolver_gpu_xid_errors_total", xids)
    states = (OK, UNSUPPORTED, FAILED)
    yield metric("resolver_gpu_samples", ((labels, _state(states, gpu.samples)) for labels, gpu in gpus))
    instances = [
        ((*labels, part.uuid, str(part.gpu_instance), str(part.compute_instance)), part)
        for labels, gpu in gpus
        for part in gpu.mig_instances
    ]
    yield from values("mig", instances)


def _daemon(snapshot: Snapshot) -> Iterator[Metric]:
    source = snapshot.source
    yield metric("resolver_build_info", [((VERSION, platform.python_version()), {})])
    yield metric("resolver_ready", not source.not_ready)
    yield metric("resolver_source", [((), _state(SOURCE_RECORDS, source.name))])
    not_used = (((name,), name in source.not_used) for name in SOURCE_RECORDS)
    yield metric("resolver_source_unavailable", not_used)
    yield metric("resolver_source_complete", not source.incomplete)
    yield metric("resolver_map_events_total", (((name,), n) for name, n in source.counters.items()))
    yield from values("source", [((), source)])
    yield metric("resolver_map_capacity_processes", source.map_size or None)
    yield histogram("resolver_pass_duration_seconds", snapshot.pass_seconds)
    yield from values("worker", [((_word(worker.name),), worker) for worker in snapshot.workers])
    yield from values("snapshot", [((), snapshot)])
    yield metric("resolver_standby", bool(snapshot.holder))


def _children() -> Iterator[Metric]:
    """Yield the CPU time and memory of the daemon's children; each of its threads has a list of them."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu, pages, count = ended.ru_utime + ended.ru_stime, 0, 0
    for thread in os.listdir("/proc/self/task"):
        with (
            contextlib.suppress(OSError),
            open(f"/proc/self/task/{thread}/children", encoding="ascii") as file,
        ):
            for child in (procfs.usage(int(host_pid)) for host_pid in file.read().split()):
                if child.state:
                    cpu, pages, count = cpu + child.cpu_seconds, pages + child.resident_pages, count + 1
    children_cpu[0] = max(children_cpu[0], cpu)
    yield metric("resolver_children", count)
    yield metric("resolver_children_cpu_seconds_total", children_cpu[0])
    yield metric("resolver_children_resident_memory_bytes", pages * _PAGE)
