"""Search for a slot's owner in a tree of files that every container has as a whole: KAI's placement.

There, tenants can make and exchange directories, and map and write any file; they can't choose their control group or
kubelet's name of their container. So the owner has the slot's number, maps the very file, holds it open for writing,
and is in the directory's pod, by the only pod in its cgroup, and container, by kubelet's name for the log.

No other process with this number may map this file and hold any file in the tree open for writing, as HAMi-core does.
HAMi's monitor maps every file and holds none.
"""

import asyncio
import time
from collections import defaultdict

from resolver.base.errors import AccessDenied, ProcessGone
from resolver.base.reasons import UnresolvedReason
from resolver.containers.log_names import ContainerNames
from resolver.hami.discovery import PodFile
from resolver.hami.owner_check import MAY_FIT, UNREADABLE, Pause, Unfit, unreadable, worst
from resolver.hami.process_reads import describe_written, written_in
from resolver.linux.cgroup import NO_CONTAINER, ContainerCgroup, only_container
from resolver.linux.mappings import Shown, SuperblockPath, maps_file, shared_files
from resolver.linux.procfs import ProcessHandle, Procfs
from resolver.pids.pidmap import PidMap
from resolver.workers.lane import ALL
from resolver.workers.lanes import TenantReader

#: One reading serves many starts: the next one waits this many times its duration, at most this many seconds.
REST_FACTOR, _MOST_REST_SECONDS = 3, 0.5
#: Most processes with the same number that map the same file.
_MOST_USERS = 64
#: Files in question that a process maps, or why the process is unreadable.
_Mapped = set[Shown] | UnresolvedReason


