"""Joins NVML's answers with slot owners, containers, and other processes."""

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator

from msgspec.structs import replace

from resolver.base.budget import Slices
from resolver.base.counters import CounterName
from resolver.base.errors import AccessDenied, ProcessGone
from resolver.base.journal import Journal
from resolver.base.reasons import STARTING, SampleReason
from resolver.gpu.attribution import NOTHING, Joined, Used, join
from resolver.gpu.inventory import NONE as NO_INVENTORY
from resolver.gpu.inventory import changes, new_xids
from resolver.gpu.sampler import SAMPLE_SECONDS, Collection, Sampler
from resolver.linux.procfs import Procfs
from resolver.pids.pidmap import PidMap
from resolver.repair.repairer import Repairer
from resolver.state import Container, Process
from resolver.usage.accounts import Accounts
from resolver.usage.bypasses import Bypasses
from resolver.usage.running_containers import Census
from resolver.workers.lanes import TenantReader

#: Seconds that a driver may take to answer; after them its last answer is outdated.
DRIVER_SECONDS = 1.0
#: Seconds until the next query of NVML: the least, and those if a process may be idle or shares a busy GPU.
_SEEMS_IDLE, _MAY_BE_IDLE = 0.3, 0.5
#: Seconds until a process's command name is read again.
_COMM_SECONDS = 5.0


