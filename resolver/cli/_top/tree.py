"""GPU > container > process, made from the daemon's documents; unknown values are None, never 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from resolver.base.reasons import SampleReason
from resolver.cli.container_names import Named

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from resolver.api.shapes import Region, Slot
    from resolver.api.status import Status
    from resolver.cli.documents import Documents
    from resolver.gpu.inventory import Gpu
    from resolver.state import Container, ContainerUse, Process

#: Reasons that name no place where a process could be shown.
_UNPLACED = (SampleReason.PID_UNKNOWN, SampleReason.PROCESS_ENDED)


class Amount(NamedTuple):
    """A sum. ``value`` is None if no part is known; ``at_least``: some parts are not."""

    value: int | None
    at_least: bool = False


class ProcessNode(NamedTuple):
    """A process on one GPU. ``memory`` in bytes; ``repaired``, ``stuck`` and ``no_slot`` are empty where not so."""

    host_pid: int | None
    ns_pid: int | None
    device_uuid: str  # the GPU's, or that of a MIG instance of it
    comm: str = ""
    utilization: int | None = None
    memory: int | None = None
    repaired: str = ""
    stuck: str = ""
    no_slot: str = ""
    listed: bool = True  # by NVML; else only its slot says that it is there


class ContainerNode(NamedTuple):
    """Container on one GPU, with HAMi's limits: per cent of the cores, and bytes."""

    names: Named
    utilization: Amount
    memory: Amount
    processes: tuple[ProcessNode, ...]
    core_limit: int | None = None
    memory_limit: int | None = None
    limit_state: str = ""  # of the cores, over the last minute
    idle_since: float | None = None  # Unix time of its last use, if it holds memory

    def over(self) -> str:
        """Return the exceeded limit, ``core``, ``memory`` or both; empty if none is known to be exceeded."""
        uses = (("core", self.utilization, self.core_limit), ("memory", self.memory, self.memory_limit))
        return " and ".join(
            name for name, use, limit in uses if limit is not None and (use.value or 0) > limit
        )


class GpuNode(NamedTuple):
    """GPU with its users. ``report`` is None if the inventory lacks it; ``key`` is a unique word."""

    key: str
    report: Gpu | None
    containers: tuple[ContainerNode, ...]


class UnresolvedNode(NamedTuple):
    """A slot, a sample or a cache file that could not be resolved. ``kind`` is which of the three."""

    kind: str
    container: str
    reason: str
    slot: int | None = None
    ns_pid: int | None = None
    host_pid: int | None = None
    device_uuid: str = ""
    utilization: int | None = None


class Tree(NamedTuple):
    """All of it, and how the daemon is."""

    status: Status
    gpus: tuple[GpuNode, ...]
    unresolved: tuple[UnresolvedNode, ...]

    def part(self, name: str) -> Tree:
        """Return the containers of this name only, and their GPUs."""
        named = [
            gpu._replace(containers=tuple(node for node in gpu.containers if node.names.is_called(name)))
            for gpu in self.gpus
        ]
        titles = {container.names.title for gpu in named for container in gpu.containers}
        unresolved = tuple(node for node in self.unresolved if node.container in titles)
        return Tree(self.status, tuple(gpu for gpu in named if gpu.containers), unresolved)


class _Place(NamedTuple):
    """A container on a GPU, under construction; ``limits`` are of cores and memory."""

    names: Named
    processes: list[ProcessNode]
    limits: list[int | None]


def build(documents: Documents) -> Tree:
    """Order the daemon's answers: the inventory's GPUs, then those that only a process or a file names."""
    reports = {gpu.uuid or f"device {gpu.device_index}": gpu for gpu in documents.gpus}
    parents = {mig.uuid: gpu.uuid for gpu in documents.gpus for mig in gpu.mig_instances}
    names_of = {region.path: _names(documents.containers, region) for region in documents.regions}
    places: dict[str, dict[str, _Place]] = {key: {} for key in reports}

    def at(device: str, names: Named) -> _Place:
        containers = places.setdefault(parents.get(device, device), {})
        return containers.setdefault(names.key, _Place(names, [], [None, None]))

    for region in documents.regions:
        for index, device in enumerate(region.device_uuids):
            core, memory = (limits := at(device, names_of[region.path]).limits)
            limits[:] = region.sm_limit[index] or core, region.limit[index] or memory
    for names, node in _processes(documents, names_of):
        at(node.device_uuid, names).processes.append(node)
    uses = {(use.device_uuid, _identity(use)): use for use in documents.uses}
    gpus = []
    for key, containers in places.items():
        report, error = reports.get(key), documents.status.driver.error
        asked = report is not None and report.samples == "ok" and not error
        users = ((place, uses.get((key, _identity(place.names)))) for place in containers.values())
        nodes = tuple(_container(place, use, asked=asked) for place, use in users)
        gpus.append(GpuNode(key, report, nodes))
    return Tree(documents.status, tuple(gpus), tuple(_unresolved(documents, names_of)))