class PodOwner:
    """Finds the owner among the processes with a slot's number.

    Mappings are read once per refresh of the map, for all known files. Processes write to a file before using it, and a
    refresh follows.
    """

    def __init__(self, procfs: Procfs, pidmap: PidMap, names: ContainerNames, reader: TenantReader) -> None:
        self._procfs, self._pidmap, self._names, self._reader = procfs, pidmap, names, reader
        self._asked: set[Shown] = set()  # files in question
        self._refresh, self._files = -1, frozenset(self._asked)  # the present reading, and its files
        self._mapped: dict[int, _Mapped] = {}  # by host PID
        self._cost = self.again_at = 0.0  # seconds of the present reading, and when the next one may begin
        self._turns = defaultdict[int, asyncio.Lock](asyncio.Lock)  # by host PID: one search reads for all

    async def owner(
        self, proof: PodFile, ns_pid: int, payer: str, pause: Pause
    ) -> ProcessHandle | UnresolvedReason:
        """Return the slot's owner; the caller closes the handle."""
        namesakes = await self._namesakes(proof, ns_pid, payer, pause)
        if namesakes is None:
            return UnresolvedReason.OVER_BUDGET  # the next refresh decides
        users = [pid for pid, files in namesakes.items() if isinstance(files, set) and proof.shown in files]
        if len(users) > _MOST_USERS:
            return UnresolvedReason.TOO_LARGE
        reasons = {
            unread
            for host_pid, unread in namesakes.items()
            if isinstance(unread, UnresolvedReason) and self._may_be_at_home(host_pid, proof)
        }
        own: list[ProcessHandle] = []
        try:
            for host_pid in users:
                try:
                    own.append(await self._hold(host_pid, proof, ns_pid, payer))
                except Unfit as unfit:
                    reasons.add(unfit.reason)
                except ProcessGone:
                    continue
                except UNREADABLE as error:
                    if self._may_be_at_home(host_pid, proof):  # an unreadable process blocks no other pod
                        reasons.add(unreadable(error))
            if len(own) == 1 and not reasons & _MAY_BE_MEANT:
                return own.pop()
        finally:
            for handle in own:
                handle.close()
        if len(own) > 1 or (own and UnresolvedReason.OTHER_CONTAINER in reasons):
            reasons.add(UnresolvedReason.AMBIGUOUS)
        if not reasons:
            in_pod = any(self._may_be_at_home(host_pid, proof) for host_pid in namesakes)
            return UnresolvedReason.NOT_MAPPED if in_pod else UnresolvedReason.NO_SUCH_PROCESS
        return worst(reasons)

    async def _namesakes(
        self, proof: PodFile, ns_pid: int, payer: str, pause: Pause
    ) -> dict[int, _Mapped] | None:
        """Return all processes with the number, as of this refresh; None if the reading began without this file."""
        shown, refresh = proof.shown, self._pidmap.refreshes
        self._asked.add(shown)
        if self._refresh != refresh and time.monotonic() >= self.again_at:
            self._refresh, self._files, self._mapped = refresh, frozenset(self._asked), {}
            self._turns, self._cost = defaultdict(asyncio.Lock), 0.0
        mapped, files, turns = self._mapped, self._files, self._turns
        if shown not in files or self._refresh != refresh:
            return None
        host_pids = self._pidmap.source.candidates(ns_pid)
        for host_pid in host_pids:
            await pause()
            if host_pid in mapped:
                continue
            async with turns[host_pid]:
                began = time.monotonic()
                if host_pid not in mapped:
                    mapped[host_pid] = await self._read(host_pid, files, payer)
                now = time.monotonic()
                self._cost += now - began
                self.again_at = now + min(_MOST_REST_SECONDS, REST_FACTOR * self._cost)
        return {host_pid: mapped[host_pid] for host_pid in host_pids}

    def forget(self, proof: PodFile) -> None:
        self._asked.discard(proof.shown)

    async def _read(self, host_pid: int, files: frozenset[Shown], payer: str) -> _Mapped:
        try:
            tenant = self._container(host_pid).container_id or f"process {host_pid}"
            answer = await self._reader.ask(payer, tenant, shared_files, host_pid)
        except ProcessGone:
            return set()
        except UNREADABLE as error:
            return unreadable(error)
        return {(device, inode) for device, inode in answer} & files

    async def _hold(self, host_pid: int, proof: PodFile, ns_pid: int, payer: str) -> ProcessHandle:
        """Hold the owner and check everything meanwhile. Raises `Unfit`; ProcessGone if it is unrelated."""
        with self._procfs.verify(host_pid, keep=True) as handle:
            if handle.process.ns_pids[-1:] != (ns_pid,):
                raise ProcessGone(f"{host_pid} is another process now")
            place = *proof.mount, proof.opened
            tenant = self._container(host_pid).container_id or f"process {host_pid}"
            await self._reader.ask(payer, tenant, describe_written, host_pid)
            located = await self._reader.ask(payer, ALL, written_in, host_pid, *place)
            held = {SuperblockPath(*file) if file else None for file in located}
            if not held or not await self._reader.ask(payer, tenant, maps_file, host_pid, *proof.shown):
                if self._container(host_pid).pod_uid == proof.pod_uid:
                    raise Unfit(UnresolvedReason.NOT_MAPPED)
                raise ProcessGone(f"{host_pid} does not use the file")
            container = only_container(self._procfs.cgroup(host_pid))
            if container is None or container.pod_uid != proof.pod_uid:
                raise Unfit(UnresolvedReason.OTHER_POD)
            name = self._names.of(container.container_id)
            if name is not None and name.container != proof.container_name:
                raise Unfit(UnresolvedReason.OTHER_CONTAINER)
            if name is None or proof.file not in held:
                raise Unfit(UnresolvedReason.UNPROVEN)
        return handle

    def _may_be_at_home(self, host_pid: int, proof: PodFile) -> bool:
        """Check if a process may be in the pod: its cgroup names the pod, or is unreadable."""
        try:
            cgroup = self._procfs.cgroup(host_pid)
        except (AccessDenied, ProcessGone) as error:
            return isinstance(error, AccessDenied)
        return proof.pod_uid in cgroup or proof.pod_uid.replace("-", "_") in cgroup

    def _container(self, host_pid: int) -> ContainerCgroup:
        return only_container(self._procfs.cgroup(host_pid)) or NO_CONTAINER


#: A process with one of these reasons may be the slot's owner, so no other process is accepted.
_MAY_BE_MEANT = MAY_FIT | {UnresolvedReason.OTHER_POD, UnresolvedReason.OTHER_CONTAINER}
