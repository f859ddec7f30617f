"""Check of one process as a slot's owner, by container, mappings and open files.

Everything is rechecked while the process is held, so a reused PID never counts.
"""

from collections.abc import Awaitable, Callable, Collection

from resolver.base.errors import AccessDenied, ProcessGone, TooSlow, WorkerFailed
from resolver.base.reasons import UnresolvedReason
from resolver.containers.known_namespaces import KnownNamespaces
from resolver.hami.discovery import MappedFile, SharedDirectory
from resolver.hami.process_reads import (
    describe_written,
    directories_and_trees,
    has_mount,
    written_by_name,
)
from resolver.linux.mappings import Shown, SuperblockPath, maps_file
from resolver.linux.procfs import HOST_PIDNS, ProcessHandle, Procfs, TooLarge
from resolver.pids.pidmap import PidMap
from resolver.workers.lane import ALL
from resolver.workers.lanes import TenantReader

_MOST_OTHERS = 64
#: Proofs that lead to the owner through the containers' PID namespaces.
Searched = SharedDirectory | MappedFile
#: Awaited between two processes of a search, so that other searches can go on.
Pause = Callable[[], Awaitable[None]]


class Search:
    """Search for a slot's process: the questions, and the processes asked so far.

    ``shown`` is the file as in ``maps``; ``payer`` is charged. ``fitting`` has open handles of processes that fit,
    ``hidden`` unreadable processes that may fit. A search that was ``cut`` proves nothing.
    """

    def __init__(self, proof: Searched, ns_pid: int, shown: Shown, payer: str, pause: Pause) -> None:
        self.proof, self.ns_pid, self.shown, self.payer, self.pause = proof, ns_pid, shown, payer, pause
        self.asked, self.hidden = list[int](), list[int]()
        self.fitting: list[ProcessHandle] = []
        self.seen: set[UnresolvedReason] = set()
        self.cut = False

    def close(self) -> None:
        for handle in self.fitting:
            handle.close()


class Unfit(Exception):
    """A process is not, or not provably, the owner."""

    def __init__(self, reason: UnresolvedReason) -> None:
        super().__init__(reason)
        self.reason = reason


#: Errors that make a process unreadable; it may still be the owner.
UNREADABLE = AccessDenied, TooLarge, TooSlow, WorkerFailed


def unreadable(error: Exception) -> UnresolvedReason:
    """Translate one of `UNREADABLE`."""
    if isinstance(error, AccessDenied):
        return UnresolvedReason.ACCESS_DENIED
    return UnresolvedReason.TOO_LARGE if isinstance(error, TooLarge) else UnresolvedReason.TOO_SLOW


def worst(reasons: Collection[UnresolvedReason]) -> UnresolvedReason:
    """Return the worst of the reasons; without any, NO_SUCH_PROCESS."""
    return next((reason for reason in _WORST_FIRST if reason in reasons), UnresolvedReason.NO_SUCH_PROCESS)


#: Reasons with which a process may still be the owner.
MAY_FIT = frozenset(
    {
        UnresolvedReason.UNPROVEN,
        UnresolvedReason.TOO_LARGE,
        UnresolvedReason.TOO_SLOW,
        UnresolvedReason.ACCESS_DENIED,
    }
)
_WORST_FIRST = (
    UnresolvedReason.ACCESS_DENIED,
    UnresolvedReason.TOO_SLOW,
    UnresolvedReason.TOO_LARGE,
    UnresolvedReason.OTHER_POD,
    UnresolvedReason.AMBIGUOUS,
    UnresolvedReason.OTHER_CONTAINER,
    UnresolvedReason.UNPROVEN,
    UnresolvedReason.NOT_MAPPED,
)


