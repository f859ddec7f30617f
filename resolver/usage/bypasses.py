"""Processes that use a GPU without a slot, so that HAMi-core limits nothing there, and the causes."""

import asyncio
import time
from typing import Final

from resolver.base.errors import ProcessGone, ResolverError
from resolver.base.reasons import BypassReason, SampleReason
from resolver.hami.process_reads import library_causes, mount_causes
from resolver.state import Process, WithoutSlot
from resolver.usage.running_containers import Census
from resolver.workers.lane import ALL
from resolver.workers.lanes import TenantReader

#: Seconds after which a bypass is reported, because a start or an end looks the same for a moment.
_HELD_SECONDS: Final = 30.0
_HAMIS: Final = (SampleReason.NO_SLOT, SampleReason.NO_SHARED_REGION, SampleReason.NOT_FOUND_YET)
_WITHOUT: Final = (*_HAMIS, SampleReason.NOT_IN_CONTAINER)
_WITHOUT_MOUNTS: Final = {BypassReason.LOADED, BypassReason.OTHER_USER, BypassReason.CONTROL_DISABLED}


class Bypasses:
    """Processes without a slot: since when, and why."""

    def __init__(self, reader: TenantReader, census: Census) -> None:
        self._reader, self._census = reader, census
        self._since: dict[tuple[int, str], float] = {}  # by host PID and device
        self._causes: dict[int, tuple[BypassReason, ...]] = {}
        self._reading: asyncio.Task[None] | None = None

    def note(self, processes: tuple[Process, ...]) -> None:
        """Take over one collection's processes, and begin to read a cause for each container that lacks one."""
        now = time.monotonic()
        without = [process for process in processes if process.no_slot in _WITHOUT]
        self._since = {
            key: self._since.get(key, now)
            for key in ((process.host_pid, process.device_uuid) for process in without)
        }
        present = {process.host_pid for process in without}
        self._causes = {host_pid: causes for host_pid, causes in self._causes.items() if host_pid in present}
        due = {
            process.container_id: process.host_pid
            for process in without
            if process.container_id
            and process.no_slot in _HAMIS
            and now - self._since[process.host_pid, process.device_uuid] >= _HELD_SECONDS
            and BypassReason.UNREADABLE in self._causes.get(process.host_pid, (BypassReason.UNREADABLE,))
        }
        if due and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(self._read(due))

    async def _read(self, due: dict[str, int]) -> None:
        """Read one process of each container: a tenant with many waits longer."""
        for container_id, host_pid in due.items():
            container = self._census.get(container_id)
            first = container.init_host_pid if container else None
            try:
                causes = await self._reader.ask(container_id, container_id, library_causes, host_pid, first)
                if not set(causes) & _WITHOUT_MOUNTS:
                    causes = await self._reader.ask(container_id, ALL, mount_causes, host_pid, causes)
            except ProcessGone:
                continue
            except (ResolverError, OSError):
                causes = [BypassReason.UNREADABLE]
            self._causes[host_pid] = tuple(map(BypassReason, causes))

    def report(self, processes: tuple[Process, ...]) -> tuple[WithoutSlot, ...]:
        """Return the processes that have had no slot for 30 s."""
        now, report = time.monotonic(), []
        for process in processes:
            since = self._since.get((process.host_pid, process.device_uuid))
            if since is not None and process.no_slot is not None and now - since >= _HELD_SECONDS:
                causes = self._causes.get(process.host_pid, ())
                report.append(WithoutSlot(process=process, since=time.time() - (now - since), causes=causes))
        return tuple(report)
