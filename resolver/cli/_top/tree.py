"""GPU > container > process, made from the daemon's documents; unknown values are None, never 0."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from resolver.base.errors import ResolverError
from resolver.base.reasons import SampleReason
from resolver.cli.container_names import Named
from resolver.cli.documents import from_daemon

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from resolver.api.shapes import Region, Slot
    from resolver.api.status import Status
    from resolver.cli.documents import Documents
    from resolver.gpu.inventory import Gpu
    from resolver.state import ContainerUse, Process

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
            name for name, amount, limit in uses if limit is not None and (amount.value or 0) > limit
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
        gpus, titles = [], set()
        for gpu in self.gpus:
            named = tuple(container for container in gpu.containers if container.names.is_called(name))
            titles |= {container.names.title for container in named}
            gpus += [gpu._replace(containers=named)] if named else []
        unresolved = tuple(node for node in self.unresolved if node.container in titles)
        return self._replace(gpus=tuple(gpus), unresolved=unresolved)


class Reading(NamedTuple):
    """The last reading that succeeded, and the error of those after it, since when (Unix time)."""

    tree: Tree
    read_at: float
    error: str = ""
    since: float = 0.0

    def next(self, socket_path: str | None, name: str, interval: float) -> Reading:
        """Return the reading after a pause: this one with an error if the daemon does not answer."""
        time.sleep(interval)
        now = time.time()
        try:
            return Reading(read(socket_path, name), now)
        except ResolverError as error:
            return self._replace(error=str(error), since=self.since or now)


def read(socket_path: str | None, name: str = "") -> Tree:
    """Ask the daemon for everything, or for the containers with this name and their GPUs."""
    tree = build(from_daemon(socket_path))
    return tree.part(name) if name else tree


def build(documents: Documents) -> Tree:
    """Order the daemon's answers."""
    places = _Places(documents)
    for process in documents.processes:
        places.add_process(process)
    for region in documents.regions:
        places.add_region(region)
    files = sorted((file.path, file.reason) for file in documents.rejected)
    unresolved = (*places.unresolved, *(UnresolvedNode("file", *file) for file in files))
    return Tree(documents.status, tuple(places.gpus()), unresolved)


def total(values: Iterable[int | None], *, missing: bool = False, most: int | None = None) -> Amount:
    """Sum the known values, up to ``most``. ``missing``: there are others."""
    values = list(values)
    numbers = [value for value in values if value is not None]
    partly = missing or len(numbers) < len(values)
    if partly and not numbers:
        return Amount(None)
    return Amount(sum(numbers) if most is None else min(sum(numbers), most), partly)


class _Place(NamedTuple):
    """A container on a GPU, under construction; ``limits`` are of cores and memory."""

    names: Named
    processes: list[ProcessNode]
    limits: list[int | None]


