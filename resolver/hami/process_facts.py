"""Facts of processes for the search for owners."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resolver.base.errors import AccessDenied, ProcessGone
from resolver.hami.discovery import SharedDirectory
from resolver.hami.process_reads import directories_and_trees
from resolver.linux.procfs import HOST_PIDNS, TooLarge
from resolver.workers.lane import ALL

if TYPE_CHECKING:
    from resolver.linux.procfs import Procfs
    from resolver.pids.pidmap import PidMap
    from resolver.workers.lanes import TenantReader

_MAX_TREES = 64


class ProcessFacts:
    """Facts about the processes of a `PidMap`."""

    def __init__(self, procfs: Procfs, pidmap: PidMap, reader: TenantReader) -> None:
        self._procfs, self._pidmap, self._reader = procfs, pidmap, reader
        self._refresh = -1  # of the map
        self._mounted: dict[
            int, frozenset[SharedDirectory] | TooLarge
        ] = {}  # as read since then, by host PID
        self._trees = set[SharedDirectory]()  # those of `shared_trees` that any container was ever seen with

    def pidns(self, host_pid: int) -> int:
        """Return the inode of the process's PID namespace, which never changes."""
        try:
            return self._procfs.pidns(host_pid)
        except AccessDenied:  # as of the host's first process under some security modules
            if len(self._procfs.ns_pids(host_pid)) != 1:
                raise
            return HOST_PIDNS

    def container_id(self, host_pid: int) -> str | None:
        """Return the id in the process's cgroup; empty without one, None if unreadable."""
        try:
            return self._procfs.container(host_pid).container_id
        except (AccessDenied, ProcessGone):
            return None

    def tenant(self, host_pid: int) -> str:
        """Return the container that can delay a read of this process."""
        return self.container_id(host_pid) or f"process {host_pid}"

    async def directories(self, host_pid: int, payer: str = "") -> frozenset[SharedDirectory]:
        """Return the container directories in its mount table, read once with each refresh of the map.

        Raises `TooLarge` and `TooSlow`.
        """
        if self._refresh != self._pidmap.refreshes:
            self._refresh, self._mounted = self._pidmap.refreshes, {}
        mounted = self._mounted
        if host_pid not in mounted:
            try:
                mounted[host_pid] = await self.read_directories(host_pid, payer)
            except TooLarge as error:
                mounted[host_pid] = error  # the most expensive answer of all
        found = mounted[host_pid]
        if isinstance(found, TooLarge):
            raise found
        return found

    async def read_directories(self, host_pid: int, payer: str = "") -> frozenset[SharedDirectory]:
        """Read them now, without remembering."""
        directories, trees = await self._reader.ask(payer, ALL, directories_and_trees, host_pid)
        if len(self._trees) < _MAX_TREES:
            self._trees.update(SharedDirectory(*tree) for tree in trees)
        return frozenset(SharedDirectory(*directory) for directory in directories)

    def in_shared_tree(self, proof: SharedDirectory) -> bool:
        """Check if any container was seen with a tree above this directory, which it could mount itself."""
        return any(
            tree.device == proof.device and proof.root.startswith(f"{tree.root}/") for tree in self._trees
        )
