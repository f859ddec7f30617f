"""Which process a slot belongs to: right PID, right container, maps the very file, held so it cannot change.

The container is told by the process's own mount table: a HAMi container has its directory
``<hook>/containers/<podUID>_<containerName>`` bind-mounted. Superblock and path inside it are compared
exactly, so a tenant that makes mounts of its own cannot pass for another container.

A region inside a container has no such directory. There the processes that map it, writable and for all to see, are
all that counts: the kernel lets nobody do that who could not write to the file himself.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from resolver.cgroup import parse_cgroup
from resolver.errors import AccessDenied, ProcessGone, ResolverError
from resolver.procfs import ProcessHandle, Procfs, TooLarge
from resolver.types import UnresolvedReason

if TYPE_CHECKING:
    from resolver.pidmap import PidMap


class SharedDirectory(NamedTuple):
    """A container's directory as the kernel names it: superblock (``major:minor``) and path inside it."""

    device: str
    root: str


class MappedFile(NamedTuple):
    """A file without a directory on the host, as it shows in the maps of the processes that share it."""

    device: str
    inode: int


def shared_directory(procfs: Procfs, directory_fd: int) -> SharedDirectory:
    """How the open directory would show in the mount table of a container that has it bind-mounted.

    The superblock comes from our own mount table, not from ``stat``: on btrfs the two differ. Raises
    ResolverError if the directory is not on any mount that can be seen from here.
    """
    path = os.readlink(f"{procfs.root}/self/fd/{directory_fd}")
    with open(f"{procfs.root}/self/fdinfo/{directory_fd}", encoding="ascii") as info:
        mount_id = next((int(line.split()[1]) for line in info if line.startswith("mnt_id:")), None)
    for mount in procfs.mounts("self"):
        if mount.mount_id == mount_id:
            inside = path.removeprefix(mount.mount_point.rstrip("/")).strip("/")
            return SharedDirectory(mount.device, os.path.join(mount.root, inside) if inside else mount.root)
    raise ResolverError(
        f"{path} is on no mount that is visible from here, so containers cannot be told by it"
    )