class OwnerCheck:
    """Checks and facts of processes in a `PidMap`."""

    def __init__(self, procfs: Procfs, pidmap: PidMap, index: KnownNamespaces, reader: TenantReader) -> None:
        self._procfs, self._pidmap, self._index, self._reader = procfs, pidmap, index, reader
        self._refresh = -1  # number of the map's last seen refresh
        #: Directories by host PID, as read since that refresh.
        self._mounted: dict[int, frozenset[SharedDirectory] | TooLarge] = {}
        #: Trees (`shared_trees`) that any container had: all those above a region's directory, which no tenant can
        #: make, and the latest of the others.
        self._trees, self._others = set[SharedDirectory](), dict[SharedDirectory, None]()
        self._above = set[SharedDirectory]()  # every directory above a region's

    async def examine(
        self, host_pid: int, search: Search, namespaces: frozenset[int]
    ) -> ProcessHandle | None:
        """Return a process's handle if it fits, None if it is unrelated to the region; else raise `Unfit`."""
        try:
            if not await self.may_fit(host_pid, search, namespaces):
                return None
            return await self._hold(host_pid, search, namespaces)
        except UNREADABLE as error:
            raise Unfit(unreadable(error)) from None

    async def may_fit(self, host_pid: int, search: Search, namespaces: frozenset[int]) -> bool:
        """Check if a process may be related to the region."""
        proof, payer = search.proof, search.payer
        if proof.mount is None:
            return await self._maps(host_pid, search)
        # In the host's namespace, a process has this number by chance, unless the container uses that namespace.
        if namespaces and (HOST_PIDNS in namespaces or self.pidns(host_pid) != HOST_PIDNS):
            return True
        if self._procfs.has_host_mounts(host_pid):
            return False  # no need for the mount table, which any tenant could delay
        return proof in await self.directories(host_pid, payer)

    async def _maps(self, host_pid: int, search: Search) -> bool:
        tenant, shown = self.tenant(host_pid), search.shown
        answer: bool = await self._reader.ask(search.payer, tenant, maps_file, host_pid, *shown)
        return answer

    async def _hold(self, host_pid: int, search: Search, namespaces: frozenset[int]) -> ProcessHandle:
        """Hold the process and recheck everything. Raises `Unfit` and ProcessGone."""
        procfs, proof, payer = self._procfs, search.proof, search.payer
        with procfs.verify(host_pid, keep=True) as handle:
            if handle.process.ns_pids[-1:] != (search.ns_pid,):
                raise ProcessGone(f"{host_pid} is another process now")
            if namespaces and len(handle.process.ns_pids) > 1 and procfs.pidns(host_pid) not in namespaces:
                raise ProcessGone(f"{host_pid} is another process now")
            if isinstance(proof, MappedFile):
                await self._check_file(host_pid, proof, payer)
            else:
                await self._check_container(host_pid, proof, namespaces, payer)
            if not await self._maps(host_pid, search):
                raise Unfit(UnresolvedReason.NOT_MAPPED)
        return handle

    async def _check_container(
        self, host_pid: int, proof: SharedDirectory, namespaces: frozenset[int], payer: str
    ) -> None:
        """Raise `Unfit` unless a process's cgroup has an id of the container, or the process has the mount.

        Reading the cgroup costs a tenth, and a chroot or private mounts can hide the mount.
        """
        if namespaces and self.container_id(host_pid) in self._index.container_ids(proof):
            return
        if await self._reader.ask(payer, ALL, has_mount, host_pid, proof.device, proof.path):
            return
        if not namespaces:
            raise ProcessGone(f"{host_pid} is another process now")
        raise Unfit(UnresolvedReason.OTHER_CONTAINER)

    async def _check_file(self, host_pid: int, proof: MappedFile, payer: str) -> None:
        """Raise `Unfit` unless a process has this very file open: ``maps`` can show other files alike."""
        name = proof.file.path.rsplit("/", 1)[-1]
        await self._reader.ask(payer, self.tenant(host_pid), describe_written, host_pid, name)
        held = await self._reader.ask(payer, ALL, written_by_name, host_pid, name)
        places = {SuperblockPath(*descriptor) if descriptor else None for descriptor in held}
        if proof.file in places:
            return
        raise Unfit(
            UnresolvedReason.NOT_MAPPED if places and None not in places else UnresolvedReason.UNPROVEN
        )

    def pidns(self, host_pid: int) -> int:
        """Return the inode of a process's PID namespace, which never changes."""
        try:
            return self._procfs.pidns(host_pid)
        except AccessDenied:  # some security modules hide the one of the host's first process
            if len(self._procfs.ns_pids(host_pid)) != 1:
                raise
            return HOST_PIDNS

    def container_id(self, host_pid: int) -> str | None:
        """Return the container id in a process's cgroup; empty without one, None if unreadable."""
        try:
            return self._procfs.container(host_pid).container_id
        except (AccessDenied, ProcessGone):
            return None

    def tenant(self, host_pid: int) -> str:
        """Return the container that can delay reads of a process."""
        return self.container_id(host_pid) or f"process {host_pid}"

    async def directories(self, host_pid: int, payer: str = "") -> frozenset[SharedDirectory]:
        """Return container directories in a process's mount table, read once per refresh of the map.

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
        directories = mounted[host_pid]
        if isinstance(directories, TooLarge):
            raise directories
        return directories

    async def read_directories(self, host_pid: int, payer: str = "") -> frozenset[SharedDirectory]:
        """Read a process's container directories anew, without caching them."""
        directories, trees = await self._reader.ask(payer, ALL, directories_and_trees, host_pid)
        for tree in (SharedDirectory(*tree) for tree in trees):
            if tree in self._above:
                self._trees.add(tree)
            else:
                self._others[tree] = None
                if len(self._others) > _MOST_OTHERS:
                    del self._others[next(iter(self._others))]
        return frozenset(SharedDirectory(*directory) for directory in directories)

    def in_shared_tree(self, mount: tuple[str, str]) -> bool:
        """Check if any container had a tree above this directory, so that it could mount the directory itself."""
        device, path = mount
        parts = path.split("/")
        above = {SharedDirectory(device, "/".join(parts[:end])) for end in range(2, len(parts))}
        if not above <= self._above:
            self._above |= above
            self._trees |= above & self._others.keys()
        return not above.isdisjoint(self._trees)
