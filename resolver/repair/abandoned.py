"""Cache files that no process has open: their containers have ended, maybe before the daemon started.

Such a container's PID namespace no longer proves a PID free. A process with a slot keeps its file open and mapped until
it ends; so does a program that serves it to a virtual machine or gVisor. A file is abandoned if either:

- The kernel grants a read lease: no process has the file open for writing (fcntl(2), F_SETLEASE).

- No process that existed when the slots were read maps the file or has a file of that name open. Other pods' processes
  are ignored unless all pods reach the file, because HAMi's monitor opens every file. An unreadable or late process
  leaves the question open, except a host process without a mount of that directory.

A process attaching later writes a byte: the file's new time cancels the verdict.
"""

import asyncio
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from resolver.base.budget import Slices
from resolver.base.errors import CannotKnow, ProcessGone, TooSlow, WorkerFailed
from resolver.base.journal import Journal
from resolver.base.retry import longer
from resolver.hami.discovery import Proof
from resolver.hami.process_reads import files_of, mounts_near
from resolver.hami.region import unwritten
from resolver.linux.cgroup import parse_cgroup, pod_uid_of
from resolver.linux.procfs import Procfs
from resolver.repair.region import RegionRepairs
from resolver.workers.lane import ALL, LEASES
from resolver.workers.lanes import TenantReader

#: Seconds between two time slices of a walk: tenants can cause a walk each second, free of charge.
_REST_SECONDS = 0.05
#: Seconds without a change before a file is judged: file times have the resolution of a tick.
QUIET_SECONDS = 1.0
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 600.0
#: Files that are judged in one go through all processes.
MOST_AT_ONCE = 64


class _Suspect:
    """File without an owned slot."""

    def __init__(self, repairs: RegionRepairs) -> None:
        self.repairs, self.mtime_ns = repairs, repairs.region.mtime_ns
        self.in_use = False  # also if use can't be excluded
        self.pause, self.retry_at = FIRST_PAUSE, 0.0

    def untouched(self) -> bool:
        """Check that no process attached, and no slot has an owner, whose PID namespace would decide."""
        region = self.repairs.region
        with suppress(OSError):
            same = not self.repairs.closed and os.fstat(region.fd).st_mtime_ns == self.mtime_ns
            return same and not self.repairs.slots.owned
        return False

    def elsewhere(self, pod_uid: str | None) -> bool:
        """Check that a pod's processes can't reach the file."""
        of_region = self.repairs.ownership.pod_uid
        # If all pods reach the file, a tenant may have chosen the directory's name.
        return bool(pod_uid and of_region and pod_uid != of_region and not self.repairs.proof.open)


