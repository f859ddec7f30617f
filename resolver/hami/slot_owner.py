"""Search for a slot's process: right PID, right container, maps the very file, held so it cannot change.

A HAMi container has ``<hook>/containers/<podUID>_<containerName>`` bind-mounted: superblock and path inside it must
match. An absent mount proves nothing: the control group may still show the container. `resolver.hami.pod_owner` handles
trees that every container has as a whole.

The owner of a region inside a container is in it, holds the file open for writing, and has a shared mapping, granted by
the kernel only to processes that may write.
"""

import asyncio
import contextlib
import math

from resolver.base.budget import Slices
from resolver.base.errors import AccessDenied, ProcessGone
from resolver.base.reasons import UnresolvedReason
from resolver.containers.known_namespaces import MAX_NAMESPACES, KnownNamespaces
from resolver.containers.log_names import ContainerNames
from resolver.hami.discovery import PodFile, Proof
from resolver.hami.owner_check import MAY_FIT, UNREADABLE, OwnerCheck, Pause, Search, Searched, Unfit, worst
from resolver.hami.pod_owner import PodOwner
from resolver.linux.mappings import Shown
from resolver.linux.procfs import HOST_PIDNS, ProcessHandle, Procfs
from resolver.pids.pidmap import PidMap
from resolver.workers.lanes import TenantReader


