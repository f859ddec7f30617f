"""Shared regions inside containers, where HAMi-core runs without Kubernetes: ``/tmp/cudevshr.cache``.

The finder reads the descriptors of NVML's processes that hold a file of that name open for writing: no tenant's path
is walked. Mount and path identify the file; inode numbers don't (btrfs). Separate user namespaces are refused, and
file systems not listed below, because a tenant's program may serve them.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

from resolver.base.errors import AccessDenied, CannotKnow, ProcessGone, RegionRejected, WorkerFailed
from resolver.base.reasons import RegionReason
from resolver.base.retry import longer
from resolver.base.text import printable
from resolver.hami.directory_reads import open_held, receive, take
from resolver.hami.discovery import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    Discovery,
    FoundRegion,
    Location,
    MappedFile,
    Ownership,
    Place,
    RegionChanges,
    refusal,
)
from resolver.hami.placements import BARE
from resolver.hami.process_reads import hold_written, place_of_held, shown_in_maps
from resolver.hami.region import adopt_by
from resolver.linux.mappings import SuperblockPath
from resolver.linux.procfs import ProcessIdentity, Procfs
from resolver.linux.safe_open import check_plain, let_go
from resolver.workers.lane import ALL
from resolver.workers.lanes import TenantReader

NAME = BARE.file
MAX_LOOKS = 16  # processes checked at a time
MAX_REGIONS = 1024
MAX_PER_CONTAINER = 8
#: Kernel file systems: no tenant's program serves them.
FILE_SYSTEMS = frozenset(
    {"overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "bcachefs"}
)


class _Process(Place):
    """A process, its next check and the pause thereafter."""

    def __init__(self, host_pid: int, arrival: object) -> None:
        super().__init__()
        self.host_pid, self.arrival = host_pid, arrival
        self.pause = FIRST_PAUSE
        self.refused_as = ""  # name of its refused region


class MappingFinder(Discovery):
    """Finder of regions by ``<container_id>:<path inside>``."""

    dirs: Sequence[str] = ()
    watched = True  # NVML lists new processes, so there is no directory to watch

    def __init__(
        self,
        procfs: Procfs,
        host_pids: Callable[[], Iterable[int]],
        arrival: Callable[[int], object],
        in_use: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
        reader: TenantReader | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Take ``host_pids()``, NVML's unknown processes. ``arrival`` differs for a reused PID.

        ``in_use``: checks if a slot of the named region has a living owner.
        """
        super().__init__(clock, wake)
        self._procfs, self._reader = procfs, reader or TenantReader(procfs)
        self._host_pids, self._arrival, self._in_use = host_pids, arrival, in_use
        self._processes: dict[int, _Process] = {}
        #: By region: its proof, and the processes that led to it.
        self._users: dict[str, tuple[MappedFile, set[ProcessIdentity]]] = {}

    def _places(self) -> Iterable[Place]:
        return self._processes.values()

    def refresh(self, *, full: bool) -> RegionChanges:  # noqa: ARG002
        """Drop regions whose last process has ended, and begin to check due processes.

        A later refresh has the results. Keeping a file open would keep an ended container's file system.
        """
        before, self._processes = self._processes, {}
        for host_pid in self._host_pids():
            process, arrival = before.get(host_pid), self._arrival(host_pid)
            if process is None or process.arrival != arrival:
                process = _Process(host_pid, arrival)
            else:
                del before[host_pid]
            self._processes[host_pid] = process
        for process in before.values():
            process.cancel()
        refused = {process.refused_as for process in self._processes.values()}
        self.rejected = {name: why for name, why in self.rejected.items() if name in refused}
        for name, (_, users) in list(self._users.items()):
            if not self._in_use(name) and not any(map(self._lives, users)):
                self._drop(name)
        going = sum(not self._is_idle(process) for process in self._processes.values())
        for process in self._due(self._processes.values())[: MAX_LOOKS - going]:
            self._begin(process, self._check(process))
        return self._end_refresh()

    def close(self) -> None:
        """Close everything; the finder stays usable."""
        for process in self._processes.values():
            process.cancel()
        for name in list(self._users):
            self._drop(name)
        self._processes.clear()

    def _drop(self, name: str) -> None:
        del self._users[name]
        self.release(name)

    def _refuse(self, path: str, why: RegionRejected) -> None:
        self._drop(path)
        if why.reason is not RegionReason.GONE:
            self.report(path, why)

    async def _check(self, process: _Process) -> None:
        process.due = self._clock() + process.pause
        process.pause = longer(process.pause, FIRST_PAUSE, LONGEST_PAUSE)
        host_pid = process.host_pid
        name = f"process {host_pid}"
        try:
            with self._procfs.verify(host_pid) as handle:
                container_id = self._procfs.container(host_pid).container_id
                payer = container_id or name
                held = await self._reader.ask(payer, payer, hold_written, host_pid, NAME)
                if held is not None:
                    offered, path = held
                    hold = receive(offered, os.O_PATH)
                    try:
                        name = f"{container_id or 'host'}:{printable(path)}"
                        await self._add_mapping(handle.process, hold, name, container_id, payer)
                    finally:
                        let_go(hold)
                    process.refused_as = ""
        except ProcessGone:
            pass
        except (RegionRejected, CannotKnow, WorkerFailed, OSError) as error:
            why, no_lane = refusal(error), isinstance(error, WorkerFailed) and error.waiting
            if why.reason is not RegionReason.GONE and not no_lane:  # both prove nothing about the file
                process.refused_as = name
                self.report(name, why)

    async def _add_mapping(
        self, process: ProcessIdentity, hold: int, name: str, container_id: str, payer: str
    ) -> None:
        """Check, then open a held file of the process."""
        host_pid, held = process.host_pid, f"/proc/{os.getpid()}/fd/{hold}"
        place = await self._reader.ask(
            payer, ALL, place_of_held, os.getpid(), hold, host_pid, NAME, sorted(FILE_SYSTEMS)
        )
        check_plain(os.fstat(hold))
        device, inode = await self._reader.ask(payer, payer, shown_in_maps, host_pid, held)
        proof = MappedFile(SuperblockPath(*place), (device, inode), container_id)
        if (users := self._users_of(name, proof)) is None:
            opened = await self._reader.ask(payer, payer, open_held, held)
            with ExitStack() as unused:
                region = unused.enter_context(await adopt_by(self._reader, payer, take(*opened), name))
                users = self._users_of(name, proof)  # another process may have added it meanwhile
                if users is None:
                    unused.pop_all()
                    users = set()
                    self._users[name] = proof, users
                    # The path has no pod or container name.
                    ownership = Ownership(container_id or name, container_id, placement=BARE.name)
                    self.accept(FoundRegion(region, ownership, Location(proof, proof.shown)))
        users -= {user for user in users if not self._lives(user)}
        users.add(process)

    def _users_of(self, name: str, proof: MappedFile) -> set[ProcessIdentity] | None:
        """Return the processes that led to a file; None for a new one. Raises `RegionRejected` without room for it."""
        in_container = 0
        for other, users in self._users.values():
            if other.file == proof.file:
                return users
            in_container += other.container_id == proof.container_id
        if name in self._users or in_container >= MAX_PER_CONTAINER:
            raise RegionRejected(RegionReason.TOO_MANY_ENTRIES, "its container has other regions already")
        self.check_room(MAX_REGIONS)
        return None

    def _lives(self, process: ProcessIdentity) -> bool:
        try:
            return self._procfs.start_time(process.host_pid) == process.start_time
        except (ProcessGone, AccessDenied) as error:
            return isinstance(error, AccessDenied)
