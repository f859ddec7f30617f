"""Every metric family there is: its name, type, labels and meaning. Only what is declared here is exported.

A family's series come as rows: the values of its labels in order, and a number. Nothing is a row that is not known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resolver.state import PassSeconds

Row = tuple[tuple[str, ...], float]

CONTAINER_LABELS = ("namespace", "pod", "container", "pod_uid", "container_id")
GPU_LABELS = ("device_uuid", "device_index")
#: An empty value of these is left out: Prometheus takes it for no label at all.
_OPTIONAL = frozenset({"container_id"})
_LONGEST = 256  # characters of a label's value; a directory's name has at most 255 bytes


class Family(NamedTuple):
    """``kind`` is Prometheus's: ``gauge``, ``counter``, ``histogram``, ``info`` or ``stateset``.

    ``name`` is that of the series, with ``_total`` and ``_info``; a state set's last label has the same name.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str

    def metric(self, rows: Iterable[Row]) -> Metric:
        """The family with these series."""
        base = self.name.removesuffix("_total").removesuffix("_info")
        metric = Metric(base, self.help, self.kind)
        for values, number in rows:
            labels = {
                label: _text(value)
                for label, value in zip(self.labels, values, strict=True)
                if value or label not in _OPTIONAL
            }
            metric.samples.append(Sample(self.name, labels, number, None, None, None))
        return metric

    def histogram(self, seen: PassSeconds) -> Metric:
        """The family with what was seen."""
        metric = Metric(self.name, self.help, self.kind)
        for bound, count in (
            *zip(map(repr, seen.bounds), seen.counts, strict=True),
            ("+Inf", seen.observations),
        ):
            metric.add_sample(f"{self.name}_bucket", {"le": bound}, count)
        metric.add_sample(f"{self.name}_count", {}, seen.observations)
        metric.add_sample(f"{self.name}_sum", {}, seen.total)
        return metric


def _text(value: str) -> str:
    """A name of anybody's as UTF-8 and of bounded length; quotes and newlines are the text format's business."""
    if value.isascii() and len(value) <= _LONGEST:
        return value
    return value.encode("utf-8", "backslashreplace").decode()[:_LONGEST]


def _gauge(name: str, labels: tuple[str, ...], meaning: str) -> Family:
    return Family(name=f"resolver_{name}", kind="gauge", labels=labels, help=meaning)


def _counter(name: str, labels: tuple[str, ...], meaning: str) -> Family:
    return Family(name=f"resolver_{name}_total", kind="counter", labels=labels, help=meaning)


def _states(name: str, labels: tuple[str, ...], meaning: str) -> Family:
    return Family(
        name=f"resolver_{name}", kind="stateset", labels=(*labels, f"resolver_{name}"), help=meaning
    )


def _info(name: str, labels: tuple[str, ...], meaning: str) -> Family:
    return Family(name=f"resolver_{name}_info", kind="info", labels=labels, help=meaning)


# -- containers -----------------------------------------------------------------------------------------------------

CONTAINER_UTILIZATION = _gauge(
    "container_utilization_ratio",
    (*CONTAINER_LABELS, *GPU_LABELS),
    "SM utilization of a container on a GPU over the last second, from 0 to 1: the sum over its processes.",
)
CONTAINER_MEMORY = _gauge(
    "container_memory_bytes",
    (*CONTAINER_LABELS, *GPU_LABELS),
    "GPU memory that the processes of a container hold on a GPU.",
)
CONTAINER_MEMORY_LIMIT = _gauge(
    "container_memory_limit_bytes",
    (*CONTAINER_LABELS, *GPU_LABELS),
    "GPU memory that HAMi allows a container on a GPU; no series without a limit.",
)
CONTAINER_CORE_LIMIT = _gauge(
    "container_core_limit_ratio",
    (*CONTAINER_LABELS, *GPU_LABELS),
    "Share of a GPU's cores that HAMi allows a container, from 0 to 1; no series without a limit.",
)
UNKNOWN_VALUES = _gauge(
    "container_unknown_values",
    ("value", "reason"),
    "Pairs of container and GPU whose utilization or memory is not known, and so has no series.",
)
CONTAINERS = _gauge("containers", (), "Containers that run on this node.")
PROCESS_UTILIZATION = _gauge(
    "process_utilization_ratio",
    (*CONTAINER_LABELS, *GPU_LABELS, "host_pid", "ns_pid"),
    "SM utilization of one process on a GPU over the last second, from 0 to 1.",
)
PROCESS_MEMORY = _gauge(
    "process_memory_bytes",
    (*CONTAINER_LABELS, *GPU_LABELS, "host_pid", "ns_pid"),
    "GPU memory that one process holds on a GPU.",
)
SERIES_LEFT_OUT = _gauge(
    "series_left_out",
    (),
    "Pairs of container or process and GPU that have no series because there are too many of them.",
)