class Containers:
    """Finds the owner of a slot, verified.

    Mount tables are remembered per process, so that a node with hundreds of containers, each with a slot of PID
    1, costs one read per process and not one per pair. What is remembered only narrows the choice.
    """

    def __init__(self, procfs: Procfs, pidmap: PidMap) -> None:
        self._procfs = procfs
        self._pidmap = pidmap
        #: host PID -> its arrival, the refresh it was read in, its HAMi directories with their mount points, or why not
        self._mounted: dict[int, tuple[tuple[int, int], int, dict[SharedDirectory, str], str]] = {}

    def owner(
        self, place: SharedDirectory | MappedFile, inode: int, ns_pid: int
    ) -> ProcessHandle | UnresolvedReason:
        """The process that knows itself as ``ns_pid``, has ``place`` mounted and maps its file ``inode``.

        Exactly one process must fit. The caller closes the handle. Everything is checked after the process was
        taken hold of, so a PID that is used again in between gives NO_SUCH_PROCESS, never another process.
        """
        fitting: list[ProcessHandle] = []
        hidden: list[int] = []  # could not be looked at, so each may be a second one that fits
        seen: set[UnresolvedReason] = set()
        for host_pid in self._pidmap.candidates(ns_pid):
            try:
                if self._may_fit(host_pid, place):
                    fitting.append(self._hold(host_pid, place, inode, ns_pid))
            except _Unfit as unfit:
                seen.add(unfit.reason)
            except (AccessDenied, TooLarge) as error:
                seen.add(_REASONS[type(error)])
                hidden.append(host_pid)
            except ProcessGone:
                continue  # also a zombie that nobody reaps: it owns nothing any more
            except OSError:  # no descriptors left: none must be lost
                for handle in fitting:
                    handle.close()
                raise
        if len(fitting) == 1 and not self._any_beside(fitting[0].process.host_pid, hidden):
            return fitting[0]
        for handle in fitting:
            handle.close()
        if len(fitting) > 1:
            return UnresolvedReason.AMBIGUOUS
        if self._pidmap.incomplete():
            seen.add(UnresolvedReason.ACCESS_DENIED)
        return next((reason for reason in _WORST_FIRST if reason in seen), UnresolvedReason.NO_SUCH_PROCESS)

    def _any_beside(self, host_pid: int, others: list[int]) -> bool:
        """Whether any of the others may be in that process's container, as far as their cgroups tell.

        A tenant that makes itself unreadable (a mount table of many MiB) hides nobody's owner but its own.
        """
        if not others:
            return False
        try:
            ids = [parse_cgroup(self._procfs.cgroup(each)) for each in (host_pid, *others)]
        except (AccessDenied, ProcessGone):
            return True
        own = ids[0]
        return own is None or any(it is None or it.container_id == own.container_id for it in ids[1:])

    def _may_fit(self, host_pid: int, place: SharedDirectory | MappedFile) -> bool:
        if isinstance(place, MappedFile):
            return self._procfs.maps_inode(host_pid, *place, writable=True)
        return place in self._directories(host_pid, place)

    def visible(self, place: SharedDirectory | MappedFile) -> bool:
        """Whether the container runs and its processes are processes of this kernel.

        Told by a PID 1 that has the directory mounted at HAMi's place. Only then does the absence of a process
        mean that it ended: the processes of a Kata guest are never seen here, and their slots are true.
        A mapped file was found by a process of this kernel.
        """
        if isinstance(place, MappedFile):
            return True
        for host_pid in self._pidmap.candidates(1):
            try:
                mount_point = self._directories(host_pid, place).get(place, "")
            except (AccessDenied, TooLarge, ProcessGone):
                continue
            if mount_point.rsplit("/", 1)[-1] == "vgpu":
                return True
        return False

    def _directories(self, host_pid: int, wanted: SharedDirectory) -> dict[SharedDirectory, str]:
        """The HAMi directories in the process's mount table, each with its mount point.

        A process can be seen before its runtime has made the mounts, so an answer without the wanted one counts
        only until the next refresh of the map.
        """
        arrival, epoch = self._pidmap.arrival(host_pid), self._pidmap.refreshes
        known = self._mounted.get(host_pid)
        if known and known[0] == arrival and (known[1] == epoch or wanted in known[2]):
            if known[3]:
                raise TooLarge(known[3])
            return known[2]
        found: dict[SharedDirectory, str] = {}
        too_large = ""
        try:
            for mount in self._procfs.mounts(host_pid):
                if "_" in mount.root.rsplit("/", 1)[-1]:
                    found[SharedDirectory(mount.device, mount.root)] = mount.mount_point
        except TooLarge as error:
            too_large = str(error)  # remembered, too: it is the dearest answer of all
        if len(self._mounted) > 2 * len(self._pidmap) + 64:
            self._mounted = {
                p: entry for p, entry in self._mounted.items() if entry[0] == self._pidmap.arrival(p)
            }
        self._mounted[host_pid] = (arrival, epoch, found, too_large)
        if too_large:
            raise TooLarge(too_large)
        return found

    def _hold(
        self, host_pid: int, place: SharedDirectory | MappedFile, inode: int, ns_pid: int
    ) -> ProcessHandle:
        """Take hold of the process, then check everything again; `_Unfit` if it is not the owner after all."""
        procfs = self._procfs
        handle = procfs.open_handle(host_pid)
        try:
            if handle.process.ns_pids[-1:] != (ns_pid,):
                raise ProcessGone(f"{host_pid} is another process now")
            if isinstance(place, MappedFile):
                mapped = procfs.maps_inode(host_pid, *place, writable=True)
            elif not procfs.has_mount(host_pid, place.device, place.root):
                raise ProcessGone(f"{host_pid} is another process now")
            else:
                mapped = procfs.maps_inode(host_pid, place.device, inode)
            if not mapped:
                raise _Unfit(UnresolvedReason.NOT_MAPPED)
            if not handle.alive():
                raise ProcessGone(f"{host_pid} ended while it was looked at")
        except BaseException:
            handle.close()
            raise
        return handle


class _Unfit(Exception):
    def __init__(self, reason: UnresolvedReason) -> None:
        super().__init__(reason)
        self.reason = reason


_REASONS = {
    AccessDenied: UnresolvedReason.ACCESS_DENIED,
    TooLarge: UnresolvedReason.TOO_LARGE,
}
_WORST_FIRST = (
    UnresolvedReason.ACCESS_DENIED,
    UnresolvedReason.TOO_LARGE,
    UnresolvedReason.NOT_MAPPED,
)