class Abandoned:
    """Decides if suspected files are abandoned; ``wake`` is called after a judgement."""

    def __init__(
        self,
        procfs: Procfs,
        reader: TenantReader,
        journal: Journal,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._procfs, self._reader, self._journal = procfs, reader, journal
        self._wake, self._clock = wake, clock
        self._suspects: dict[str, _Suspect] = {}
        self._judging: asyncio.Task[None] | None = None

    def suspect(self, repairs: RegionRepairs) -> None:
        """Add a file with an unowned slot and no PID namespace to prove its PID free."""
        suspect = self._suspects.get(repairs.region.path)
        if suspect is None or suspect.repairs is not repairs or suspect.mtime_ns != repairs.region.mtime_ns:
            self._suspects[repairs.region.path] = _Suspect(repairs)

    def forget(self, path: str) -> None:
        self._suspects.pop(path, None)

    def wait(self) -> float:
        """Return seconds until `judge` has work; at most 0 is now."""
        return min((each.retry_at for each in self._suspects.values()), default=math.inf) - self._clock()

    async def judge_due(self, *, patient: bool) -> None:
        """Begin to judge due files unless a judgement is in progress; if not ``patient``, wait for its end."""
        if (self._judging is None or self._judging.done()) and self.wait() <= 0:
            self._judging = asyncio.create_task(self.judge(patient=patient))
            self._judging.add_done_callback(lambda _: self._wake())
        if self._judging is not None and not patient:
            await asyncio.wait({self._judging})

    def close(self) -> None:
        if self._judging is not None:
            self._judging.cancel()

    async def judge(self, *, patient: bool = True) -> None:
        """Judge the files that are due.

        Files without a lease need a check of all processes, some 100 us each, with rests if ``patient``.
        """
        now, judged, unclear = self._clock(), list[_Suspect](), list[_Suspect]()
        due = [suspect for suspect in self._suspects.values() if now >= suspect.retry_at]
        for suspect in due[:MOST_AT_ONCE]:
            region = suspect.repairs.region
            if not suspect.untouched():
                self.forget(region.path)
            elif abs(time.time() - suspect.mtime_ns / 1e9) < QUIET_SECONDS:
                suspect.retry_at = now + QUIET_SECONDS
            else:
                suspect.in_use = False
                judged.append(suspect)
                with suppress(TooSlow, WorkerFailed, OSError):
                    if await self._reader.ask("", LEASES, unwritten, region.link):
                        continue
                unclear.append(suspect)
        slices = Slices()
        for host_pid, _ in self._procfs.each_entry() if unclear else ():
            if slices.over():
                await asyncio.sleep(_REST_SECONDS if patient else 0)
                slices = Slices()
            await self._check_process(host_pid, unclear)
        for suspect in judged:
            self._conclude(suspect)

    async def _check_process(self, host_pid: int, suspects: list[_Suspect]) -> None:
        """Mark suspects that this process may have open."""
        if host_pid == os.getpid():
            return  # the daemon only reads; the slot writer closes its descriptors after each batch
        cgroup, late = "", False
        files: tuple[set[tuple[Any, ...]], set[str]] | None = None
        try:
            cgroup = self._procfs.cgroup(host_pid)
            if all(suspect.elsewhere(pod_uid_of(cgroup)) for suspect in suspects):
                return
            tenant = self._procfs.container(host_pid).container_id or f"process {host_pid}"
            mapped, names = await self._reader.ask("", tenant, files_of, host_pid)
            files = {tuple(file) for file in mapped}, set(names)
        except ProcessGone:
            return
        except (TooSlow, WorkerFailed):
            late = True
        except (CannotKnow, OSError):
            pass
        for suspect in suspects:
            repairs = suspect.repairs
            if suspect.in_use or suspect.elsewhere(pod_uid_of(cgroup)):
                continue
            if files is not None:
                suspect.in_use = (
                    repairs.shown in files[0] or os.path.basename(repairs.region.path) in files[1]
                )
            else:
                suspect.in_use = late or not cgroup or await self._may_have(host_pid, cgroup, repairs.proof)

    async def _may_have(self, host_pid: int, cgroup: str, proof: Proof) -> bool:
        """Check if an unreadable process may have the file."""
        if proof.mount is None or pod_uid_of(cgroup) or parse_cgroup(cgroup):
            return True
        try:
            return bool(await self._reader.ask("", ALL, mounts_near, host_pid, *proof.mount))
        except (ProcessGone, CannotKnow, WorkerFailed, OSError):
            return True

    def _conclude(self, suspect: _Suspect) -> None:
        """Declare the slots dead if the file is unchanged and unused; else retry later."""
        repairs, untouched = suspect.repairs, suspect.untouched()
        if untouched and suspect.in_use:
            suspect.retry_at = self._clock() + suspect.pause
            suspect.pause = longer(suspect.pause, FIRST_PAUSE, LONGEST_PAUSE)
            return
        self.forget(repairs.region.path)
        if untouched:
            repairs.abandon()
            container, path = repairs.ownership.container, repairs.region.path
            self._journal.record("region_abandoned", container=container, path=path)
