"""Shared regions inside containers, where HAMi-core runs without Kubernetes: ``/tmp/cudevshr.cache``.

No directory of the host has them. They are found through the processes that NVML lists: one that maps a file of that
name, writable and shared, tells the path, which is opened below its own root. What is opened counts only if it is the
very file that the process maps, so that a path which leads elsewhere by now leads nowhere.

All of that is a tenant's: names, links, mounts. The walk holds each component without opening it (O_PATH), follows no
link, and looks up nothing on a file system that is not in the list below, or that the process's mount table does not
have: the server of a FUSE mount could keep this daemon waiting for ever. Processes in a user namespace of their own
can make mounts, and are left alone.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import TYPE_CHECKING

from resolver.cgroup import parse_cgroup
from resolver.containers import MappedFile
from resolver.errors import AccessDenied, ProcessGone, RegionRejected
from resolver.hami.finder import FIRST_PAUSE, LONGEST_PAUSE, Changes
from resolver.hami.openat import mount_id, translate
from resolver.hami.region import SharedRegion, open_region
from resolver.procfs import TooLarge
from resolver.types import RegionReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from resolver.procfs import ProcessHandle, Procfs

NAME = "cudevshr.cache"
MAX_LOOKS = 16  # processes looked at per refresh
MAX_REGIONS = 1024
MAX_PER_CONTAINER = 8
MAX_DEPTH = 16  # components of a path
#: Kernel file systems, none of which asks a tenant's program for an answer.
FILE_SYSTEMS = frozenset(
    {"overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "bcachefs"}
)

_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC


class _Process:
    """One that was looked at: when again, and how long after that."""

    __slots__ = ("arrival", "pause", "retry_at", "told")

    def __init__(self, arrival: object) -> None:
        self.arrival = arrival
        self.pause = FIRST_PAUSE
        self.retry_at = 0.0
        self.told = ""  # under which name its region was refused


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


class MappedFinder:
    """Regions by name, ``<container_id>:<path inside>``; ``rejected`` and ``counts`` as those of `RegionFinder`."""

    def __init__(self, procfs: Procfs, clock: Callable[[], float] = time.monotonic) -> None:
        self.found: dict[str, _Found] = {}
        self.rejected: dict[str, RegionReason] = {}
        self.counts: Counter[RegionReason] = Counter()
        self.max_regions = MAX_REGIONS
        self._procfs = procfs
        self._clock = clock
        self._processes: dict[int, _Process] = {}
        self._changes = Changes([], [], [])
        self._own_userns = 0

    def refresh(
        self,
        host_pids: Iterable[int],
        arrival: Callable[[int], object],
        in_use: Callable[[str], bool],
    ) -> Changes:
        """Look at processes that are due, and give up regions whose last process has ended.

        ``arrival`` tells a PID that is used again. ``in_use``: whether a slot of that region has a living owner. An
        open file would keep the file system of a container that has ended, so nothing is kept without a process.
        """
        changes = self._changes = Changes([], [], [])
        wanted = {host_pid: arrival(host_pid) for host_pid in host_pids}
        self._processes = {
            host_pid: process
            for host_pid, process in self._processes.items()
            if wanted.get(host_pid) == process.arrival
        }
        told = {process.told for process in self._processes.values()}
        self.rejected = {name: why for name, why in self.rejected.items() if name in told}
        for name, found in list(self.found.items()):
            self._forget_ended(found)
            if not found.handles and not in_use(name):
                changes.removed.append(found.region)
                self._drop(name)
        for host_pid, arrived in wanted.items():
            if host_pid not in self._processes:
                self._processes[host_pid] = _Process(arrived)
        now = self._clock()
        due = [
            (each.retry_at, host_pid) for host_pid, each in self._processes.items() if now >= each.retry_at
        ]
        for _, host_pid in sorted(due)[
            :MAX_LOOKS
        ]:  # who has waited longest first, so that nobody waits for ever
            self._look(host_pid, self._processes[host_pid], now)
        return changes

    def place(self, region: SharedRegion) -> MappedFile | None:
        """How the processes map it; None if it is none of these."""
        found = self.found.get(region.path)
        return found.place if found is not None and found.region is region else None

    def reject(self, region: SharedRegion, why: RegionRejected) -> None:
        """Give up a region whose `SharedRegion.read` refused it: closed now, looked for again later."""
        if self.place(region) is not None:
            self._drop(region.path)
            if why.reason is not RegionReason.GONE:
                self.rejected[region.path] = why.reason
                self.counts[why.reason] += 1

    def close(self) -> None:
        """Close everything; the finder can be used again afterwards."""
        for name in list(self.found):
            self._drop(name)
        self._processes.clear()
        self.rejected.clear()

    # -- one process --------------------------------------------------------------------------------

    def _look(self, host_pid: int, process: _Process, now: float) -> None:
        process.retry_at = now + process.pause
        process.pause = min(2 * process.pause, LONGEST_PAUSE)
        name = f"process {host_pid}"
        try:
            handle = self._procfs.open_handle(host_pid)
        except (ProcessGone, AccessDenied):
            return
        kept = False
        try:
            path = self._procfs.mapped_path(host_pid, NAME)
            if path:
                container = parse_cgroup(self._procfs.cgroup(host_pid))
                container_id = container.container_id if container else ""
                name = f"{container_id or 'host'}:{path}"
                kept = self._take(host_pid, handle, name, path, container_id)
                process.told = ""
        except RegionRejected as why:
            process.told = name
            self._report(name, why)
        except (AccessDenied, TooLarge) as error:
            process.told = name
            self._report(name, RegionRejected(RegionReason.ACCESS_DENIED, str(error)))
        except ProcessGone:
            pass
        except OSError as error:
            process.told = name
            self._report(name, translate(error))
        finally:
            if not kept:
                handle.close()

    def _take(self, host_pid: int, handle: ProcessHandle, name: str, path: str, container_id: str) -> bool:
        """Open what the process maps; whether its handle is kept. Raises what `_look` reports."""
        region = self._open(host_pid, name, path)
        try:
            place = MappedFile(*self._procfs.mapped_as(region.fd))
            if not self._procfs.maps_inode(host_pid, *place, writable=True):
                raise RegionRejected(
                    RegionReason.OTHER_DEVICE, "its path leads to another file than the one that is mapped"
                )
            region.read()
            known = next((each for each in self.found.values() if each.place == place), None)
            if known is None:
                self._make_room(name, container_id)
        except BaseException:
            region.close()
            raise
        if known is not None:
            region.close()
        else:
            region.dir_name = container_id
            region.pod_uid = region.container_name = ""  # of neither does the path tell anything
            known = self.found[name] = _Found(region, place, container_id)
            self._changes.added.append(region)
            self.rejected.pop(name, None)
        if any(each.process == handle.process for each in known.handles):
            return False
        known.handles.append(handle)
        return True

    def _make_room(self, name: str, container_id: str) -> None:
        in_container = sum(found.container == container_id for found in self.found.values())
        if name in self.found or in_container >= MAX_PER_CONTAINER:
            raise RegionRejected(RegionReason.TOO_MANY_ENTRIES, "its container has other regions already")
        if len(self.found) >= self.max_regions:
            raise RegionRejected(RegionReason.IO_ERROR, "there are not enough descriptors for more regions")

    # -- the walk -----------------------------------------------------------------------------------

    def _open(self, host_pid: int, name: str, path: str) -> SharedRegion:
        self._own_userns = self._own_userns or self._procfs.userns("self")
        if self._procfs.userns(host_pid) != self._own_userns:
            raise RegionRejected(
                RegionReason.ACCESS_DENIED,
                "its process is in a user namespace of its own, where tenants can make mounts: it is left alone",
            )
        *directories, file_name = path.strip("/").split("/")
        if len(directories) > MAX_DEPTH:
            raise RegionRejected(RegionReason.TOO_MANY_ENTRIES, "its path is too long")
        mounts = {mount.mount_id: mount.fs_type for mount in self._procfs.mounts(host_pid)}
        try:
            fd = os.open(f"{self._procfs.root}/{host_pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                _check_mount(fd, mounts)
                for component in directories:
                    below = os.open(component, _STEP, dir_fd=fd)
                    os.close(fd)
                    fd = below
                    _check_mount(fd, mounts)
                return open_region(fd, file_name, name)
            finally:
                os.close(fd)
        except OSError as error:
            raise translate(error) from None

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


def _check_mount(fd: int, mounts: dict[int, str]) -> None:
    """Raise `RegionRejected` unless the held directory is on a mount of the process's, of a kernel file system."""
    kind = mounts.get(mount_id(fd))
    if kind not in FILE_SYSTEMS:
        raise RegionRejected(
            RegionReason.OTHER_DEVICE,
            f"its path leads through {f'a file system of type {kind}' if kind else 'a foreign mount'}",
        )
