"""Use of each GPU by each container, from one snapshot. Unknown values have a reason instead.

A container's utilization is the sum of its processes' samples, at most 1. Processes belong to containers by their
cgroups: a tenant's file neither hides load nor adds any, only GPUs on which the container is idle.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from resolver.base.reasons import SampleReason
from resolver.gpu.attribution import total
from resolver.gpu.sampler import FAILED, OK, UNSUPPORTED
from resolver.hami.layout import is_plausible
from resolver.state import Container, ContainerUse, Counted, Process, RegionReport, Snapshot

#: Processes in no container's series: they ended, or run on the host.
_OF_NO_CONTAINER = (SampleReason.NOT_IN_CONTAINER, SampleReason.PROCESS_ENDED, SampleReason.PID_UNKNOWN)


class Unknown(StrEnum):
    """Why a value has no series."""

    NO_ANSWER = "no_answer"  # NVML failed when it was last asked, or was not asked yet
    STALE = "stale"  # NVML has not answered for too long
    DEVICE_FAILED = "device_failed"  # NVML answers, but not for this GPU
    UNSUPPORTED = "unsupported"  # NVML does not report it for this GPU (MIG mode, for example)
    UNKNOWN_DEVICE = "unknown_device"  # the cache file names a GPU that NVML does not
    IMPLAUSIBLE = "implausible"  # a sample or count of this container can't be true, or has no date
    NOT_TOLD = "not_told"  # NVML lists no processes of this GPU, or one without its memory
    UNRESOLVED = "unresolved"  # a slot has no known owner, and no cgroup identifies its container


class Names(NamedTuple):
    """Labels of a container; ``container_id`` only where the other names are not unique."""

    namespace: str = ""
    pod: str = ""
    container: str = ""
    pod_uid: str = ""
    container_id: str = ""


class Device(NamedTuple):
    """One GPU, or one MIG instance of it, as labels; ``samples`` is one of the sampler's three states."""

    uuid: str
    index: str  # type: ignore[assignment]  # hides tuple.index, of no use here
    samples: str


class Usage(NamedTuple):
    """One container on one GPU. ``utilization`` from 0 to 1 and ``memory`` in bytes, or the reason of each.

    From the cache file, None if unknown or unlimited: the GPU's ``position``, ``limit`` of memory in bytes, HAMi-core's
    ``counted``, ``last_kernel`` (0: never), ``core_limit`` in per cent.
    """

    names: Names
    device: Device
    utilization: float | Unknown
    memory: int | Unknown
    position: int | None
    limit: int | None
    counted: Counted | Unknown | None = None
    last_kernel: int = 0
    core_limit: int | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        return (*self.names, self.device.uuid, self.device.index)


class _Group:
    def __init__(self) -> None:
        self.processes: dict[str, list[Process]] = {}  # by device
        #: By UUID: position, memory limit and core limit.
        self.devices: dict[str, tuple[int | None, int | None, int | None]] = {}
        self.regions: dict[str, RegionReport] = {}
        self.unresolved = False

    def add(self, processes: Iterable[Process], regions: Iterable[RegionReport]) -> None:
        for region in regions:
            self.regions[region.path] = region
            for position, uuid in enumerate(region.device_uuids):
                limits = region.memory_limit(position), region.core_limit(position)
                self.devices.setdefault(uuid, (position, *limits))
        for process in processes:
            self.devices.setdefault(process.device_uuid, (None, None, None))
            self.processes.setdefault(process.device_uuid, []).append(process)


def devices(snapshot: Snapshot) -> dict[str, Device]:
    """Return every GPU and MIG instance that NVML knows, by UUID."""
    asked = snapshot.joined.asked
    by_uuid = {uuid: Device(uuid, "", OK) for uuid in asked}
    for gpu in snapshot.inventory.gpus:
        # The last collection is newer than the inventory; a GPU absent from it has failed.
        state = OK if gpu.uuid in asked else UNSUPPORTED if gpu.samples == UNSUPPORTED else FAILED
        by_uuid[gpu.uuid] = Device(gpu.uuid, str(gpu.device_index), state)
        for instance in gpu.mig_instances:
            by_uuid[instance.uuid] = Device(instance.uuid, str(gpu.device_index), UNSUPPORTED)
    return by_uuid


def nvml_trouble(snapshot: Snapshot, now: float, longest: float) -> Unknown | None:
    """Return why NVML's values can't be used at Unix time ``now``, or None; they may be ``longest`` seconds old."""
    joined = snapshot.joined
    if joined.error:
        return Unknown.NO_ANSWER
    return Unknown.STALE if now - joined.at > longest else None


