"""What is read of processes in the search for owners, and remembered for as long as they live.

A process never changes its PID namespace, so that is read once. Its mount table is the most expensive thing to read and
can change: a process can be seen before its runtime has made the mounts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from resolver.errors import AccessDenied, ProcessGone
from resolver.hami.discovery import SharedDirectory
from resolver.hami.placements import may_be_mounted
from resolver.linux.procfs import HOST_PIDNS, TooLarge, parse_mountinfo
from resolver.retry import longer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from resolver.linux.procfs import Procfs
    from resolver.pids.pidmap import PidMap

_T = TypeVar("_T", bound=tuple[Any, ...])

#: Seconds until what a process lacked is read again, doubled each time.
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0
_MAX_TREES = 64


def container_directories(mount_table: bytes) -> frozenset[SharedDirectory]:
    """What may be directories of containers, or of claims, in a mount table, by the path inside."""
    found = []
    for line in mount_table.split(b"\n"):
        fields = line.split(b" ", 4)
        if len(fields) == 5 and may_be_mounted(fields[3]):
            found += [SharedDirectory(mount.device, mount.root) for mount in parse_mountinfo(line)]
    return frozenset(found)


def shared_trees(mount_table: bytes) -> Iterator[SharedDirectory]:
    """Directories of directories, where a container that HAMi-core is preloaded into has them as a whole.

    Both mounts are made by the runtime before anything of the container's runs. A monitor is not preloaded.
    """
    if b" /etc/ld.so.preload " in mount_table:
        lines = (line for line in mount_table.split(b"\n") if b"/vgpu" in line)
        for mount in parse_mountinfo(b"\n".join(lines)):
            if mount.root.endswith(("/vgpu", "/containers")) and "/vgpu" in mount.mount_point:
                yield SharedDirectory(mount.device, mount.root)


class _Mounted(NamedTuple):
    """What a process's mount table had, and until when that is believed of what it had not."""

    arrival: tuple[int, int]
    epoch: int
    until: float
    pause: float
    found: frozenset[SharedDirectory]
    too_large: str


class ProcessFacts:
    """Facts about the processes of a `PidMap`."""

    def __init__(self, procfs: Procfs, pidmap: PidMap, clock: Callable[[], float]) -> None:
        self._procfs = procfs
        self._pidmap = pidmap
        self._clock = clock
        self._mounted: dict[int, _Mounted] = {}
        self._pidns: dict[int, tuple[tuple[int, int], int]] = {}
        self._trees: set[SharedDirectory] = (
            set()
        )  # those of `shared_trees` that any container was ever seen with
        self._most_known = 0  # twice what was left when those that are gone were last sorted out

    def pidns(self, host_pid: int) -> int:
        """Inode of the PID namespace that the process is in, which never changes."""
        arrival = self._pidmap.arrival(host_pid)
        known = self._pidns.get(host_pid)
        if known and known[0] == arrival:
            return known[1]
        try:
            pidns = self._procfs.pidns(host_pid)
        except AccessDenied:  # as of the host's first process under some security modules
            if len(self._procfs.ns_pids(host_pid)) != 1:
                raise
            pidns = HOST_PIDNS
        self._pidns = self.pruned(self._pidns)
        self._pidns[host_pid] = arrival, pidns
        return pidns

    def container_id(self, host_pid: int) -> str | None:
        """The id in the process's cgroup; empty without one, None if it could not be read."""
        try:
            return self._procfs.container(host_pid).container_id
        except (AccessDenied, ProcessGone):
            return None

    def directories(self, host_pid: int, wanted: SharedDirectory | None = None) -> frozenset[SharedDirectory]:
        """The container directories in the process's mount table. Raises `TooLarge`.

        A process can be seen before its runtime has made the mounts, so an answer without the wanted one counts
        until the next refresh of the map, and ever longer after that.
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
                found = self.read_directories(host_pid)
            except TooLarge as error:
                too_large = str(error)  # remembered, too: it is the most expensive answer of all
            self._mounted = self.pruned(self._mounted)
            known = self._mounted[host_pid] = _Mounted(
                arrival=arrival, epoch=epoch, until=now + pause, pause=pause, found=found, too_large=too_large
            )
        if known.too_large:
            raise TooLarge(known.too_large)
        return known.found

    def read_directories(self, host_pid: int) -> frozenset[SharedDirectory]:
        """The same as of now, and not remembered."""
        table = self._procfs.mount_table(host_pid)
        if len(self._trees) < _MAX_TREES:
            self._trees.update(shared_trees(table))
        return container_directories(table)

    def in_shared_tree(self, place: SharedDirectory) -> bool:
        """Whether containers were seen that have a directory above this one, and so could mount it themselves."""
        return any(
            tree.device == place.device and place.root.startswith(f"{tree.root}/") for tree in self._trees
        )

    def pruned(self, known: dict[int, _T]) -> dict[int, _T]:
        """Without the processes that are gone, once there are too many of them.

        Only when there are twice as many as were left the last time: the map may not have counted those yet that have
        just come, and to go through all of them for each one more holds everybody up.
        """
        if len(known) <= max(2 * len(self._pidmap.source) + 64, self._most_known):
            return known
        left = {pid: entry for pid, entry in known.items() if entry[0] == self._pidmap.arrival(pid)}
        self._most_known = 2 * len(left)
        return left