# -- slots, regions, repairs ----------------------------------------------------------------------------------------

REGIONS = _gauge("regions", ("layout",), "Cache files of HAMi that are repaired.")
SLOTS = _gauge("slots", ("state",), "Slots in use: resolved to a process, unresolved, or of a dead process.")
UNRESOLVED_SLOTS = _gauge("unresolved_slots", ("reason",), "Slots whose owner is unknown.")
STUCK_SLOTS = _gauge(
    "stuck_slots", (), "Slots whose sm_util does not stay what NVML says, though their hostpid is right."
)
REJECTED_REGIONS = _gauge(
    "rejected_regions", ("reason",), "Files that are no cache file that may be touched."
)
QUARANTINED_REGIONS = _gauge(
    "quarantined_regions",
    (),
    "Cache files skipped for a while because the slot writer died or hung on them.",
)
UNWATCHED_REGIONS = _gauge(
    "unwatched_regions",
    (),
    "Cache files that the kernel reports no changes of (inotify), so that they are checked by the clock alone.",
)
PLACEMENT_REGIONS = _gauge(
    "placement_regions",
    ("placement",),
    "Cache files that are repaired, by the scheduler that put them there.",
)
CLAIM = _info(
    "claim",
    ("claim_uid", *CONTAINER_LABELS),
    "A container that uses a ResourceClaim's cache file, which other containers may use as well.",
)
MISSING_DIRECTORIES = _gauge("missing_directories", (), "Containers directories that do not exist.")
REPAIRS = _counter("repairs", ("reason",), "Times that a slot's hostpid was written.")
DRY_RUN_REPAIRS = _counter(
    "dry_run_repairs", ("reason",), "Times that a slot's hostpid would have been written, were it no dry run."
)
CONFLICTS = _counter("conflicts", (), "Times that another writer changed a slot's hostpid back.")
OVER_BUDGET = _counter(
    "over_budget",
    (),
    "Times that a cache file had to wait because its container had used up its share of CPU.",
)
WATCH_EVENTS = _counter("watch_events", (), "Events of the kernel about cache files and their directories.")
WATCH_OVERFLOWS = _counter(
    "watch_overflows", (), "Times that such events were lost, so that every cache file was checked."
)
WATCH_FLOODS = _counter(
    "watch_floods",
    (),
    "Times that a container caused so many of them that its files were checked by the clock for a while.",
)
STUCK = _counter("slots_stuck", (), "Times that a slot was found stuck.")
UTILIZATION_WRITES = _counter("utilization_writes", (), "Times that a slot's sm_util was written.")
UNDONE_WRITES = _counter(
    "writes_undone", (), "Writes that were taken back or not done: the slot moved or its owner ended."
)
MISSED_WRITES = _counter("writes_missed", (), "Writes not done because the slot had changed before.")
REJECTIONS = _counter("region_rejections", ("reason",), "Times that a file was found not to be touched.")
QUARANTINES = _counter("region_quarantines", (), "Times that a cache file was put in quarantine.")
WRITER_FAILURES = _counter("writer_failures", (), "Requests to the slot writer that failed.")

# -- NVML -----------------------------------------------------------------------------------------------------------