class GpuUsers:
    """State of the last collection. ``collected_at`` is NVML's last answer (Unix time, 0: never)."""

    def __init__(
        self,
        procfs: Procfs,
        pidmap: PidMap,
        repairer: Repairer,
        census: Census,
        lanes: TenantReader,
        counters: Counter[str],
        journal: Journal,
    ) -> None:
        self.sampler = Sampler()
        self.joined: Joined = NOTHING
        self.inventory = NO_INVENTORY
        self.accounts, self.bypasses = Accounts(), Bypasses(lanes, census)
        #: Seconds after which a container without a cache file counts as one without HAMi.
        self.search_seconds = 10.0
        self.answer_seconds = 0.0  # from NVML's last request to its answer
        self.collected_at = 0.0
        #: Replaced together: a container without its processes would be reported as idle.
        self.processes: tuple[Process, ...] = ()
        self.containers: tuple[Container, ...] = ()
        self.census = census
        self.ask_again = repairer.turns.ask_nvml  # before the interval is over
        self._asks_at: asyncio.TimerHandle | None = None
        self._joined_of: tuple[object, ...] = ()  # the input of the last join
        #: Each process of the last join owns a slot; other processes' containers may change at any time.
        self._all_owners = False
        self._busy: set[tuple[str, int]] = set()  # device UUID and PID, in the last collection
        self._listed: tuple[Used, ...] | None = None  # the input of `processes`
        self._disputed: dict[tuple[int, str], str] = {}  # why a 0 is disputed, by host PID and device
        #: Pods' UIDs and containers' names, by cache files.
        self._in_hami = set[tuple[str | None, str | None]]()
        self._claimants: dict[str, set[str]] = {}  # containers with a ResourceClaim's file, by path
        #: By PID and arrival: when it was read, and the name.
        self._comms: dict[tuple[int, tuple[int, int]], tuple[float, str]] = {}
        self._procfs, self._pidmap, self._repairer = procfs, pidmap, repairer
        self._counters, self._journal = counters, journal

    async def collect(self, interval: float) -> Collection:
        began = time.perf_counter()
        collection = await self.sampler.collect(max(DRIVER_SECONDS, interval))
        self.answer_seconds = time.perf_counter() - began
        trouble = self._journal.trouble
        self._counters[CounterName.IMPLAUSIBLE_SAMPLES] = self.sampler.implausible
        for kind, fields in changes(self.inventory, collection.inventory):
            level = "warning" if kind in ("gpu_gone", "gpu_unhealthy", "gpu_xid") else "info"
            if kind == "gpu_xid":
                fields["containers"] = self._on_device(fields["device"])
            self._journal.record(kind, level=level, **fields)
        for uuid, count in new_xids(self.inventory, collection.inventory).items():
            self.accounts.count_xids(uuid, count)
        self.inventory = collection.inventory
        if not collection.error:
            self.collected_at = collection.at
        if collection.error != STARTING:
            trouble("nvml", collection.error, "nvml_unavailable", "nvml_available")
        for uuid, device in collection.devices.items():
            trouble(f"device {uuid}", device.why, "device_without_samples", "device_samples", device=uuid)
        owners = self._repairer.owners
        # Periods differ in every answer, and no value depends on them.
        devices = {
            uuid: replace(samples, start=0, periods=()) for uuid, samples in collection.devices.items()
        }
        state = collection.error, devices, owners.changes
        if state == self._joined_of and self._all_owners:
            self.joined = self.joined._replace(at=collection.at, answered=time.monotonic())
        else:
            self.joined = await join(collection, owners, owners.by_container(), self._procfs, self._pidmap)
            self._joined_of = state
            self._all_owners = all(used.no_slot is None for used in self.joined.used)
        return collection

    def expect_idleness(self, collection: Collection) -> None:
        """Schedule the next collection for the moment when NVML shows if a process that seems idle is idle."""
        devices = collection.devices
        busy = {(uuid, pid) for uuid, device in devices.items() for pid in device.newest}
        absent, self._busy = {uuid for uuid, _ in self._busy - busy}, busy
        unsure = any(not devices[uuid].idle for uuid in absent & devices.keys())
        shared = any(len(device.newest) > 1 for device in devices.values())
        waits = [_MAY_BE_IDLE] if unsure or shared else []
        # Processes of a device that is quiet now still count as busy for the rest of a second.
        waits += [
            SAMPLE_SECONDS - device.quiet for device in devices.values() if device.newest and device.quiet
        ]
        if self._asks_at is not None:
            self._asks_at.cancel()  # else there would be two series of requests
        if waits:
            wait = max(min(waits) + 0.01, _SEEMS_IDLE)
            self._asks_at = asyncio.get_running_loop().call_later(wait, self.ask_again.set)

    async def count_containers(self) -> None:
        changed, before = await self.census.refresh(*self._see()), (self._disputed, self._in_hami)
        self._disputed = dict(self._disputes())
        self._in_hami = {
            (report.pod_uid, report.container_name) for report in self._repairer.reports() if report.pod_uid
        }
        if not changed and self.joined.used is self._listed and (self._disputed, self._in_hami) == before:
            return
        self._listed = self.joined.used
        slices, processes, containers = Slices(), [], self.census.containers()
        for used in self.joined.used:
            processes.append(self._process(used))
            await slices.yield_if_due()
        self.processes, self.containers = tuple(processes), containers
        old = time.monotonic() - _COMM_SECONDS
        self._comms = {process: read for process, read in self._comms.items() if read[0] > old}

    def _see(self) -> tuple[dict[str, int], dict[str, list[str]]]:
        """Return host PIDs and region paths by container id, for containers with a GPU process or a region."""
        regions: dict[str, list[str]] = {}
        claimants: dict[str, set[str]] = {}
        for region in self._repairer.reports():
            ids = set(region.container_ids)
            if region.claim:  # a container keeps it after its last process has ended
                ids.update(
                    claimant for claimant in self._claimants.get(region.path, ()) if self.census.get(claimant)
                )
                claimants[region.path] = ids
            for container_id in sorted(ids):
                regions.setdefault(container_id, []).append(region.path)
        self._claimants = claimants
        users = self._repairer.owners.by_container()
        for used in self.joined.used:
            if used.no_slot in (SampleReason.NO_SLOT, SampleReason.NO_SHARED_REGION):
                users.setdefault(used.container, used.host_pid)
        return users, regions

    def _disputes(self) -> Iterator[tuple[tuple[int, str], str]]:
        for region in self._repairer.reports():
            for slot in region.slots.owned:
                if slot.stuck and slot.host_pid is not None:
                    for uuid, utilization in zip(region.device_uuids, slot.utilization, strict=True):
                        if utilization is None:
                            yield (slot.host_pid, uuid), slot.stuck

    def _on_device(self, uuid: str) -> list[str]:
        """Return the containers with a process on a GPU, as ``<namespace>/<pod>/<container>``, or their ids."""
        names = {
            f"{process.namespace}/{process.pod}/{process.container_name}"
            if process.pod
            else process.container_id or ""
            for process in self.processes
            if process.device_uuid == uuid
        }
        return sorted(names - {""})

    def _comm(self, host_pid: int) -> str:
        process, now = (host_pid, self._pidmap.arrival(host_pid)), time.monotonic()
        read_at, comm = self._comms.get(process, (-math.inf, ""))
        if now - read_at > _COMM_SECONDS or not process[1][1]:
            self._comms[process] = read_at, comm = now, self._procfs.comm(host_pid)
        return comm

    def _process(self, used: Used) -> Process:
        owner = self._repairer.owners.process(used.host_pid) if used.no_slot is None else None
        container_id = used.container or self._repairer.owners.container_id(used.host_pid)
        ns_pid: int | None = owner.ns_pids[-1] if owner else None
        comm: str | None = None
        with contextlib.suppress(ProcessGone, AccessDenied):
            if owner is None:
                ns_pid = self._procfs.ns_pids(used.host_pid)[-1]
            comm = self._comm(used.host_pid)
        why = None if used.sm_util else self._disputed.get((used.host_pid, used.device_uuid))
        container = self.census.get(container_id)
        names: tuple[str | None, ...] = (None,) * 4
        if container is not None:
            names = container.pod_uid, container.container_name, container.namespace, container.pod
        pod_uid, separator, name = container_id.partition("_")
        if separator:  # it has ended, and only its slot's directory is known
            names = pod_uid, name, *(container or None for container in self.census.pods.of(pod_uid))
        no_slot = used.no_slot
        if no_slot is SampleReason.NO_SHARED_REGION and names[:2] in self._in_hami:
            no_slot = SampleReason.NO_SLOT  # none of its slots has an owner (yet)
        age = time.time() - container.since if container else self.search_seconds
        if no_slot is SampleReason.NO_SHARED_REGION and age < self.search_seconds:
            no_slot = SampleReason.NOT_FOUND_YET
        return Process(
            host_pid=used.host_pid,
            ns_pid=ns_pid,
            device_uuid=used.device_uuid,
            container_id=None if separator else container_id or None,
            pod_uid=names[0],
            container_name=names[1],
            namespace=names[2],
            pod=names[3],
            comm=comm or None,
            sm_util=None if why else used.sm_util,
            memory=used.memory,
            no_slot=no_slot,
            sm_util_why=why,
        )
