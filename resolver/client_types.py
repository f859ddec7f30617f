"""What the daemon answers, as types for programs that ask it by `resolver.client`.

Written by ``make client-types`` from the API's description; ``docs/stability.md`` says what is promised of it.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class Container(TypedDict):
    """One container that runs on this node.

    ``pidns`` is the inode of its PID namespace and ``init_host_pid`` the first process in there; null for a container
    that shares another's. ``regions`` are the paths of its HAMi files. ``since`` is Unix time: first seen.
    """

    container_id: str
    pod_uid: str | None
    container_name: str | None
    namespace: str | None
    pod: str | None
    runtime: str | None
    pidns: int | None
    init_host_pid: int | None
    regions: list[str]
    since: float


class Containers(TypedDict):
    """``/v1/containers``. ``at`` is when the daemon looked (Unix time), here and in every answer."""

    at: float
    containers: list[Container]


class DeviceUtil(TypedDict):
    """One device of a slot. ``sm_util`` is what the slot says, ``utilization`` the process's by NVML; per cent."""

    device_uuid: str
    sm_util: int | None
    utilization: int | None


class Driver(TypedDict):
    """NVML: ``version`` is the driver's, ``collected_at`` when it last answered, ``error`` why it does not now."""

    version: str | None
    collected_at: float | None
    error: str | None
    gpus: int
    gpus_unhealthy: int


class Event(TypedDict):
    """Something that happened. ``number`` grows by one with each since the daemon started; ``at`` is Unix time."""

    number: int
    at: float
    kind: str
    fields: dict[str, Any]


class Events(TypedDict):
    """``/v1/events`` for who accepts JSON: those that are still kept."""

    at: float
    events: list[Event]


class Found(TypedDict):
    """How many cache files of one scheduler are repaired in one directory; null for those inside containers."""

    placement: str
    directory: str | None
    regions: int


class FoundProcess(TypedDict):
    """A process of a container: ``container_pid`` is its number in the PID namespace with inode ``pidns``.

    ``start_time`` is in clock ticks since boot, as in ``/proc/<pid>/stat``; with ``host_pid`` it names this process and
    no later one. ``source`` is ``bpf``, ``netlink`` or ``scan``, or ``cgroup`` if the kernel was asked directly.
    """

    container_id: str | None
    container_pid: int
    host_pid: int
    pidns: int
    pod_uid: str | None
    container_name: str | None
    start_time: int
    comm: str
    source: str


class Gpu(TypedDict):
    """One GPU. Memory in bytes, utilization in per cent, temperature in degrees Celsius, power in watts.

    ``samples`` is ``ok``, ``unsupported`` (MIG mode, for one) or ``failed``: whether NVML has the utilization of
    processes; ``samples_why`` says why not. It is healthy while ``illnesses`` is empty. ``pci_address`` is the
    kernel's name of it, ``pcie_root`` the PCI root complex that it hangs on. ``xids`` are the XID errors since the
    daemon started, ``details`` what the setting ``gpu_details`` adds; null without it.
    """

    uuid: str
    device_index: int
    minor: int | None
    name: str
    memory_total: int | None
    memory_used: int | None
    utilization: int | None
    temperature: int | None
    power: float | None
    mig: bool | None
    mig_instances: list[MigInstance]
    ecc_uncorrected: int | None
    samples: str
    samples_why: str | None
    illnesses: list[Illness]
    pci_address: str | None
    numa_node: int | None
    pcie_root: str | None
    cpu_socket: int | None
    xids: list[Xid]
    details: GpuDetails | None
    healthy: bool


class GpuDetails(TypedDict):
    """What is read with the setting ``gpu_details`` only. Null is "the driver does not say".

    Clocks in MHz, power in watts, energy in joules since the driver was loaded, utilization of the video engines in per
    cent. ``throttle_reasons`` is why clocks are lower than they could be; empty while they are not. ``ecc_corrected``
    counts since the driver was loaded, ``pcie_replays`` since the GPU was reset.
    """

    sm_clock: int | None
    memory_clock: int | None
    throttle_reasons: list[str] | None
    power_limit: float | None
    energy: float | None
    pcie_generation: int | None
    pcie_width: int | None
    pcie_replays: int | None
    ecc_corrected: int | None
    encoder: int | None
    decoder: int | None


class Gpus(TypedDict):
    """``/v1/gpus``: ``version`` grows with each change, ``at`` is when they were read; also in the ``ETag``.

    ``version`` is 0 before NVML answered for the first time. ``error`` says why it does not answer now; the
    GPUs are then as they were last seen.
    """

    at: float
    version: int
    driver_version: str | None
    error: str | None
    gpus: list[Gpu]


class Illness(TypedDict):
    """Why a GPU is unhealthy, and since when (Unix time)."""

    reason: str
    detail: str
    since: float


class Level(TypedDict):
    """The process's number in one PID namespace; the inode is null where the kernel does not show it."""

    ns_pid: int
    pidns: int | None


class MigInstance(TypedDict):
    """One MIG instance of a GPU; memory in bytes."""

    uuid: str
    gpu_instance: int
    compute_instance: int
    memory_total: int | None
    memory_used: int | None


class PairAnswer(TypedDict):
    """One answer of a batch: ``host_pid`` and ``start_time``, or the ``reason`` why there is none."""

    host_pid: NotRequired[int | None]
    start_time: NotRequired[int | None]
    reason: NotRequired[str | None]


