"""The tenant's view: a container's own processes, use and slots, by the PIDs that its caller sees.

Answers contain no host PID, no other container, and no fact about a GPU's other users.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from resolver.api.access import Tenant
from resolver.api.problems import Problem, Reason
from resolver.api.shapes import DeviceUtil, NvmlState, device_utils, nvml_state
from resolver.api.walks import Walks
from resolver.base.errors import AccessDenied, ProcessGone
from resolver.base.reasons import RepairReason, SampleReason, UnresolvedReason
from resolver.containers.namespaces import Namespace
from resolver.gpu.attribution import total
from resolver.linux.procfs import Procfs
from resolver.state import ContainerUse, RegionReport, SlotReport, Snapshot


class OwnProcess(Struct, frozen=True):
    """One of the container's processes on one GPU.

    ``pid`` is its number in the caller's PID namespace. ``sm_util`` is in per cent, ``memory`` in bytes. ``no_slot``
    explains why HAMi doesn't know it.
    """

    pid: int
    device_uuid: str
    comm: str | None
    sm_util: int | None
    memory: int | None
    no_slot: SampleReason | None


class OwnProcesses(NvmlState, frozen=True):
    """``/v1/processes`` for a container: those of its processes that the caller's PID namespace shows."""

    processes: list[OwnProcess]


class OwnGpu(Struct, frozen=True):
    """Use of one GPU by the container, and HAMi's limits for it. Null means unknown, or no limit.

    ``memory_total`` is the GPU's, ``memory_used`` and ``memory_limit`` the container's, in bytes; ``sm_util``, the
    newest value, is in per cent. ``use``, its use over time, is null before the first, and has no energy, which
    depends on others.
    """

    device_uuid: str
    name: str | None
    memory_total: int | None
    memory_used: int | None
    memory_limit: int | None
    sm_util: int | None
    use: ContainerUse | None


class OwnUsage(Struct, frozen=True):
    """``/v1/usage`` for a container: each of its GPUs."""

    at: float
    error: str | None
    gpus: list[OwnGpu]


class OwnSlot(Struct, frozen=True):
    """One slot of the container's cache file.

    ``pid`` is its process's number in the caller's PID namespace, null if it has none there. ``repaired`` is the
    reason of the last repair, ``unresolved`` why nothing can be repaired, and ``why`` the same in words.
    """

    slot: int
    pid: int | None
    dead: bool
    repaired: RepairReason | None
    unresolved: UnresolvedReason | None
    why: str | None
    device_util: list[DeviceUtil]


class OwnSlots(Struct, frozen=True):
    """``/v1/slots`` for a container."""

    at: float
    slots: list[OwnSlot]


class _Part:
    """One container's part of a snapshot. ``numbers`` has one reading of each PID namespace, for all callers."""

    def __init__(self, picture: Snapshot, uses: Iterable[ContainerUse], container_id: str) -> None:
        self.picture = picture
        self.numbers: dict[int, asyncio.Task[Mapping[int, int]]] = {}
        by_id = {container.container_id: container for container in picture.containers}
        container = by_id.get(container_id)
        self.pidns = container.pidns if container else None
        names = (container.pod_uid, container.container_name) if container else (None, None)

        def owns(named: ContainerUse | RegionReport) -> bool:
            by_name = None not in names and (named.pod_uid, named.container_name) == names
            return by_name or named.container_id == container_id

        self.regions: list[RegionReport] = []
        self.slots: list[tuple[RegionReport, SlotReport]] = []
        for region in picture.regions:
            whole = not region.claim and owns(region)
            if whole or container_id in region.container_ids:
                self.regions.append(region)
                own = ("", container_id) if whole else (container_id,)
                self.slots += [(region, slot) for slot in region.slots if slot.container_id in own]
        self.processes = [
            process for process in picture.gpu_processes if process.container_id == container_id
        ]
        self.uses = {use.device_uuid: replace(use, energy=None) for use in uses if owns(use)}

    def gpus(self) -> Iterator[OwnGpu]:
        """Yield the container's GPUs: those of its cache files, then those that it uses without one."""
        joined, by_uuid = self.picture.joined, {gpu.uuid: gpu for gpu in self.picture.inventory.gpus}
        limits = {
            uuid: region.memory_limit(index)
            for region in self.regions
            for index, uuid in enumerate(region.device_uuids)
        }
        used = (process.device_uuid for process in self.processes)
        for uuid in dict.fromkeys((*limits, *self.uses, *used)):
            here = [process for process in self.processes if process.device_uuid == uuid]
            memory = total([process.memory for process in here]) if uuid in joined.listed else None
            sm_util = total([process.sm_util for process in here]) if uuid in joined.asked else None
            gpu = by_uuid.get(uuid)
            name, size = (gpu.name, gpu.memory_total) if gpu else (None, None)
            yield OwnGpu(uuid, name, size, memory, limits.get(uuid), sm_util, self.uses.get(uuid))