NVML_UP = _gauge("nvml_up", (), "1 if NVML answered when it was last asked, and not long ago.")
NVML_LAST_SUCCESS = _gauge(
    "nvml_last_success_timestamp_seconds", (), "When NVML last answered, as Unix time."
)
NVML_AGE = _gauge("nvml_sample_age_seconds", (), "How old the newest answer of NVML is.")
UNRESOLVED_SAMPLES = _gauge("unresolved_samples", ("reason",), "Utilization samples that find no slot.")
IMPLAUSIBLE_SAMPLES = _counter("implausible_samples", (), "Samples dropped because they cannot be true.")
DRIVER = _info("driver", ("version",), "The driver's version.")
NAMESPACE = _states("hostpid_namespace", (), "Which PID namespace's number hostpid must be.")
NAMESPACE_ORIGIN = _states(
    "hostpid_namespace_origin", (), "How it is known: measured, by the driver's version, or forced."
)
PROBES = _counter("driver_probes", (), "Times that a child asked NVML from within a tenant's PID namespace.")
PROBES_REFUSED = _counter("driver_probes_refused", (), "Times that no namespace was fit for such a child.")
PROBES_FAILED = _counter("driver_probes_failed", (), "Times that such a child gave no result.")

# -- GPUs -----------------------------------------------------------------------------------------------------------

GPU = _info("gpu", (*GPU_LABELS, "minor", "name"), "A GPU of this node.")
GPU_MEMORY = _gauge("gpu_memory_bytes", GPU_LABELS, "Memory that a GPU has.")
GPU_MEMORY_USED = _gauge("gpu_memory_used_bytes", GPU_LABELS, "Memory of a GPU that is in use.")
GPU_UTILIZATION = _gauge(
    "gpu_utilization_ratio", GPU_LABELS, "How much of the time a GPU was busy, from 0 to 1."
)
GPU_TEMPERATURE = _gauge("gpu_temperature_celsius", GPU_LABELS, "A GPU's temperature.")
GPU_POWER = _gauge("gpu_power_watts", GPU_LABELS, "What a GPU draws.")
GPU_ECC = _counter(
    "gpu_ecc_uncorrected_errors", GPU_LABELS, "Uncorrected ECC errors, as the driver counts them."
)
GPU_HEALTHY = _gauge("gpu_healthy", GPU_LABELS, "1 while nothing is wrong with a GPU.")
GPU_UNHEALTHY = _gauge(
    "gpu_unhealthy", (*GPU_LABELS, "reason"), "1 while this is wrong with a GPU, 0 while it is not."
)
GPU_UNHEALTHY_SINCE = _gauge(
    "gpu_unhealthy_since_timestamp_seconds",
    (*GPU_LABELS, "reason"),
    "Since when this is wrong with a GPU, as Unix time; no series while it is not.",
)
GPU_XIDS = _counter(
    "gpu_xid_errors",
    (*GPU_LABELS, "xid"),
    "XID errors that the driver reported of a GPU since the daemon started.",
)
GPU_SM_CLOCK = _gauge("gpu_sm_clock_hertz", GPU_LABELS, "Clock of a GPU's multiprocessors.")
GPU_MEMORY_CLOCK = _gauge("gpu_memory_clock_hertz", GPU_LABELS, "Clock of a GPU's memory.")
GPU_THROTTLED = _gauge(
    "gpu_clock_throttled",
    (*GPU_LABELS, "reason"),
    "1 while a GPU's clocks are lower than they could be for this reason.",
)
GPU_POWER_LIMIT = _gauge("gpu_power_limit_watts", GPU_LABELS, "What a GPU may draw.")
GPU_ENERGY = _counter("gpu_energy_joules", GPU_LABELS, "What a GPU has used since the driver was loaded.")
GPU_PCIE_GENERATION = _gauge("gpu_pcie_link_generation", GPU_LABELS, "Generation of a GPU's PCIe link now.")
GPU_PCIE_WIDTH = _gauge("gpu_pcie_link_width", GPU_LABELS, "Lanes of a GPU's PCIe link now.")
GPU_PCIE_REPLAYS = _counter("gpu_pcie_replays", GPU_LABELS, "Packets that a GPU's PCIe link sent again.")
GPU_ECC_CORRECTED = _counter(
    "gpu_ecc_corrected_errors", GPU_LABELS, "Corrected ECC errors, as the driver counts them."
)
GPU_ENCODER = _gauge(
    "gpu_encoder_utilization_ratio", GPU_LABELS, "How busy a GPU's video encoders are, from 0 to 1."
)
GPU_DECODER = _gauge(
    "gpu_decoder_utilization_ratio", GPU_LABELS, "How busy a GPU's video decoders are, from 0 to 1."
)
GPU_SAMPLES = _states("gpu_samples", GPU_LABELS, "Whether NVML reports per-process utilization on a GPU.")
GPU_MIG = _gauge("gpu_mig_enabled", GPU_LABELS, "1 for a GPU in MIG mode.")
MIG_MEMORY = _gauge(
    "gpu_mig_memory_bytes",
    (*GPU_LABELS, "mig_uuid", "gpu_instance", "compute_instance"),
    "Memory of a MIG instance.",
)
MIG_MEMORY_USED = _gauge(
    "gpu_mig_memory_used_bytes",
    (*GPU_LABELS, "mig_uuid", "gpu_instance", "compute_instance"),
    "Memory of a MIG instance that is in use.",
)