class PairAnswers(TypedDict):
    """The answers in the order of the pairs. ``source`` is where the daemon's PIDs come from."""

    source: str
    answers: list[PairAnswer]


class PassSeconds(TypedDict):
    """Durations of passes: ``counts`` is how many took at most each bound, in seconds."""

    bounds: list[float]
    counts: list[int]
    observations: int
    total: float


class Policy(TypedDict):
    """Which number ``hostpid`` must be: ``namespace`` is ``host``, ``container`` or ``unknown``.

    ``origin`` is ``measured``, ``by version``, ``forced`` or ``unknown``; ``not_measured`` is why it is not the first.
    """

    namespace: str
    why: str
    origin: str
    not_measured: str | None


class Process(TypedDict):
    """One process on one GPU, as NVML lists it or has samples of it.

    ``ns_pid`` is its own number in its container. ``sm_util`` is in per cent, ``memory`` in bytes. ``no_slot`` is why
    HAMi knows nothing of it; null if it owns a slot.
    """

    host_pid: int
    ns_pid: int | None
    device_uuid: str
    container_id: str | None
    pod_uid: str | None
    container_name: str | None
    namespace: str | None
    pod: str | None
    comm: str | None
    sm_util: int | None
    memory: int | None
    no_slot: str | None


class Processes(TypedDict):
    """``/v1/processes``: every process on every GPU.

    ``collected_at`` is when NVML last answered (Unix time, null before the first time), ``error`` why it does not now.
    """

    at: float
    collected_at: float | None
    error: str | None
    processes: list[Process]


class Region(TypedDict):
    """One shared region: a cache file of HAMi's. ``slots`` is how many are in use, of which ``unresolved`` are.

    ``quarantined``: the slot writer died or hung on it, so it is skipped for a while. ``limit`` and ``sm_limit`` are
    the bytes of memory and the per cent of the cores that HAMi allows on each of ``device_uuids``; null without one.
    ``placement`` says which scheduler put it there. ``claim`` is the UID of the ResourceClaim whose it is; its slots
    may be those of several containers, and ``container_id`` is null if they are.
    """

    path: str
    pod_uid: str | None
    container_name: str | None
    layout: str
    device_uuids: list[str]
    container_id: str | None
    quarantined: bool
    claim: str | None
    placement: str | None
    slots: int
    unresolved: int
    limit: list[int | None]
    sm_limit: list[int | None]


class Regions(TypedDict):
    """``/v1/regions``: those that are repaired, files that are ignored, directories that are not there."""

    at: float
    rejected: list[RejectedFile]
    missing_dirs: list[str]
    regions: list[Region]


class RejectedFile(TypedDict):
    """A file in a containers directory that is skipped."""

    path: str
    reason: str


class ReversedProcess(TypedDict):
    """A process of the host, and the container it is in.

    ``levels`` has its number in each PID namespace, the host's first. ``tid`` is the thread's id that was asked for, if
    it was one. ``container_pid`` is the number in the container's own PID namespace. Without a ``container_id``,
    ``no_container`` says what is known instead.
    """

    host_pid: int
    tid: int | None
    levels: list[Level]
    container_id: str | None
    container_pid: int | None
    pod_uid: str | None
    container_name: str | None
    namespace: str | None
    pod: str | None
    runtime: str | None
    comm: str
    start_time: int
    no_container: str | None


class Sample(TypedDict):
    """A utilization sample without a slot. ``host_pid`` as NVML gave it, ``sm_util`` in per cent.

    ``container`` is the container's id, or ``<podUID>_<containerName>`` of a process that owned a slot before it ended.
    """

    host_pid: int
    device_uuid: str
    sm_util: int
    reason: str
    container: str | None


class Setting(TypedDict):
    """One setting in force, and where it comes from; durations in seconds."""

    name: str
    value: Any
    origin: str


class Slot(TypedDict):
    """One slot that is in use.

    ``path`` is its region's. ``pid`` and ``hostpid`` are what the slot says; ``host_pid`` is its verified owner, null
    while it is unresolved. ``repaired`` is why it was last written. ``stuck`` says why ``sm_util`` does not stay what
    NVML says though ``hostpid`` is right.
    """

    pid: int
    slot: int
    hostpid: int
    host_pid: int | None
    dead: bool
    unresolved: str | None
    repaired: str | None
    path: str
    container_id: str | None
    pod_uid: str | None
    container_name: str | None
    stuck: str | None
    device_util: list[DeviceUtil]


class Slots(TypedDict):
    """``/v1/slots``: every slot in use."""

    at: float
    slots: list[Slot]


class Source(TypedDict):
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


class Status(TypedDict):
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


class Totals(TypedDict):
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


class Unresolved(TypedDict):
    """``/v1/unresolved``: slots and utilization samples that could not be resolved, each with its reason."""

    at: float
    by_reason: UnresolvedCounts
    samples: list[Sample]
    slots: list[Slot]


class UnresolvedCounts(TypedDict):
    """How many, by reason."""

    slots: dict[str, int]
    samples: dict[str, int]


class Worker(TypedDict):
    """One kind of child: how often it was started and failed, ever, and what the last failure was."""

    name: str
    starts: int
    failures: int
    last_failure: str | None


class Xid(TypedDict):
    """An XID error that the driver reported of a GPU since the daemon started, and how often."""

    xid: int
    count: int
    meaning: str