class OwnView:
    """Answers about the caller's container."""

    def __init__(self, snapshot: Callable[[], Snapshot], procfs: Procfs, walks: Walks) -> None:
        self._snapshot, self._procfs, self._walks = snapshot, procfs, walks
        self._picture: Snapshot | None = None
        self._uses: tuple[ContainerUse, ...] = ()
        self._parts: dict[str, _Part] = {}

    async def processes(self, tenant: Tenant) -> Struct:
        part = self._part(tenant)
        numbers = await self._numbers(tenant, part)
        listed = [
            OwnProcess(numbers[own.host_pid], own.device_uuid, own.comm, own.sm_util, own.memory, own.no_slot)
            for own in part.processes
            if own.host_pid in numbers
        ]
        return OwnProcesses(*nvml_state(part.picture), listed)

    async def usage(self, tenant: Tenant) -> Struct:
        part = self._part(tenant)
        return OwnUsage(part.picture.at, part.picture.joined.error or None, list(part.gpus()))

    async def slots(self, tenant: Tenant) -> Struct:
        part = self._part(tenant)
        numbers, outermost = await self._numbers(tenant, part), part.pidns == tenant.own.pidns
        listed = []
        for region, slot in part.slots:
            pid = slot.pid if outermost else None
            if slot.host_pid is not None:
                pid = numbers.get(slot.host_pid)
            why = slot.unresolved.for_terminal()[0] if slot.unresolved else None
            utils = device_utils(region, slot)
            listed.append(OwnSlot(slot.slot, pid, slot.dead, slot.repaired, slot.unresolved, why, utils))
        return OwnSlots(part.picture.at, listed)

    def _part(self, tenant: Tenant) -> _Part:
        """Return the container's part of the newest snapshot."""
        if not tenant.container_id:
            why = "this container's cgroup has no container id, so its processes can't be distinguished from others': "
            raise Problem(503, Reason.CANNOT_KNOW, why + "look up single ones by GET /v1/lookup?pid=<n>")
        picture = self._snapshot()
        if picture is not self._picture:
            self._picture, self._uses, self._parts = picture, picture.used().containers, {}
        if tenant.container_id not in self._parts:
            self._parts[tenant.container_id] = _Part(picture, self._uses, tenant.container_id)
        return self._parts[tenant.container_id]

    async def _numbers(self, tenant: Tenant, part: _Part) -> Mapping[int, int]:
        """Return the PIDs that the caller sees, by host PID."""
        task = part.numbers.get(tenant.own.pidns)
        if task is None:
            host_pids = {process.host_pid for process in part.processes}
            host_pids |= {slot.host_pid for _, slot in part.slots if slot.host_pid is not None}
            walk = self._walks.run(visible_numbers, self._procfs, tenant.own, tenant.container_id, host_pids)
            task = part.numbers[tenant.own.pidns] = asyncio.create_task(walk)
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)  # a caller that hangs up must not end the others' reading


def visible_numbers(
    procfs: Procfs, own: Namespace, container_id: str, host_pids: Iterable[int]
) -> dict[int, int]:
    """Return each process's number in the namespace, if it is there and in the container. Takes a thread."""
    numbers: dict[int, int] = {}
    for host_pid in host_pids:
        with contextlib.suppress(ProcessGone, AccessDenied):
            with procfs.verify(host_pid) as handle:
                chain, container = procfs.pidns_chain(host_pid), procfs.container(host_pid)
            inside = chain[own.level : own.level + 1] == (own.pidns,)
            if inside and container.container_id == container_id:
                numbers[host_pid] = handle.process.ns_pids[own.level]
    return numbers
