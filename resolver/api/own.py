"""The tenant's view: a container's own processes, use and slots, by the PIDs that its caller sees.

Answers contain no host PID, no other container, and no fact about a GPU's other users.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from resolver.api.problems import Problem, Reason
from resolver.api.request import Answer, encode
from resolver.api.shapes import DeviceUtil, device_utils
from resolver.base.errors import AccessDenied, ProcessGone
from resolver.base.reasons import RepairReason, SampleReason, UnresolvedReason
from resolver.gpu.attribution import total
from resolver.lookup.resolve import verify
from resolver.state import ContainerUse, UsageReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from resolver.api.access import Tenant
    from resolver.api.walks import Walks
    from resolver.containers.namespaces import Namespace
    from resolver.linux.procfs import Procfs
    from resolver.state import Container, RegionReport, SlotReport, Snapshot


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


class OwnProcesses(Struct, frozen=True):
    """``/v1/processes`` for a container: those of its processes that the caller's PID namespace shows.

    ``collected_at`` is the Unix time of NVML's last answer, null before the first; ``error`` is why it fails now.
    """

    at: float
    collected_at: float | None
    error: str | None
    processes: list[OwnProcess]


class OwnGpu(Struct, frozen=True):
    """Use of one GPU by the container, and HAMi's limits for it. Null means unknown, or no limit.

    ``memory_total`` is the GPU's, ``memory_used`` and ``memory_limit`` the container's, in bytes; ``sm_util``, the
    newest value, is in per cent. ``use`` is its account, null before the first. It has no energy, which depends on
    others.
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

    ``pid`` is its process's number in the caller's PID namespace, null where that doesn't show it. ``repaired`` is the
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


class _Mine(NamedTuple):
    """One container's part of a snapshot."""

    picture: Snapshot
    container: Container | None
    regions: list[RegionReport]
    slots: list[tuple[RegionReport, SlotReport]]


class OwnView:
    """Answers about the caller's container. Callers of one container share what is read for them."""

    def __init__(self, snapshot: Callable[[], Snapshot], procfs: Procfs, walks: Walks) -> None:
        self._snapshot, self._procfs, self._walks = snapshot, procfs, walks
        self._picture: Snapshot | None = None
        self._used = UsageReport()
        self._mine: dict[str, _Mine] = {}
        self._numbers: dict[tuple[str, int], asyncio.Task[Mapping[int, int]]] = {}

    async def processes(self, tenant: Tenant) -> Answer:
        """Answer ``/v1/processes``."""
        mine = self._part(tenant)
        numbers, picture = await self._numbers_of(tenant, mine), mine.picture
        listed = [
            OwnProcess(numbers[own.host_pid], own.device_uuid, own.comm, own.sm_util, own.memory, own.no_slot)
            for own in picture.gpu_processes
            if own.container_id == tenant.container_id and own.host_pid in numbers
        ]
        error = picture.joined.error or None
        return _answer(tenant, OwnProcesses(picture.at, picture.collected_at or None, error, listed))

    async def usage(self, tenant: Tenant) -> Answer:
        """Answer ``/v1/usage``."""
        mine = self._part(tenant)
        gpus = list(_gpus(tenant.container_id, mine, self._used.containers))
        return _answer(tenant, OwnUsage(mine.picture.at, mine.picture.joined.error or None, gpus))

    async def slots(self, tenant: Tenant) -> Answer:
        """Answer ``/v1/slots``."""
        mine = self._part(tenant)
        numbers = await self._numbers_of(tenant, mine)
        outermost = mine.container is not None and mine.container.pidns == tenant.own.pidns
        listed = []
        for region, slot in mine.slots:
            pid = slot.pid if outermost else None
            if slot.host_pid is not None:
                pid = numbers.get(slot.host_pid)
            why = slot.unresolved.for_terminal()[0] if slot.unresolved else None
            utils = device_utils(region, slot)
            listed.append(OwnSlot(slot.slot, pid, slot.dead, slot.repaired, slot.unresolved, why, utils))
        return _answer(tenant, OwnSlots(mine.picture.at, listed))

    def _part(self, tenant: Tenant) -> _Mine:
        """Return the container's part of the newest snapshot."""
        if not tenant.container_id:
            why = "this container's cgroup has no container id, so its processes can't be told from others': look up "
            raise Problem(503, Reason.CANNOT_KNOW, why + "single ones by GET /v1/lookup?pid=<n>")
        picture = self._snapshot()
        if picture is not self._picture:
            self._picture, self._used, self._mine, self._numbers = picture, picture.used(), {}, {}
        mine = self._mine.get(tenant.container_id)
        if mine is None:
            mine = self._mine[tenant.container_id] = _part_of(picture, tenant.container_id)
        return mine

    async def _numbers_of(self, tenant: Tenant, mine: _Mine) -> Mapping[int, int]:
        """Return the PIDs that the caller sees, by host PID."""
        key = tenant.container_id, tenant.own.pidns
        task = self._numbers.get(key)
        if task is None:
            listed = mine.picture.gpu_processes
            host_pids = {each.host_pid for each in listed if each.container_id == tenant.container_id}
            host_pids |= {slot.host_pid for _, slot in mine.slots if slot.host_pid is not None}
            walk = self._walks.run(visible_numbers, self._procfs, tenant.own, tenant.container_id, host_pids)
            task = self._numbers[key] = asyncio.create_task(walk)
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)  # a caller that hangs up must not end the others' reading