class _Places:
    """Containers by GPU, under construction."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._parents = {mig.uuid: gpu.uuid for gpu in documents.gpus for mig in gpu.mig_instances}
        self._listed = {process.host_pid for process in documents.processes}
        self._owned = {slot.host_pid: slot for slot in documents.slots if not slot.dead}
        self._slots: dict[str, list[Slot]] = {}  # by their region's path
        for slot in documents.slots:
            self._slots.setdefault(slot.path, []).append(slot)
        # By GPU, then by container.
        self._places: dict[str, dict[str, _Place]] = {_gpu_key(gpu): {} for gpu in documents.gpus}
        self.unresolved: list[UnresolvedNode] = []

    def _at(self, device: str, names: Named) -> _Place:
        places = self._places.setdefault(self._parents.get(device, device), {})
        return places.setdefault(names.key, _Place(names, [], [None, None]))

    def add_process(self, process: Process) -> None:
        """Add a process that NVML lists."""
        host_pid, ns_pid, device, no_slot = (
            process.host_pid,
            process.ns_pid,
            process.device_uuid,
            process.no_slot,
        )
        if no_slot in _UNPLACED and not process.container_id and not process.container_name:
            sample = UnresolvedNode(
                "sample", "", str(no_slot), None, ns_pid, host_pid, device, process.sm_util
            )
            self.unresolved.append(sample)
            return
        facts = process.comm or "", process.sm_util, process.memory, *_of_slot(self._owned.get(host_pid))
        node = ProcessNode(host_pid, ns_pid, device, *facts, no_slot or "")
        self._at(device, Named.of(process)).processes.append(node)

    def add_region(self, region: Region) -> None:
        """Add a cache file: its slots, and the GPUs of its container."""
        names, slots = self._names(region), self._slots.get(region.path, ())
        idle = [slot for slot in slots if slot.host_pid not in {None, *self._listed} and not slot.dead]
        for index, device in enumerate(region.device_uuids):
            place = self._at(device, names)
            core, memory = place.limits
            place.limits[:] = region.sm_limit[index] or core, region.limit[index] or memory
            for slot in idle:
                facts = "", slot.device_util[index].utilization, None, *_of_slot(slot)
                place.processes.append(ProcessNode(slot.host_pid, slot.pid, device, *facts, listed=False))
        self.unresolved += [
            UnresolvedNode("slot", names.title, slot.unresolved, slot.slot, slot.pid, slot.host_pid)
            for slot in slots
            if slot.unresolved is not None
        ]

    def _names(self, region: Region) -> Named:
        """Return the container of a cache file; without its pod's name unless that is certain."""
        containers, pod_uid, name = (
            self._documents.containers,
            region.pod_uid or "",
            region.container_name or "",
        )
        same = [container for container in containers if container.container_id == region.container_id]
        if not same and pod_uid and name:
            same = [
                container
                for container in containers
                if (container.pod_uid, container.container_name) == (pod_uid, name)
            ]
        return (
            Named.of(same[0]) if len(same) == 1 else Named(region.container_id or "", "", "", name, pod_uid)
        )

    def gpus(self) -> Iterator[GpuNode]:
        """Yield every GPU: the inventory's in order, then those that only a process or a file names."""
        reports = {_gpu_key(gpu): gpu for gpu in self._documents.gpus}
        accounts = {(use.device_uuid, _identity(use)): use for use in self._documents.uses}
        for uuid, places in self._places.items():
            report, error = reports.get(uuid), self._documents.status.driver.error
            asked = report is not None and report.samples == "ok" and not error
            nodes = [
                _container(at, accounts.get((uuid, _identity(at.names))), asked=asked)
                for at in places.values()
            ]
            yield GpuNode(uuid, report, tuple(nodes))


def _container(place: _Place, account: ContainerUse | None, *, asked: bool) -> ContainerNode:
    """Return a container's node. ``asked``: the driver listed the GPU's processes, so an empty list means none."""
    (core, memory), processes = place.limits, place.processes
    missing = not asked and not processes
    return ContainerNode(
        place.names,
        # Samples of several processes are of several moments: together they can pass the whole.
        total((process.utilization for process in processes), missing=missing, most=100),
        total((process.memory for process in processes), missing=missing),
        tuple(processes),
        core,
        memory,
        account.limit_state if account else "",
        account.idle_since if account else None,
    )


def _of_slot(slot: Slot | None) -> tuple[str, str]:
    """Return why the slot was repaired, and why it is stuck."""
    return (slot.repaired or "", slot.stuck or "") if slot else ("", "")


def _identity(record: ContainerUse | Named) -> tuple[str, str]:
    """Return what identifies a container through its restarts; its id where its names are unknown."""
    pod_uid, name = record.pod_uid, record.container_name
    return (pod_uid, name) if pod_uid and name else ("", record.container_id or "")


def _gpu_key(gpu: Gpu) -> str:
    """Return its UUID, or a substitute for a broken GPU without one."""
    return gpu.uuid or f"device {gpu.device_index}"