def usages(snapshot: Snapshot, trouble: Unknown | None) -> Iterator[Usage]:
    """Yield every container on every GPU that it uses or may use, once."""
    by_uuid, joined, groups = devices(snapshot), snapshot.joined, _groups(snapshot)
    sizes = snapshot.inventory.memory()
    shared = {path for path, n in Counter(p for g in groups.values() for p in g.regions).items() if n > 1}
    for names, group in groups.items():
        counted, last_kernel = _counted(group, snapshot, shared)
        for uuid, (position, limit, core_limit) in group.devices.items():
            device = by_uuid.get(uuid)
            processes = group.processes.get(uuid, [])
            utilization: float | Unknown
            memory: int | Unknown
            utilization = memory = trouble or Unknown.UNKNOWN_DEVICE
            if trouble is None and device is not None:
                utilization = _utilization(device, processes, group)
                memory = _memory(processes, group, listed=uuid in joined.listed)
            place = device or Device(uuid, "", FAILED)
            known_counts = counted.get(uuid)
            counts: Counted | Unknown | None = known_counts
            if known_counts and not is_plausible(max(known_counts), sizes.get(uuid), limit):
                counts = Unknown.IMPLAUSIBLE
            yield Usage(names, place, utilization, memory, position, limit, counts, last_kernel, core_limit)


def _utilization(device: Device, processes: list[Process], group: _Group) -> float | Unknown:
    if device.samples != OK:
        return Unknown.UNSUPPORTED if device.samples == UNSUPPORTED else Unknown.DEVICE_FAILED
    if group.unresolved:
        return Unknown.UNRESOLVED
    used = total([process.sm_util for process in processes])
    return Unknown.IMPLAUSIBLE if used is None else min(used / 100, 1.0)


def _memory(processes: list[Process], group: _Group, *, listed: bool) -> int | Unknown:
    if not listed:
        return Unknown.NOT_TOLD
    if group.unresolved:
        return Unknown.UNRESOLVED
    used = total([process.memory for process in processes])
    return Unknown.NOT_TOLD if used is None else used


def _counted(group: _Group, snapshot: Snapshot, shared: set[str]) -> tuple[dict[str, Counted], int]:
    """Return HAMi-core's counts by device, and its last kernel's time; nothing for a shared file."""
    if shared & group.regions.keys():
        return {}, 0
    sums: dict[str, Counted] = {}
    last_kernel, unknown = 0, False
    for path, region in group.regions.items():
        counts = snapshot.hami_counts.get(path)
        if counts is None or len(counts.memory) != len(region.device_uuids):
            unknown = True
            continue
        last_kernel = max(last_kernel, counts.last_kernel)
        for uuid, of_device in zip(region.device_uuids, counts.memory, strict=True):
            before = sums.get(uuid, Counted(context=0, module=0, data=0, total=0))
            sums[uuid] = Counted(*map(sum, zip(before, of_device, strict=True)))
    return ({} if unknown else sums), last_kernel


def _groups(snapshot: Snapshot) -> dict[Names, _Group]:
    """Return processes and regions by container, which includes its predecessor while both run."""
    groups: dict[Names, _Group] = {}
    by_path = {region.path: region for region in snapshot.regions}
    by_name: dict[tuple[str, str], list[RegionReport]] = {}
    for region in snapshot.regions:
        if region.pod_uid:
            by_name.setdefault((region.pod_uid, region.container_name or ""), []).append(region)
    processes: dict[str, list[Process]] = {}
    for process in snapshot.gpu_processes:
        if process.container_id and process.no_slot not in _OF_NO_CONTAINER:
            processes.setdefault(process.container_id, []).append(process)
    for container in snapshot.containers:
        paths = [by_path[path] for path in container.regions if path in by_path]
        named = by_name.get((container.pod_uid or "", container.container_name or ""), ())
        group = groups.setdefault(names_of(container), _Group())
        group.add(processes.get(container.container_id, ()), (*paths, *named))
    grouped = {(names.pod_uid, names.container) for names in groups}
    for (pod_uid, name), regions in by_name.items():
        if (pod_uid, name) not in grouped:
            _add_without_id(groups, Names(container=name, pod_uid=pod_uid), regions, snapshot)
    return groups


def _add_without_id(
    groups: dict[Names, _Group], names: Names, regions: list[RegionReport], snapshot: Snapshot
) -> None:
    """Add containers without an id in their cgroup, which are known by their slots' living owners."""
    slots = [slot for region in regions for slot in region.slots if not slot.dead]
    owners = {slot.host_pid for slot in slots if slot.host_pid is not None}
    if not owners or any(region.container_id for region in regions):
        return
    group = groups.setdefault(names, _Group())
    group.add((process for process in snapshot.gpu_processes if process.host_pid in owners), regions)
    group.unresolved = any(slot.unresolved is not None for slot in slots)


def names_of(container: Container | ContainerUse | Process) -> Names:
    """Return a container's labels."""
    unique = bool(container.pod_uid and container.container_name)
    return Names(
        namespace=container.namespace or "",
        pod=container.pod or "",
        container=container.container_name or "",
        pod_uid=container.pod_uid or "",
        container_id="" if unique else container.container_id or "",
    )