def _answer(tenant: Tenant, document: Struct) -> Answer:
    tenant.require_alive()  # while it lives, the container id and the namespace are its own
    return Answer(encode(document))


def _part_of(picture: Snapshot, container_id: str) -> _Mine:
    container = next((each for each in picture.containers if each.container_id == container_id), None)
    names = (container.pod_uid, container.container_name) if container else (None, None)
    regions, slots = [], []
    for region in picture.regions:
        whole = not region.claim and _is_named(region, container_id, names)
        if whole or container_id in region.container_ids:
            regions.append(region)
            mine = ("", container_id) if whole else (container_id,)
            slots += [(region, slot) for slot in region.slots if slot.container_id in mine]
    return _Mine(picture, container, regions, slots)


def _gpus(container_id: str, mine: _Mine, uses: Iterable[ContainerUse]) -> Iterator[OwnGpu]:
    """Yield the container's GPUs: those of its cache files, then those that it uses without one."""
    picture, container = mine.picture, mine.container
    names = (container.pod_uid, container.container_name) if container else (None, None)
    accounts = {
        use.device_uuid: replace(use, energy=None) for use in uses if _is_named(use, container_id, names)
    }
    limits = {
        uuid: region.memory_limit(index)
        for region in mine.regions
        for index, uuid in enumerate(region.device_uuids)
    }
    processes = [each for each in picture.gpu_processes if each.container_id == container_id]
    known = {gpu.uuid: gpu for gpu in picture.inventory.gpus}
    for uuid in dict.fromkeys((*limits, *accounts, *(each.device_uuid for each in processes))):
        here = [each for each in processes if each.device_uuid == uuid]
        gpu = known.get(uuid)
        memory = total([each.memory for each in here]) if uuid in picture.joined.listed else None
        sm_util = total([each.sm_util for each in here]) if uuid in picture.joined.asked else None
        name, size = (gpu.name, gpu.memory_total) if gpu else (None, None)
        yield OwnGpu(uuid, name, size, memory, limits.get(uuid), sm_util, accounts.get(uuid))


def _is_named(named: ContainerUse | RegionReport, container_id: str, names: tuple[str | None, ...]) -> bool:
    """Check if that is the container's, by its id or by its pod and name."""
    by_name = None not in names and (named.pod_uid, named.container_name) == names
    return by_name or named.container_id == container_id


def visible_numbers(
    procfs: Procfs, own: Namespace, container_id: str, host_pids: Iterable[int]
) -> dict[int, int]:
    """Return each process's number in the namespace, if it is there and in the container. Takes a thread."""
    numbers: dict[int, int] = {}
    for host_pid in host_pids:
        number = 0
        with contextlib.suppress(ProcessGone, AccessDenied), verify(procfs, host_pid) as handle:
            chain, ns_pids = procfs.pidns_chain(host_pid), handle.process.ns_pids
            inside = chain[own.level : own.level + 1] == (own.pidns,)
            if inside and procfs.container(host_pid).container_id == container_id:
                number = ns_pids[own.level]
        if number:
            numbers[host_pid] = number
    return numbers
