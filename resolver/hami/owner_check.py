"""Check if one process owns a slot, by its container, its mappings and its open files.

Everything is checked again while the process is held, so a reused PID never counts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
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
    from resolver.containers.known_namespaces import KnownNamespaces
    from resolver.hami.process_facts import ProcessFacts
    from resolver.linux.procfs import ProcessHandle, Procfs
    from resolver.workers.lanes import TenantReader


#: Proofs by which owners are searched through their containers' PID namespaces.
Searched = SharedDirectory | MappedFile
#: Awaited between two processes of a search, so that other searches can go on.
Pause = Callable[[], Awaitable[None]]


class Search(NamedTuple):
    """A slot's PID, its container's proof, and its file as in ``maps``. ``payer`` is charged."""

    proof: Searched
    ns_pid: int
    shown: Shown
    payer: str
    pause: Pause


class Unfit(Exception):
    """A process is not the owner, or cannot be shown to be it."""

    def __init__(self, reason: UnresolvedReason) -> None:
        super().__init__(reason)
        self.reason = reason


class OwnerCheck:
    """Checks processes."""

    def __init__(
        self, procfs: Procfs, facts: ProcessFacts, index: KnownNamespaces, reader: TenantReader
    ) -> None:
        self._procfs, self._facts, self._index, self._reader = procfs, facts, index, reader

    async def examine(
        self, host_pid: int, search: Search, namespaces: frozenset[int]
    ) -> ProcessHandle | None:
        """Return its handle if it fits, None if it is unrelated to the region; raises `Unfit` otherwise."""
        try:
            if not await self.may_fit(host_pid, search, namespaces):
                return None
            return await self._hold(host_pid, search, namespaces)
        except (TooSlow, WorkerFailed):
            raise Unfit(UnresolvedReason.TOO_SLOW) from None
        except TooLarge:
            raise Unfit(UnresolvedReason.TOO_LARGE) from None

    async def may_fit(self, host_pid: int, search: Search, namespaces: frozenset[int]) -> bool:
        """Check if the process is related to the region."""
        proof, payer = search.proof, search.payer
        if isinstance(proof, MappedFile):
            return await self._ask(payer, maps_shared, host_pid, proof.device, proof.inode)
        # In the host's namespace a process has that number by chance, unless the container is there.
        if namespaces and (HOST_PIDNS in namespaces or self._facts.pidns(host_pid) != HOST_PIDNS):
            return True
        return proof in await self._facts.directories(host_pid, payer)

    async def _ask(
        self, payer: str, question: Callable[..., bool], host_pid: int, device: str, inode: int
    ) -> bool:
        answer: bool = await self._reader.ask(
            payer, self._facts.tenant(host_pid), question, host_pid, device, inode
        )
        return answer

    async def _hold(self, host_pid: int, search: Search, namespaces: frozenset[int]) -> ProcessHandle:
        """Hold the process and check everything again; raises `Unfit` and ProcessGone."""
        procfs, proof, payer = self._procfs, search.proof, search.payer
        with verify(procfs, host_pid, keep=True) as handle:
            if handle.process.ns_pids[-1:] != (search.ns_pid,):
                raise ProcessGone(f"{host_pid} is another process now")
            if namespaces and len(handle.process.ns_pids) > 1 and procfs.pidns(host_pid) not in namespaces:
                raise ProcessGone(f"{host_pid} is another process now")
            if isinstance(proof, MappedFile):
                mapped = await self._ask(payer, maps_shared, host_pid, proof.device, proof.inode)
                await self._check_file(host_pid, proof, payer)
            else:
                await self._check_container(host_pid, proof, namespaces, payer)
                mapped = await self._ask(payer, maps, host_pid, *search.shown)
            if not mapped:
                raise Unfit(UnresolvedReason.NOT_MAPPED)
        return handle

    async def _check_container(
        self, host_pid: int, proof: SharedDirectory, namespaces: frozenset[int], payer: str
    ) -> None:
        """Raise `Unfit` unless its cgroup has the id of a process with the mount, or it has the mount itself.

        The cgroup costs a tenth, and a process in a chroot or with private mounts shows no such mount.
        """
        if namespaces and self._facts.container_id(host_pid) in self._index.container_ids(proof):
            return
        if await self._reader.ask(payer, ALL, has_mount, host_pid, proof.device, proof.root):
            return
        if not namespaces:
            raise ProcessGone(f"{host_pid} is another process now")
        raise Unfit(UnresolvedReason.OTHER_CONTAINER)

    async def _check_file(self, host_pid: int, proof: MappedFile, payer: str) -> None:
        """Raise `Unfit` unless the process holds this very file open: maps can't tell it from another."""
        name = proof.file.path.rsplit("/", 1)[-1]
        held = await self._reader.ask(payer, ALL, written_by_name, host_pid, name)
        places = {SuperblockPath(*each) if each else None for each in held}
        if proof.file in places:
            return
        raise Unfit(
            UnresolvedReason.NOT_MAPPED if places and None not in places else UnresolvedReason.UNPROVEN
        )
