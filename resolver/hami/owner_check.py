"""Check of one process: if it owns a slot, by its container, its mappings and its open files.

Everything is checked again while the process is held, so a reused PID never counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from resolver.base.errors import ProcessGone, TooSlow, WorkerFailed
from resolver.base.reasons import UnresolvedReason
from resolver.hami.discovery import MappedFile, SharedDirectory, Shown
from resolver.hami.process_reads import has_mount, maps, maps_shared, written_by_name
from resolver.linux.mappings import SuperblockPath
from resolver.linux.procfs import HOST_PIDNS, TooLarge
from resolver.lookup.resolve import verify
from resolver.workers.lane import ALL

if TYPE_CHECKING:
    from collections.abc import Callable

    from resolver.containers.known_namespaces import KnownNamespaces
    from resolver.hami.process_facts import ProcessFacts
    from resolver.linux.procfs import ProcessHandle, Procfs
    from resolver.pids.pidmap import PidMap
    from resolver.workers.lanes import TenantReader


class Seen(NamedTuple):
    """File as it appears in ``maps``, its last write (``st_mtime_ns``), and the container that pays for the search."""

    shown: Shown
    mtime_ns: int
    payer: str = ""


#: Proofs by which owners are searched through their containers' PID namespaces.
Searched = SharedDirectory | MappedFile


class Unfit(Exception):
    """A process is not the owner, or cannot be shown to be it."""

    def __init__(self, reason: UnresolvedReason) -> None:
        super().__init__(reason)
        self.reason = reason


class OwnerCheck:
    """Checks processes; each failure is remembered until the next refresh of the map."""

    def __init__(
        self,
        procfs: Procfs,
        pidmap: PidMap,
        facts: ProcessFacts,
        index: KnownNamespaces,
        reader: TenantReader,
    ) -> None:
        self._procfs, self._pidmap, self._facts = procfs, pidmap, facts
        self._index, self._reader = index, reader
        self._failed: dict[tuple[int, Searched, Seen], UnresolvedReason] = {}
        self._failed_in = -1  # which refresh

    async def examine(
        self, host_pid: int, proof: Searched, seen: Seen, ns_pid: int, namespaces: frozenset[int]
    ) -> ProcessHandle | None:
        """Return its handle if it fits, None if it is unrelated to the region; raises `Unfit` otherwise."""
        if self._failed_in != self._pidmap.refreshes:
            self._failed, self._failed_in = {}, self._pidmap.refreshes
        asked = host_pid, proof, seen
        if asked in self._failed:
            raise Unfit(self._failed[asked])
        try:
            if not await self.may_fit(host_pid, proof, namespaces, seen.payer):
                return None
            return await self._hold(host_pid, proof, seen, ns_pid, namespaces)
        except (TooSlow, WorkerFailed):
            reason = UnresolvedReason.TOO_SLOW
        except TooLarge:
            reason = UnresolvedReason.TOO_LARGE
        except Unfit as unfit:
            reason = unfit.reason
        self._failed[asked] = reason
        raise Unfit(reason)

    async def may_fit(self, host_pid: int, proof: Searched, namespaces: frozenset[int], payer: str) -> bool:
        """Check if the process is related to the region."""
        if isinstance(proof, MappedFile):
            return await self._ask(payer, maps_shared, host_pid, proof.device, proof.inode)
        # In the host's namespace a process has that number by chance, unless the container is there.
        if namespaces and (HOST_PIDNS in namespaces or self._facts.pidns(host_pid) != HOST_PIDNS):
            return True
        return proof in await self._facts.directories(host_pid, proof, payer)

    async def _ask(
        self, payer: str, question: Callable[..., bool], host_pid: int, device: str, inode: int
    ) -> bool:
        answer: bool = await self._reader.ask(
            payer, self._facts.tenant(host_pid), question, host_pid, device, inode
        )
        return answer

    async def _hold(
        self, host_pid: int, proof: Searched, seen: Seen, ns_pid: int, namespaces: frozenset[int]
    ) -> ProcessHandle:
        """Take hold of the process, then check everything again; `Unfit` if it is not the owner after all."""
        procfs = self._procfs
        with verify(procfs, host_pid, keep=True) as handle:
            if handle.process.ns_pids[-1:] != (ns_pid,):
                raise ProcessGone(f"{host_pid} is another process now")
            if namespaces and len(handle.process.ns_pids) > 1 and procfs.pidns(host_pid) not in namespaces:
                raise ProcessGone(f"{host_pid} is another process now")
            if isinstance(proof, MappedFile):
                mapped = await self._ask(seen.payer, maps_shared, host_pid, proof.device, proof.inode)
                await self._check_file(host_pid, proof, seen.payer)
            else:
                await self._check_container(host_pid, proof, namespaces, seen.payer)
                mapped = await self._ask(seen.payer, maps, host_pid, *seen.shown)
            if not mapped:
                raise Unfit(UnresolvedReason.NOT_MAPPED)
        return handle

    async def _check_container(
        self, host_pid: int, proof: SharedDirectory, namespaces: frozenset[int], payer: str
    ) -> None:
        """Raise `Unfit` unless its cgroup has the id of a process with the mount, or it has the mount itself.

        The cgroup is checked first: it costs a tenth, and a process of the container has no such mount after a chroot
        or in private mounts.
        """
        if namespaces and self._facts.container_id(host_pid) in self._index.container_ids(proof):
            return
        if await self._reader.ask(payer, ALL, has_mount, host_pid, proof.device, proof.root):
            return
        if not namespaces:
            raise ProcessGone(f"{host_pid} is another process now")
        raise Unfit(UnresolvedReason.OTHER_CONTAINER)

    async def _check_file(self, host_pid: int, proof: MappedFile, payer: str) -> None:
        """Raise `Unfit` unless the process holds this very file open: maps alone can't distinguish it from another."""
        name = proof.file.path.rsplit("/", 1)[-1]
        held = await self._reader.ask(payer, ALL, written_by_name, host_pid, name)
        places = {SuperblockPath(*each) if each else None for each in held}
        if proof.file in places:
            return
        raise Unfit(
            UnresolvedReason.NOT_MAPPED if places and None not in places else UnresolvedReason.UNPROVEN
        )