def _is_unplaced(process: Process) -> bool:
    return process.no_slot in _UNPLACED and not process.container_id and not process.container_name


def _processes(documents: Documents, names_of: dict[str, Named]) -> Iterator[tuple[Named, ProcessNode]]:
    """Yield the processes in NVML's list, then those that have a slot and are not in it."""
    owned = {slot.host_pid: slot for slot in documents.slots if not slot.dead}
    for it in documents.processes:
        if not _is_unplaced(it):
            place, values = (it.host_pid, it.ns_pid, it.device_uuid), (it.comm or "", it.sm_util, it.memory)
            node = ProcessNode(*place, *values, *_of_slot(owned.get(it.host_pid)), it.no_slot or "")
            yield Named.of(it), node
    listed = {None, *(process.host_pid for process in documents.processes)}
    for slot in documents.slots:
        if slot.path in names_of and slot.host_pid not in listed and not slot.dead:
            for util in slot.device_util:
                values = "", util.utilization, None
                node = ProcessNode(
                    slot.host_pid, slot.pid, util.device_uuid, *values, *_of_slot(slot), listed=False
                )
                yield names_of[slot.path], node


def _unresolved(documents: Documents, names_of: dict[str, Named]) -> Iterator[UnresolvedNode]:
    for it in filter(_is_unplaced, documents.processes):
        place = it.ns_pid, it.host_pid, it.device_uuid
        yield UnresolvedNode("sample", "", str(it.no_slot), None, *place, it.sm_util)
    for slot in documents.slots:
        if slot.path in names_of and slot.unresolved is not None:
            title = names_of[slot.path].title
            yield UnresolvedNode("slot", title, slot.unresolved, slot.slot, slot.pid, slot.host_pid)
    for path, reason in sorted((file.path, file.reason) for file in documents.rejected):
        yield UnresolvedNode("file", path, reason)


def total(values: Iterable[int | None], *, missing: bool = False, most: int | None = None) -> Amount:
    """Sum the known values, up to ``most``. ``missing``: there are others."""
    values = list(values)
    numbers = [value for value in values if value is not None]
    partly = missing or len(numbers) < len(values)
    if partly and not numbers:
        return Amount(None)
    return Amount(sum(numbers) if most is None else min(sum(numbers), most), partly)


def _container(place: _Place, use: ContainerUse | None, *, asked: bool) -> ContainerNode:
    """Return a container's node. ``asked``: the driver listed the GPU's processes, so an empty list means none."""
    processes, missing = place.processes, not asked and not place.processes
    # Samples of several processes are of several moments: together they can pass the whole.
    busy = total((process.utilization for process in processes), missing=missing, most=100)
    memory = total((process.memory for process in processes), missing=missing)
    core_limit, memory_limit = place.limits
    limits = core_limit, memory_limit, use.limit_state if use else "", use.idle_since if use else None
    return ContainerNode(place.names, busy, memory, tuple(processes), *limits)


def _names(containers: list[Container], region: Region) -> Named:
    """Return the container of a cache file; without its pod's name unless that is certain."""
    place = region.pod_uid or "", region.container_name or ""
    same = [container for container in containers if container.container_id == region.container_id]
    if not same and all(place):
        same = [record for record in containers if (record.pod_uid, record.container_name) == place]
    return Named.of(same[0]) if len(same) == 1 else Named(region.container_id or "", "", "", *place[::-1])


def _of_slot(slot: Slot | None) -> tuple[str, str]:
    """Return why the slot was repaired, and why it is stuck."""
    return (slot.repaired or "", slot.stuck or "") if slot else ("", "")


def _identity(record: ContainerUse | Named) -> tuple[str, str]:
    """Return a container's identity through its restarts; its id where its names are unknown."""
    pod_uid, name = record.pod_uid, record.container_name
    return (pod_uid, name) if pod_uid and name else ("", record.container_id or "")
