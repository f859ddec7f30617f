"""Shared regions inside containers, where HAMi-core runs without Kubernetes: ``/tmp/cudevshr.cache``.

No directory of the host has them. They are found through the processes that NVML lists: one that holds a file of that
name open for writing gives the path, which is opened below its own root. What is opened counts only if it is the
very file that the process holds and maps, so that a path which leads elsewhere by now is refused. Device and inode
numbers don't prove that (btrfs): the mount and the path below it do.

All of that is a tenant's: names, links, mounts. The walk goes through no file system that is not in the list below,
and is a child's (`resolver.workers.path_walker`), beside the passes: what is below an overlay may not answer for
ever. Processes in a user namespace of their own can make mounts, and are skipped.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections import Counter
from typing import TYPE_CHECKING

from resolver.budget import Slices
from resolver.errors import AccessDenied, ProcessGone, RegionRejected, WorkerFailed
from resolver.hami.discovery import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    FoundRegion,
    Location,
    MappedFile,
    RegionChanges,
    Whose,
)
from resolver.hami.placements import BARE
from resolver.hami.region import SharedRegion, adopt_region
from resolver.linux.mappings import descriptor, mapped_as, maps_file, opened_by_name, place_of
from resolver.linux.procfs import TooLarge
from resolver.linux.safe_open import translate
from resolver.reasons import RegionReason
from resolver.retry import longer
from resolver.workers.supervisor import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from resolver.linux.procfs import ProcessHandle, Procfs

NAME = "cudevshr.cache"
MAX_LOOKS = 16  # processes checked per refresh
MAX_REGIONS = 1024
_POLL_SECONDS = 0.05  # while processes are checked
MAX_PER_CONTAINER = 8
WALK_SECONDS = 2.0  # for one path; a child that is later is killed
FIRST_LATE, LONGEST_LATE = 30.0, 3600.0  # seconds until another path of that container is walked
#: Kernel file systems, none of which asks a tenant's program for an answer.
FILE_SYSTEMS = frozenset(
    {"overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "bcachefs"}
)


class _Process:
    """One that was checked: when it is due again, and the pause after that."""

    __slots__ = ("arrival", "pause", "refused_as", "retry_at")

    def __init__(self, arrival: object) -> None:
        self.arrival = arrival
        self.pause = FIRST_PAUSE
        self.retry_at = 0.0
        self.refused_as = ""  # under which name its region was refused


class _Found:
    """A region, and handles of the processes that it was found through."""

    __slots__ = ("container", "handles", "place", "region")

    def __init__(self, region: SharedRegion, place: MappedFile, container: str) -> None:
        self.region = region
        self.place = place
        self.container = container
        self.handles: list[ProcessHandle] = []

    def close(self) -> None:
        for handle in self.handles:
            handle.close()
        self.region.close()


class MappingFinder:
    """A `resolver.hami.discovery.Discovery`; regions go by ``<container_id>:<path inside>``.

    ``counts`` counts each refusal once, when it is new.
    """

    dirs: Sequence[str] = ()
    watched = True  # there is no directory that anything could be new in: NVML lists new processes

    def __init__(
        self,
        procfs: Procfs,
        host_pids: Callable[[], Iterable[int]],
        arrival: Callable[[int], object],
        in_use: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``host_pids()``: those NVML lists of which nothing else is known. ``arrival`` differs for a PID used again.

        ``in_use``: whether a slot of the region with that name has a living owner.
        """
        self.found: dict[str, _Found] = {}
        self.rejected: dict[str, RegionReason] = {}
        self.missing_dirs: set[str] = set()
        self.counts: Counter[RegionReason] = Counter()
        self.max_regions = MAX_REGIONS
        self._procfs = procfs
        self._host_pids, self._arrival, self._in_use = host_pids, arrival, in_use
        self._clock = clock
        self._processes: dict[int, _Process] = {}
        self._changes = RegionChanges([], [], [])
        self.worker = WorkerProcess(
            "path walker",
            "resolver.workers.path_walker",
            timeout=WALK_SECONDS,
            rights=frozenset({"SYS_PTRACE", "DAC_OVERRIDE"}),
        )
        self._task: asyncio.Task[None] | None = None
        self._late: dict[str, tuple[float, float]] = {}  # until when, and for how many seconds that was

    @property
    def regions(self) -> Mapping[str, SharedRegion]:
        """What is found now, by name."""
        return {name: found.region for name, found in self.found.items()}

    @property
    def workers(self) -> Sequence[WorkerProcess]:
        """The child that walks paths."""
        return (self.worker,)

    def wants(self) -> float:
        """When a check has ended, and when the next process is due."""
        if self._task is not None:
            return 0.0 if self._task.done() else self._clock() + _POLL_SECONDS
        return min((each.retry_at for each in self._processes.values()), default=math.inf)

    def refresh(self, *, full: bool) -> RegionChanges:  # noqa: ARG002
        """Give up regions whose last process has ended, and begin to check processes that are due.

        Never waits: what is found is in the changes of a later refresh. An open file would keep the file system of a
        container that has ended, so nothing is kept without a process.
        """
        changes = self._changes
        wanted = {host_pid: self._arrival(host_pid) for host_pid in self._host_pids()}
        self._processes = {
            host_pid: process
            for host_pid, process in self._processes.items()
            if wanted.get(host_pid) == process.arrival
        }
        refused = {process.refused_as for process in self._processes.values()}
        self.rejected = {name: why for name, why in self.rejected.items() if name in refused}
        for name, found in list(self.found.items()):
            self._forget_ended(found)
            if not found.handles and not self._in_use(name):
                changes.removed.append(found.region)
                self._drop(name)
        # What ended before it was reported need not be reported.
        added = [each for each in changes.added if each.region.fd >= 0]
        for host_pid, arrived in wanted.items():
            if host_pid not in self._processes:
                self._processes[host_pid] = _Process(arrived)
        self._changes = RegionChanges([], [], [])
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            task.result()
        if self._task is None:
            now = self._clock()
            waiting = sorted(
                (each.retry_at, host_pid)
                for host_pid, each in self._processes.items()
                if now >= each.retry_at
            )
            # Who has waited longest first, so that nobody waits for ever.
            due = [host_pid for _, host_pid in waiting[:MAX_LOOKS]]
            if due:
                self._task = asyncio.get_running_loop().create_task(self._look_at(due))
        return changes._replace(added=added)

    async def settle(self) -> bool:
        """Wait for the look that is under way; whether there was one."""
        if self._task is None:
            return False
        await asyncio.wait({self._task})
        return True

    async def _look_at(self, due: list[int]) -> None:
        slices = Slices()
        try:
            for host_pid in due:
                await slices.breathe()
                process = self._processes.get(host_pid)
                if process is not None:
                    await self._look(host_pid, process, self._clock())
        finally:
            self.worker.stop()  # new processes are rare, and it need not wait for them

    def _knows(self, region: SharedRegion) -> _Found | None:
        found = self.found.get(region.path)
        return found if found is not None and found.region is region else None

    def locate(self, region: SharedRegion) -> Location:
        """How the processes that it was found through map it. Raises `RegionRejected`."""
        found = self._knows(region)
        if found is None:
            raise RegionRejected(RegionReason.GONE, "its process ended")
        return Location(found.place, (found.place.device, found.place.inode))

    def reject(self, region: SharedRegion, why: RegionRejected) -> None:
        """Give up a region: closed now, looked for again later."""
        if self._knows(region) is not None:
            self._drop(region.path)
            if why.reason is not RegionReason.GONE:
                self.rejected[region.path] = why.reason
                self.counts[why.reason] += 1

    def close(self) -> None:
        """Close everything; the finder can be used again afterwards."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self.worker.stop()
        self._changes = RegionChanges([], [], [])
        for name in list(self.found):
            self._drop(name)
        self._processes.clear()
        self.rejected.clear()

    # -- one process --------------------------------------------------------------------------------

    async def _look(self, host_pid: int, process: _Process, now: float) -> None:
        process.retry_at = now + process.pause
        process.pause = longer(process.pause, FIRST_PAUSE, LONGEST_PAUSE)
        name = f"process {host_pid}"
        try:
            handle = self._procfs.open_handle(host_pid)
        except (ProcessGone, AccessDenied):
            return
        except OSError as error:  # no descriptors: what was found before must not be lost with it
            self._report(name, translate(error))
            return
        kept = False
        try:
            path = next(
                (each.path for each in opened_by_name(self._procfs, host_pid, NAME) if each.writable), ""
            )
            if path:
                container_id = self._procfs.container(host_pid).container_id
                name = f"{container_id or 'host'}:{path}"
                kept = await self._take(host_pid, handle, name, path, container_id)
                process.refused_as = ""
        except RegionRejected as why:
            process.refused_as = name
            self._report(name, why)
        except (AccessDenied, TooLarge) as error:
            process.refused_as = name
            self._report(name, RegionRejected(RegionReason.ACCESS_DENIED, str(error)))
        except ProcessGone:
            pass
        except OSError as error:
            process.refused_as = name
            self._report(name, translate(error))
        finally:
            if not kept:
                handle.close()

    async def _take(
        self, host_pid: int, handle: ProcessHandle, name: str, path: str, container_id: str
    ) -> bool:
        """Open what the process maps; whether its handle is kept. Raises what `_look` reports."""
        region = adopt_region(await self._open(host_pid, path, container_id), name)
        try:
            place = self._prove(host_pid, region, container_id)
            region.read()
            known = next((each for each in self.found.values() if each.place.file == place.file), None)
            if known is None:
                self._make_room(name, container_id)
        except BaseException:
            region.close()
            raise
        if known is not None:
            region.close()
        else:
            known = self.found[name] = _Found(region, place, container_id)
            # The path has no pod or container name.
            whose = Whose(account=container_id or name, container=container_id, placement=BARE.name)
            self._changes.added.append(FoundRegion(region, whose))
            self.rejected.pop(name, None)
        if any(each.process == handle.process for each in known.handles):
            return False
        known.handles.append(handle)
        return True

    def _prove(self, host_pid: int, region: SharedRegion, container_id: str) -> MappedFile:
        """What was opened, if it is the file that the process holds and maps. Raises `RegionRejected` otherwise."""
        mounts = list(self._procfs.first_mounts(host_pid))
        ours = place_of(descriptor(self._procfs, "self", region.fd), mounts)
        theirs = [
            place_of(each, mounts) for each in opened_by_name(self._procfs, host_pid, NAME) if each.writable
        ]
        if ours is None or not theirs or None in theirs:
            raise RegionRejected(
                RegionReason.UNPROVEN,
                "the mount table of its process does not have the file's mount, so nothing proves which file it maps",
            )
        place = MappedFile(ours, *mapped_as(self._procfs, region.fd), container_id)
        if ours not in theirs or not maps_file(
            self._procfs, host_pid, place.device, place.inode, writable=True
        ):
            raise RegionRejected(
                RegionReason.OTHER_DEVICE, "its path leads to another file than the one that is mapped"
            )
        return place

    def _make_room(self, name: str, container_id: str) -> None:
        in_container = sum(found.container == container_id for found in self.found.values())
        if name in self.found or in_container >= MAX_PER_CONTAINER:
            raise RegionRejected(RegionReason.TOO_MANY_ENTRIES, "its container has other regions already")
        if len(self.found) >= self.max_regions:
            raise RegionRejected(RegionReason.IO_ERROR, "there are not enough descriptors for more regions")

    # -- the walk -----------------------------------------------------------------------------------

    async def _open(self, host_pid: int, path: str, container_id: str) -> int:
        """Have the child open it; returns the descriptor. Raises `RegionRejected`."""
        late, now = container_id or f"process {host_pid}", self._clock()
        until, seconds = self._late.get(late, (0.0, FIRST_LATE / 2))
        if now < until:
            raise RegionRejected(RegionReason.IO_ERROR, "its container's file systems did not answer in time")
        asked = {"host_pid": host_pid, "path": path, "file_systems": sorted(FILE_SYSTEMS)}
        files: list[int] = []
        try:
            answer = json.loads(await self.worker.request(json.dumps(asked).encode(), received=files))
            if answer["reason"]:
                raise RegionRejected(RegionReason(answer["reason"]), str(answer["detail"]))
            return files.pop()
        except WorkerFailed as error:
            if not error.waiting:
                seconds = min(LONGEST_LATE, 2 * seconds)
                self._late = {
                    name: entry for name, entry in self._late.items() if now < entry[0] + LONGEST_LATE
                }
                self._late[late] = self._clock() + seconds, seconds
            raise RegionRejected(RegionReason.IO_ERROR, f"it cannot be opened: {error}") from None
        except (ValueError, TypeError, KeyError, IndexError):
            why = self.worker.malformed("answered something malformed")
            raise RegionRejected(RegionReason.IO_ERROR, str(why)) from None
        finally:
            for fd in files:
                os.close(fd)

    # -- letting go, telling ------------------------------------------------------------------------

    def _forget_ended(self, found: _Found) -> None:
        for handle in found.handles:
            if not handle.alive():
                handle.close()
        found.handles = [handle for handle in found.handles if handle.fd >= 0]

    def _drop(self, name: str) -> None:
        self.found.pop(name).close()

    def _report(self, name: str, why: RegionRejected) -> None:
        if self.rejected.get(name) is not why.reason:
            self.rejected[name] = why.reason
            self.counts[why.reason] += 1
            self._changes.rejected.append((name, why))