# -- the daemon -----------------------------------------------------------------------------------------------------

BUILD = _info("build", ("version", "python"), "What runs.")
READY = _gauge("ready", (), "1 while the canary is found through the source in use: what /readyz says.")
SOURCE = _states("source", (), "Where PIDs come from.")
SOURCE_FAILED = _gauge(
    "source_unavailable", ("source",), "1 if this source was tried and does not work here."
)
SOURCE_COMPLETE = _gauge("source_complete", (), "1 while the source alone knows every process.")
MAP_EVENTS = _counter("map_events", ("event",), "What the sources lost, missed and corrected.")
PROCESSES = _gauge("map_processes", (), "Processes in the map.")
MAP_SIZE = _gauge("map_capacity_processes", (), "Processes that the kernel's map has room for.")
PASSES = Family(
    name="resolver_pass_duration_seconds",
    kind="histogram",
    labels=(),
    help="How long the passes over the slots took.",
)
WORKER_STARTS = _counter("worker_starts", ("worker",), "Times that a child was started.")
WORKER_FAILURES = _counter("worker_failures", ("worker",), "Times that a child died, hung or spoke nonsense.")
INTERNAL_ERRORS = _counter("internal_errors", (), "Defects that were survived; please report them.")
OUT_OF_DESCRIPTORS = _counter("out_of_descriptors", (), "Times that all file descriptors were in use.")
DRY_RUN = _gauge("dry_run", (), "1 if nothing is written because the settings say so.")
STANDBY = _gauge("standby", (), "1 while nothing is written because another daemon writes on this node.")
BROKER_ANSWERS = _counter("broker_answers", (), "Processes that got their PID from the broker.")
BROKER_REFUSED = _counter("broker_refused", ("reason",), "Requests that the broker refused.")
BROKER_TIMEOUTS = _counter("broker_timeouts", (), "Clients that did not end their request in time.")
BROKER_BUSY = _counter("broker_busy", (), "Connections that the broker closed because there were too many.")
CHILDREN = _gauge("children", (), "Children of the daemon that run.")
CHILDREN_CPU = _counter("children_cpu_seconds", (), "CPU time of the daemon's children, ended ones too.")
CHILDREN_MEMORY = _gauge("children_resident_memory_bytes", (), "Resident memory of the daemon's children.")
PROPORTIONAL_MEMORY = _gauge(
    "proportional_memory_bytes",
    (),
    "Memory of the daemon and its children; a page that several processes map counts in parts (PSS).",
)

FAMILIES = tuple(value for value in list(globals().values()) if isinstance(value, Family))