class OwnerFinder:
    """Finder of a slot's verified owner.

    It searches the PID namespaces of the container and the host, or all processes if none is known.
    """

    def __init__(
        self,
        procfs: Procfs,
        pidmap: PidMap,
        known: KnownNamespaces,
        names: ContainerNames | None = None,
        reader: TenantReader | None = None,
    ) -> None:
        """Without kubelet's ``names``, files in a tree of all containers have no owner."""
        self._procfs, self._pidmap = procfs, pidmap
        self._reader = reader or TenantReader(procfs)
        self._in_pod = PodOwner(procfs, pidmap, names or ContainerNames("", ""), self._reader)
        self._index, self._check = known, OwnerCheck(procfs, pidmap, known, self._reader)
        self._index.on_mounts_needed(self._check.read_directories)
        self._walks = asyncio.Lock()

    async def owner(
        self,
        proof: Proof,
        shown: Shown,
        ns_pid: int,
        payer: str = "",
        rival: int = 0,
        pause: Pause | None = None,
    ) -> ProcessHandle | UnresolvedReason:
        """Return the only process with the PID ``ns_pid`` in the container of ``proof`` that maps its file.

        ``shown`` is the file as in ``maps``. ``payer`` is charged. ``rival`` is the host PID in the slot: this process
        is checked even if its PID namespace is not known yet or has ended. ``pause`` is awaited between processes. The
        caller closes the handle. A PID reused meanwhile gives NO_SUCH_PROCESS.
        """
        pause = pause or Slices(math.inf).yield_if_due
        if isinstance(proof, PodFile):
            owner = await self._in_pod.owner(proof, ns_pid, payer, pause)
            if not self._pidmap.source.incomplete():
                return owner
            if isinstance(owner, ProcessHandle):
                owner.close()
            return UnresolvedReason.ACCESS_DENIED
        if len(self._index.of(proof)) > MAX_NAMESPACES:
            return UnresolvedReason.TOO_LARGE
        if proof.mount is not None and self._check.in_shared_tree(proof.mount):
            return UnresolvedReason.UNPROVEN  # a container with the tree can mount it as the plugin does
        search, source = Search(proof, ns_pid, shown, payer, pause), self._pidmap.source
        try:
            related = None if self._known(proof) else await self._related(search)
            if related is None:
                namespaces = self._known(proof)
                await self._ask(self._by_key(namespaces, ns_pid), search, namespaces)
                # Some containers that share the file may be unknown.
                if len(search.fitting) == 1 and not proof.alone:
                    related = await self._related(search)
            if related is not None:
                # All are examined in one step: the walk's readings may be outdated.
                await self._ask(related, search, frozenset())
                search.cut = self._pidmap.source is not source  # the source may be closed by now
            if rival > 0 and rival not in search.asked:
                await self._ask_rival(rival, search)
        except BaseException:  # without descriptors, or at the daemon's end
            search.close()
            raise
        if search.cut:
            search.close()
            return UnresolvedReason.OVER_BUDGET
        return self._judge(search)

    def _judge(self, search: Search) -> ProcessHandle | UnresolvedReason:
        proof = search.proof
        if len(search.fitting) == 1:
            (handle,) = search.fitting
            host_pid = handle.process.host_pid
            beside = self._index.container_ids(proof) if not proof.alone else set()
            if not self._any_beside(host_pid, search.hidden, beside):
                if proof.container_id in (None, self._check.container_id(host_pid)):
                    with contextlib.suppress(AccessDenied, ProcessGone):
                        if pidns := self._check.pidns(host_pid):
                            self._index.learn(proof, pidns, self._check.container_id(host_pid) or "")
                    return handle
                search.seen.add(UnresolvedReason.OTHER_CONTAINER)
        search.close()
        if len(search.fitting) > 1:
            return UnresolvedReason.AMBIGUOUS
        if self._pidmap.source.incomplete():
            search.seen.add(UnresolvedReason.ACCESS_DENIED)
        return worst(search.seen)

    def forget(self, proof: Proof) -> None:
        if isinstance(proof, PodFile):
            self._in_pod.forget(proof)
        self._index.forget(proof)

    def vacant(self, proof: Proof, ns_pid: int) -> bool:
        """Check with the kernel that no process of the container has this number; True is never a guess.

        The map must be complete, and a verified owner must have shown the PID namespace: without one, the numbers may
        be a virtual machine's.
        """
        if not proof.alone:
            return False
        namespaces = self._index.of(proof)
        if self._index.behind or len(namespaces) > MAX_NAMESPACES or self._pidmap.source.incomplete():
            return False
        if not self._index.proven(proof):
            return False
        ids = self._index.container_ids(proof)
        try:
            for host_pid in self._by_key(namespaces, ns_pid):
                elsewhere = False
                with contextlib.suppress(ProcessGone):  # an unreadable process proves nothing
                    elsewhere = self._check.pidns(host_pid) not in namespaces
                    elsewhere = elsewhere and self._check.container_id(host_pid) not in ids
                if not elsewhere:
                    with contextlib.suppress(ProcessGone):  # a zombie owns nothing
                        self._procfs.open_handle(host_pid).close()
                        return False
        except AccessDenied:
            return False
        return True

    def _by_key(self, namespaces: frozenset[int], ns_pid: int) -> list[int]:
        """Return host PIDs with that number in those namespaces or the host's."""
        searched = namespaces | {HOST_PIDNS}
        processes = []
        for host_pid in self._pidmap.candidates_in(ns_pid, searched):
            with contextlib.suppress(ProcessGone, AccessDenied):  # `examine` reports an unreadable one
                if self._check.pidns(host_pid) not in searched:
                    continue
            processes.append(host_pid)
        return processes

    def _known(self, proof: Searched) -> frozenset[int]:
        """Return the container's PID namespaces; empty if one may be missing: then all processes are searched."""
        return frozenset() if self._index.behind else self._index.of(proof)

    async def _related(self, search: Search) -> list[int] | None:
        """Return other processes with the number that may fit; None if the container's namespaces are now known."""
        related = set[int]()
        # When a node's containers start, all searches need the same mount tables, so only one at a time reads them.
        # Mappings are read without turns: a tenant can delay reads of its own.
        async with self._walks if search.proof.mount else contextlib.nullcontext():
            if not search.asked and self._known(search.proof):
                return None
            for host_pid in self._pidmap.source.everywhere(search.ns_pid):
                await search.pause()
                if host_pid and host_pid not in search.asked:
                    try:
                        may_fit = await self._check.may_fit(host_pid, search, frozenset())
                    except ProcessGone:
                        continue
                    except UNREADABLE:
                        may_fit = True
                    if may_fit:
                        related.add(host_pid)
        return sorted(related)

    async def _ask_rival(self, host_pid: int, search: Search) -> None:
        """Examine the process in the slot by its present mounts; if it is unreadable, cut the search."""
        hidden = len(search.hidden)
        try:
            same = self._procfs.ns_pids(host_pid)[-1:] == (search.ns_pid,)
            if same and search.proof in await self._check.read_directories(host_pid, search.payer):
                own = frozenset({self._check.pidns(host_pid)})
                await self._ask([host_pid], search, own)
                search.cut = search.cut or len(search.hidden) > hidden
        except ProcessGone:
            pass
        except (*UNREADABLE, OSError):
            search.cut = True

    async def _ask(self, host_pids: list[int], search: Search, namespaces: frozenset[int]) -> None:
        for host_pid in host_pids:
            search.asked.append(host_pid)
            try:
                handle = await self._check.examine(host_pid, search, namespaces)
                if handle is not None:
                    search.fitting.append(handle)
            except Unfit as unfit:
                search.seen.add(unfit.reason)
                if unfit.reason in MAY_FIT:
                    search.hidden.append(host_pid)
            except ProcessGone:
                continue  # also an unreaped zombie: it owns nothing any more

    def _any_beside(self, host_pid: int, others: list[int], beside: set[str]) -> bool:
        """Check by cgroup if one of the ``others`` may be in this process's container, or in one ``beside`` it.

        So an unreadable process blocks only its own container's slots.
        """
        if not others:
            return False
        own = self._check.container_id(host_pid)
        return not own or any(self._check.container_id(other) in {None, "", own, *beside} for other in others)
