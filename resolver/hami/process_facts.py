"""Facts of processes for the search for owners, remembered for as long as they live.

The mount table is the most expensive one and can change: the runtime makes the mounts after the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from resolver.base.errors import AccessDenied, ProcessGone
from resolver.base.retry import longer
from resolver.hami.discovery import SharedDirectory
from resolver.hami.process_reads import directories_and_trees
from resolver.linux.procfs import HOST_PIDNS, TooLarge
from resolver.workers.lane import ALL

if TYPE_CHECKING:
    from collections.abc import Callable

    from resolver.linux.procfs import Procfs
    from resolver.pids.pidmap import PidMap
    from resolver.workers.lanes import TenantReader

#: Seconds until what a process lacked is read again, doubled each time.
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0
_MAX_TREES = 64


class _Mounted(NamedTuple):
    """Entries of a process's mount table, and until when absences are believed."""

    arrival: tuple[int, int]
    epoch: int
    until: float
    pause: float
    found: frozenset[SharedDirectory]
    too_large: str


class ProcessFacts:
    """Facts about the processes of a `PidMap`."""

    def __init__(
        self, procfs: Procfs, pidmap: PidMap, clock: Callable[[], float], reader: TenantReader
    ) -> None:
        self._procfs, self._reader = procfs, reader
        self._pidmap = pidmap
        self._clock = clock
        self._mounted: dict[int, _Mounted] = {}
        self._trees = set[SharedDirectory]()  # those of `shared_trees` that any container was ever seen with
        self._most_known = 0  # twice what was left when those that are gone were last sorted out

    def pidns(self, host_pid: int) -> int:
        """Return the inode of the process's PID namespace, which never changes."""
        try:
            return self._procfs.pidns(host_pid)
        except AccessDenied:  # as of the host's first process under some security modules
            if len(self._procfs.ns_pids(host_pid)) != 1:
                raise
            return HOST_PIDNS

    def container_id(self, host_pid: int) -> str | None:
        """Return the id in the process's cgroup; empty without one, None if it could not be read."""
        try:
            return self._procfs.container(host_pid).container_id
        except (AccessDenied, ProcessGone):
            return None

    def tenant(self, host_pid: int) -> str:
        """Return the container that can delay a read of this process."""
        return self.container_id(host_pid) or f"process {host_pid}"

    async def directories(
        self, host_pid: int, wanted: SharedDirectory | None = None, payer: str = ""
    ) -> frozenset[SharedDirectory]:
        """Return the container directories in the process's mount table. Raises `TooLarge` and `TooSlow`.

        An answer without the wanted one is valid until the next refresh of the map, and ever longer after that.
        """
        arrival, epoch, now = self._pidmap.arrival(host_pid), self._pidmap.refreshes, self._clock()
        known = self._mounted.get(host_pid)
        if known and known.arrival != arrival:
            known = None
        if known is None or (wanted not in known.found and known.epoch != epoch and now >= known.until):
            pause = longer(known.pause, FIRST_PAUSE, LONGEST_PAUSE) if known else 0.0
            found: frozenset[SharedDirectory] = frozenset()
            too_large = ""
            try:
                found = await self.read_directories(host_pid, payer)
            except TooLarge as error:
                too_large = str(error)  # remembered, too: it is the most expensive answer of all
            self._prune()
            known = self._mounted[host_pid] = _Mounted(
                arrival=arrival, epoch=epoch, until=now + pause, pause=pause, found=found, too_large=too_large
            )
        if known.too_large:
            raise TooLarge(known.too_large)
        return known.found

    async def read_directories(self, host_pid: int, payer: str = "") -> frozenset[SharedDirectory]:
        """Read them now, without remembering."""
        directories, trees = await self._reader.ask(payer, ALL, directories_and_trees, host_pid)
        if len(self._trees) < _MAX_TREES:
            self._trees.update(SharedDirectory(*tree) for tree in trees)
        return frozenset(SharedDirectory(*directory) for directory in directories)

    def in_shared_tree(self, proof: SharedDirectory) -> bool:
        """Check if containers were seen that have a directory above this one, and so could mount it themselves."""
        return any(
            tree.device == proof.device and proof.root.startswith(f"{tree.root}/") for tree in self._trees
        )

    def _prune(self) -> None:
        """Remove vanished processes, once there are too many of them.

        Only at twice as many as the last time: the map may not have counted the newest yet.
        """
        if len(self._mounted) > max(2 * len(self._pidmap.source) + 64, self._most_known):
            arrival = self._pidmap.arrival
            self._mounted = {pid: each for pid, each in self._mounted.items() if each.arrival == arrival(pid)}
            self._most_known = 2 * len(self._mounted)
