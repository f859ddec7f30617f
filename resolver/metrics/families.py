"""Declarations of the daemon's metric families. Only declared families are exported, in this order in the docs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from resolver.base.counters import CounterByReason, CounterName, Shortage
from resolver.base.reasons import BrokerRefusal, RegionReason, RepairReason
from resolver.metrics.family import Family

if TYPE_CHECKING:
    from enum import StrEnum

CONTAINER_LABELS = ("namespace", "pod", "container", "pod_uid", "container_id")
GPU_LABELS = ("device_uuid", "device_index")
_BOTH = (*CONTAINER_LABELS, *GPU_LABELS)


class GpuValue(NamedTuple):
    """Family of one value for each GPU: ``attribute`` of its record, multiplied by ``factor``."""

    family: Family
    attribute: str
    factor: float


_declared: list[Family] = []
#: Counters of the daemon; those ``broker_*`` are served with a broker only.
COUNTERS: dict[CounterName, Family] = {}
COUNTERS_BY_REASON: dict[CounterByReason, tuple[Family, type[StrEnum]]] = {}
GPU_VALUES: list[GpuValue] = []
GPU_DETAILS: list[GpuValue] = []  # served with ``gpu_details`` only


def _family(kind: str, name: str, meaning: str, labels: tuple[str, ...]) -> Family:
    _declared.append(Family(name=f"resolver_{name}", kind=kind, labels=labels, help=meaning))
    return _declared[-1]


def _gauge(name: str, meaning: str, *labels: str) -> Family:
    return _family("gauge", name, meaning, labels)


def _counter(name: str, meaning: str, *labels: str) -> Family:
    return _family("counter", f"{name}_total", meaning, labels)


def _states(name: str, meaning: str, *labels: str) -> Family:
    return _family("stateset", name, meaning, (*labels, f"resolver_{name}"))


def _info(name: str, meaning: str, *labels: str) -> Family:
    return _family("info", f"{name}_info", meaning, labels)


def _counted(counter: CounterName, meaning: str, name: str = "") -> None:
    COUNTERS[counter] = _counter(name or counter, meaning)


def _by_reason(counter: CounterByReason, reasons: type[StrEnum], meaning: str, name: str = "") -> None:
    COUNTERS_BY_REASON[counter] = _counter(name or counter, meaning, "reason"), reasons


def _gpu(
    name: str, attribute: str, meaning: str, factor: float = 1, *, to: list[GpuValue] = GPU_VALUES
) -> None:
    kind = "counter" if name.endswith("_total") else "gauge"
    to.append(GpuValue(_family(kind, f"gpu_{name}", meaning, GPU_LABELS), attribute, factor))


_detail = partial(_gpu, to=GPU_DETAILS)


# -- containers -----------------------------------------------------------------------------------------------------

CONTAINER_UTILIZATION = _gauge(
    "container_utilization_ratio",
    "SM utilization of a container on a GPU over the last second, from 0 to 1: the sum over its processes.",
    *_BOTH,
)
CONTAINER_GPU_SECONDS = _counter(
    "container_gpu_seconds",
    "Use of a GPU by a container since the daemon first saw it there: the integral of SM utilization, within 3 %.",
    *_BOTH,
)
CONTAINER_GPU_SINCE = _gauge(
    "container_gpu_since_timestamp_seconds",
    "When the counters of a container's use of a GPU began, as Unix time: a restart of the daemon begins them anew.",
    *_BOTH,
)
CONTAINER_MEMORY_SECONDS = _counter(
    "container_gpu_memory_byte_seconds", "GPU memory held by a container, in bytes, times seconds.", *_BOTH
)
CONTAINER_UNKNOWN_SECONDS = _counter(
    "container_gpu_unknown_seconds",
    "Time that NVML doesn't tell, missing from the GPU time and memory of a container.",
    *_BOTH,
)
CONTAINER_ESTIMATED_SECONDS = _counter(
    "container_gpu_estimated_seconds",
    "Part of a container's GPU time that is an upper bound, because the GPU has no samples of its own.",
    *_BOTH,
)
CONTAINER_IDLE_SECONDS = _gauge(
    "container_gpu_idle_seconds",
    "Time since a container that holds memory of a GPU last used it; no series while it does.",
    *_BOTH,
)
CONTAINER_ENERGY = _counter(
    "container_energy_estimate_joules",
    "Estimate of a container's energy: a GPU's power, shared in proportion to SM utilization.",
    *_BOTH,
)
UNUSED_ENERGY = _counter(
    "gpu_unused_energy_joules",
    "Energy of a GPU while no process used it, which is in no container's estimate.",
    "device_uuid",
)
CONTAINER_XIDS = _counter(
    "container_gpu_xids",
    "XID errors of a GPU while a container had a process on it. NVML does not say which process caused one.",
    *_BOTH,
)
CORE_LIMIT_STATE = _states(
    "container_core_limit_state",
    "Whether HAMi-core enforces a container's core limit on a GPU, and whether it holds.",
    *_BOTH,
)
WITHOUT_SLOT = _gauge(
    "processes_without_slot",
    "Processes on a GPU for 30 s or more without a slot, which HAMi-core can't limit.",
    *_BOTH,
    "reason",
)
WITHOUT_SLOT_MEMORY = _gauge(
    "processes_without_slot_memory_bytes", "GPU memory of processes without a slot.", *_BOTH, "reason"
)
CONTAINER_MEMORY = _gauge("container_memory_bytes", "GPU memory of a container's processes on a GPU.", *_BOTH)
CONTAINER_MEMORY_LIMIT = _gauge(
    "container_memory_limit_bytes",
    "GPU memory that HAMi allows a container; no series without a limit.",
    *_BOTH,
)
CONTAINER_CORE_LIMIT = _gauge(
    "container_core_limit_ratio",
    "Share of a GPU's cores that HAMi allows a container, from 0 to 1; no series without a limit.",
    *_BOTH,
)
UNKNOWN_VALUES = _gauge(
    "container_unknown_values",
    "Pairs of container and GPU with unknown utilization or memory, which therefore has no series.",
    *("value", "reason"),
)
CONTAINERS = _gauge("containers", "Containers that run on this node.")
PROCESS_UTILIZATION = _gauge(
    "process_utilization_ratio",
    "SM utilization of one process on a GPU over the last second, from 0 to 1.",
    *(*_BOTH, "host_pid", "ns_pid"),
)
PROCESS_MEMORY = _gauge(
    "process_memory_bytes", "GPU memory of one process on a GPU.", *(*_BOTH, "host_pid", "ns_pid")
)
SERIES_LEFT_OUT = _gauge(
    "series_left_out", "Pairs of container or process and GPU without series because there are too many."
)

# -- slots, regions, repairs ----------------------------------------------------------------------------------------

REGIONS = _gauge("regions", "HAMi cache files under repair.", "layout")
SLOTS = _gauge("slots", "Slots in use: resolved to a process, unresolved, or of a dead process.", "state")
UNRESOLVED_SLOTS = _gauge("unresolved_slots", "Slots without a known owner.", "reason")
STUCK_SLOTS = _gauge(
    "stuck_slots", "Slots with the right hostpid whose sm_util does not stay at NVML's value."
)
REJECTED_REGIONS = _gauge("rejected_regions", "Cache files that were skipped.", "reason")
QUARANTINED_REGIONS = _gauge(
    "quarantined_regions", "Cache files skipped for a while because the slot writer died or hung on them."
)
UNWATCHED_REGIONS = _gauge(
    "unwatched_regions", "Cache files without change events (inotify), checked only periodically."
)
PLACEMENT_REGIONS = _gauge("placement_regions", "Repaired cache files by scheduler.", "placement")
CLAIM = _info(
    "claim",
    "A container that uses a ResourceClaim's cache file, which others may share.",
    *("claim_uid", *CONTAINER_LABELS),
)
MISSING_DIRECTORIES = _gauge("missing_directories", "Containers directories that do not exist.")
_by_reason(CounterByReason.REPAIRS, RepairReason, "Repairs of a slot's hostpid.")
_by_reason(
    CounterByReason.WOULD_REPAIR, RepairReason, "Repairs that a dry run only logged.", "dry_run_repairs"
)
_counted(CounterName.CONFLICTS, "Times that another writer changed a slot's hostpid back.")
_counted(CounterName.OVER_BUDGET, "Delays of a cache file whose container had used up its share of CPU.")
_counted(
    CounterName.TOO_SLOW,
    "Times that the kernel answered late: a tenant keeps memory, files or mounts locked.",
)
_counted(CounterName.WATCH_EVENTS, "Events of the kernel about cache files and their directories.")
_counted(
    CounterName.WATCH_OVERFLOWS,
    "Losses of kernel events about cache files, after which every file was checked.",
)
_counted(CounterName.WATCH_FLOODS, "Times that a container exceeded its share of kernel events.")
_counted(CounterName.SLOTS_STUCK, "Times that a slot was found stuck.")
_counted(
    CounterName.ZEROS_DISPUTED, "Slots with a value that a watcher filled in again after the daemon's 0."
)
_counted(CounterName.UTILIZATION_WRITES, "Times that a slot's sm_util was written.")
_counted(CounterName.WRITES_UNDONE, "Writes taken back or not done: the slot moved or its owner ended.")
_counted(CounterName.WRITES_MISSED, "Writes not done because the slot had changed before.")
_by_reason(CounterByReason.REJECTED, RegionReason, "Rejections of a file.", "region_rejections")
_counted(CounterName.QUARANTINES, "Times that a cache file was put in quarantine.", "region_quarantines")
_counted(CounterName.WRITER_FAILURES, "Requests to the slot writer that failed.")

# -- NVML -----------------------------------------------------------------------------------------------------------

NVML_UP = _gauge("nvml_up", "1 if NVML answered its last query, and recently.")
NVML_SECONDS = _family(
    "histogram", "nvml_collection_seconds", "Durations of the collections from NVML, of all GPUs.", ()
)
NVML_AGE = _gauge("nvml_sample_age_seconds", "Age of NVML's newest answer.")
UNRESOLVED_SAMPLES = _gauge("unresolved_samples", "Utilization samples that find no slot.", "reason")
_counted(CounterName.IMPLAUSIBLE_SAMPLES, "Samples dropped because they cannot be true.")
DRIVER = _info("driver", "The driver's version.", "version")
NAMESPACE = _states("hostpid_namespace", "PID namespace of the number that hostpid must be.")
NAMESPACE_ORIGIN = _states("hostpid_namespace_origin", "Its origin: the driver's version, or forced.")
WATCHERS = _gauge(
    "hostpid_watchers", "Containers whose watcher finds samples by hostpid, finds none, or can't.", "finding"
)

# -- GPUs -----------------------------------------------------------------------------------------------------------

GPU = _info("gpu", "A GPU of this node.", *GPU_LABELS, "minor", "name")
_gpu("memory_bytes", "memory_total", "Memory that a GPU has.")
_gpu("memory_used_bytes", "memory_used", "Memory of a GPU that is in use.")
_gpu("utilization_ratio", "utilization", "Share of the time that a GPU was busy, from 0 to 1.", 0.01)
_gpu("temperature_celsius", "temperature", "A GPU's temperature.")
_gpu("power_watts", "power", "Power draw of a GPU.")
_gpu("ecc_uncorrected_errors_total", "ecc_uncorrected", "Uncorrected ECC errors of a GPU.")
_gpu("healthy", "healthy", "1 while a GPU is healthy.")
_gpu(
    "legacy_call_refused",
    "legacy_call_refused",
    "1 if only HAMi-core 2.10 and later can read a GPU's samples.",
)
GPU_UNHEALTHY = _gauge("gpu_unhealthy", "1 while a GPU is unhealthy for this reason.", *GPU_LABELS, "reason")
GPU_UNHEALTHY_SINCE = _gauge(
    "gpu_unhealthy_since_timestamp_seconds",
    "When a GPU became unhealthy for this reason, as Unix time; no series while it is healthy.",
    *(*GPU_LABELS, "reason"),
)
GPU_NVLINKS = _gauge(
    "gpu_nvlinks",
    "Active NVLinks of a GPU to a place on the PCI bus, of a GPU or a switch.",
    *GPU_LABELS,
    "remote",
)
GPU_XIDS = _counter("gpu_xid_errors", "XID errors of a GPU since the daemon started.", *GPU_LABELS, "xid")
_detail("sm_clock_hertz", "sm_clock", "Clock of a GPU's multiprocessors.", 1e6)
_detail("memory_clock_hertz", "memory_clock", "Clock of a GPU's memory.", 1e6)
GPU_THROTTLED = _gauge("gpu_clock_throttled", "1 while this lowers a GPU's clocks.", *GPU_LABELS, "reason")
_detail("power_limit_watts", "power_limit", "Power limit of a GPU.")
_detail("energy_joules_total", "energy", "Energy used by a GPU since the driver was loaded.")
_detail("pcie_link_generation", "pcie_generation", "Generation of a GPU's PCIe link now.")
_detail("pcie_link_width", "pcie_width", "Lanes of a GPU's PCIe link now.")
_detail("pcie_replays_total", "pcie_replays", "Packets that a GPU's PCIe link sent again.")
_detail("ecc_corrected_errors_total", "ecc_corrected", "Corrected ECC errors of a GPU.")
_detail("encoder_utilization_ratio", "encoder", "Load of a GPU's video encoders, from 0 to 1.", 0.01)
_detail("decoder_utilization_ratio", "decoder", "Load of a GPU's video decoders, from 0 to 1.", 0.01)
GPU_SAMPLES = _states("gpu_samples", "Availability of per-process utilization on a GPU.", *GPU_LABELS)
_gpu("mig_enabled", "mig", "1 for a GPU in MIG mode.")
_MIG = (*GPU_LABELS, "mig_uuid", "gpu_instance", "compute_instance")
MIG_MEMORY = _gauge("gpu_mig_memory_bytes", "Memory of a MIG instance.", *_MIG)
MIG_MEMORY_USED = _gauge("gpu_mig_memory_used_bytes", "Memory of a MIG instance that is in use.", *_MIG)

# -- the daemon -----------------------------------------------------------------------------------------------------

BUILD = _info("build", "Versions of resolver and Python.", "version", "python")
READY = _gauge(
    "ready", "1 while the source in use finds the canary and the daemon lacks no resources, as on /readyz."
)
SOURCE = _states("source", "Where PIDs come from.")
SOURCE_FAILED = _gauge("source_unavailable", "1 if this source was tried and does not work here.", "source")
SOURCE_COMPLETE = _gauge("source_complete", "1 while the source alone knows every process.")
MAP_EVENTS = _counter("map_events", "Losses, misses and corrections of the sources.", "event")
PROCESSES = _gauge("map_processes", "Processes in the map.")
MAP_SIZE = _gauge("map_capacity_processes", "Processes for which the kernel's map has room.")
PASSES = _family("histogram", "pass_duration_seconds", "Durations of the passes over the slots.", ())
WORKER_STARTS = _counter("worker_starts", "Times that a child was started.", "worker")
WORKER_FAILURES = _counter(
    "worker_failures", "Times that a child died, hung or gave an invalid answer.", "worker"
)
_counted(CounterName.INTERNAL_ERRORS, "Bugs in the daemon that it survived; please report them.")
_by_reason(
    CounterByReason.SHORTAGES,
    Shortage,
    "Times that the kernel refused the daemon a resource; no cache file is at fault.",
)
DRY_RUN = _gauge("dry_run", "1 in a dry run, which writes nothing.")
STANDBY = _gauge("standby", "1 while the daemon waits because another one writes on this node.")
_counted(CounterName.BROKER_ANSWERS, "Processes that got their PID from the broker.")
_by_reason(CounterByReason.BROKER_REFUSED, BrokerRefusal, "Requests that the broker refused.")
_counted(CounterName.BROKER_TIMEOUTS, "Clients that did not end their request in time.")
_counted(CounterName.BROKER_BUSY, "Connections that the broker closed because there were too many.")
CHILDREN = _gauge("children", "Running children of the daemon.")
CHILDREN_CPU = _counter("children_cpu_seconds", "CPU time of the daemon's children, ended ones too.")
CHILDREN_MEMORY = _gauge("children_resident_memory_bytes", "Resident memory of the daemon's children.")

FAMILIES = tuple(_declared)
