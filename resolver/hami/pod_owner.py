"""Finds the owner of a slot in a tree of files that every container has as a whole: KAI's placement.

Any tenant can make and exchange directories there, and map and write any file; it can't choose its control group and
kubelet's name of its container. So the owner has the slot's number, maps the very file and holds it open for writing,
is in the directory's pod, by the only pod in its cgroup, and in its container, by kubelet's name for the log.

No other process with this number may map this file and hold any file in the tree open for writing, as HAMi-core does
for as long as it lives. HAMi's monitor maps every file and holds none.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from resolver.base.errors import AccessDenied, ProcessGone, TooSlow, WorkerFailed
from resolver.base.reasons import UnresolvedReason
from resolver.hami.process_reads import maps_shared, written_in
from resolver.linux.cgroup import NO_CONTAINER, only_container
from resolver.linux.mappings import SuperblockPath, shared_files
from resolver.linux.procfs import TooLarge
from resolver.lookup.resolve import verify
from resolver.workers.lane import ALL

if TYPE_CHECKING:
    from collections.abc import Callable

    from resolver.containers.log_names import ContainerNames
    from resolver.hami.discovery import PodFile, Shown
    from resolver.linux.cgroup import ContainerCgroup
    from resolver.linux.procfs import ProcessHandle, Procfs
    from resolver.pids.pidmap import PidMap
    from resolver.workers.lanes import TenantReader

#: Seconds of one refresh for reading what processes map, some 15 us each.
_READ_SECONDS = 0.1
#: Seconds for which such a reading answers questions, and the time that it may take: one part in so many.
_FRESH_SECONDS, _REST_FACTOR = 1.0, 10
#: Processes with one number that map one file, and numbers of which anything is remembered.
_MOST_USERS, _MOST_NUMBERS = 64, 256


class _Namesakes:
    """All processes with one number as of one refresh, and which of the files in question they map for all to see."""

    def __init__(self, host_pids: list[int], epoch: int, files: int) -> None:
        self.epoch, self.ended = epoch, -1  # in which refresh it was begun, and complete
        self.files = files  # how many files had been asked about
        self.left = host_pids  # still to be read
        self.users: dict[Shown, list[int]] = {}
        self.hidden: list[tuple[UnresolvedReason, str | None]] = []  # unreadable ones, and their cgroups
        self.pods: set[str] = set()  # of those that were read
        self.cost = 0.0  # seconds
        self.at = self.again_at = 0.0  # when it was complete, and may be read again


class _Asked:
    """A requested file: its last write, the refresh that first saw it, and its number."""

    def __init__(self, number: int) -> None:
        self.number, self.mtime_ns, self.epoch = number, -1, 0


class PodOwner:
    """Judge of the processes with a slot's number.

    Each process's mappings are read once for all slots with its number, and again for a file written to since, because
    a process writes to a file before it uses it. ``bounded=False``: without a time limit.
    """

    def __init__(
        self,
        procfs: Procfs,
        pidmap: PidMap,
        names: ContainerNames,
        reader: TenantReader,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bounded = True
        #: After an answer of `OVER_BUDGET`: the same need not be asked again before this, on the clock.
        self.later = 0.0
        self._procfs, self._pidmap, self._names, self._clock = procfs, pidmap, names, clock
        self._reader, self._reading = reader, asyncio.Lock()
        self._asked: dict[PodFile, _Asked] = {}
        self._shown: dict[Shown, int] = {}  # how many of the files in question show like this
        self._files = 0
        self._namesakes: dict[int, _Namesakes] = {}
        self._spent = (-1, 0.0)  # the refresh, and seconds of reading in it

    async def owner(
        self, proof: PodFile, ns_pid: int, mtime_ns: int, payer: str = ""
    ) -> ProcessHandle | UnresolvedReason:
        """Return the owner of the slot with that number in the file; the caller closes the handle."""
        asked = self._ask(proof, mtime_ns)
        async with self._reading:  # the same may be read for other slots
            namesakes = await self._read(ns_pid, proof, asked, payer)
        if namesakes is None:
            return UnresolvedReason.OVER_BUDGET
        own: list[ProcessHandle] = []
        reasons = {reason for reason, cgroup in namesakes.hidden if _may_be_at_home(cgroup, proof)}
        users = namesakes.users.get((proof.device, proof.inode), [])
        if len(users) > _MOST_USERS:
            return UnresolvedReason.TOO_LARGE
        try:
            for host_pid in users:
                verdict = await self._judge(host_pid, proof, ns_pid, payer)
                if isinstance(verdict, UnresolvedReason):
                    reasons.add(verdict)
                elif verdict is not None:
                    own.append(verdict)
            if len(own) == 1 and not reasons & _MAY_BE_MEANT:
                return own.pop()
        finally:
            for handle in own:
                handle.close()
        if len(own) > 1 or (own and UnresolvedReason.OTHER_CONTAINER in reasons):
            reasons.add(UnresolvedReason.AMBIGUOUS)
        if not reasons:
            there = proof.pod_uid in namesakes.pods
            return UnresolvedReason.NOT_MAPPED if there else UnresolvedReason.NO_SUCH_PROCESS
        return next(each for each in _WORST_FIRST if each in reasons)

    def forget(self, proof: PodFile) -> None:
        """Forget a vanished file."""
        if self._asked.pop(proof, None) is not None:
            shown = proof.device, proof.inode
            self._shown[shown] -= 1
            if not self._shown[shown]:
                del self._shown[shown]

    def _ask(self, proof: PodFile, mtime_ns: int) -> _Asked:
        asked = self._asked.get(proof)
        if asked is None:
            self._files += 1
            asked = self._asked[proof] = _Asked(self._files)
            shown = proof.device, proof.inode
            self._shown[shown] = self._shown.get(shown, 0) + 1
        if asked.mtime_ns != mtime_ns:  # it was seen before this refresh
            asked.mtime_ns, asked.epoch = mtime_ns, self._pidmap.refreshes
        return asked

    async def _read(self, ns_pid: int, proof: PodFile, asked: _Asked, payer: str) -> _Namesakes | None:
        """Return all processes with the number, read since the last write to the file; None: later."""
        now, known = self._clock(), self._namesakes.get(ns_pid)
        if known is None or not (known.left or self._answers(known, proof, asked, now)):
            if known is not None and now < known.again_at and self.bounded:
                self.later = known.again_at
                return None
            known = self._begin(ns_pid)
        if known.left:
            await self._go_on(known, payer)
        self.later = known.again_at
        return known if not known.left and self._answers(known, proof, asked, now) else None

    def _answers(self, known: _Namesakes, proof: PodFile, asked: _Asked, now: float) -> bool:
        """Check that they were read for that file, since its last write, and recently.

        A child that takes a slot through an inherited mapping writes no byte: the absence of mappings is believed in
        the same refresh only.
        """
        since = known.epoch >= asked.epoch and known.files >= asked.number
        used = known.ended in (-1, self._pidmap.refreshes) or (proof.device, proof.inode) in known.users
        return since and used and (not known.at or now < known.at + _FRESH_SECONDS)

    def _begin(self, ns_pid: int) -> _Namesakes:
        now, began = self._clock(), time.monotonic()
        if len(self._namesakes) >= _MOST_NUMBERS:
            kept = {
                number: each for number, each in self._namesakes.items() if each.left or now < each.again_at
            }
            self._namesakes = kept
        found = _Namesakes(self._pidmap.source.candidates(ns_pid), self._pidmap.refreshes, self._files)
        found.cost = time.monotonic() - began
        self._namesakes[ns_pid] = found
        return found

    async def _go_on(self, known: _Namesakes, payer: str) -> None:
        """Read the rest, for as long as this refresh has time for it."""
        epoch, began = self._pidmap.refreshes, time.monotonic()
        spent = self._spent[1] if self._spent[0] == epoch else 0.0
        until = began + _READ_SECONDS - spent if self.bounded else math.inf
        while known.left and time.monotonic() <= until:
            await self._read_one(known, known.left.pop(), payer)
        took = time.monotonic() - began
        self._spent = epoch, spent + took
        known.cost += took
        if not known.left:
            now = known.at = self._clock()
            known.ended = self._pidmap.refreshes
            beside = sum(now < each.at + _FRESH_SECONDS for each in self._namesakes.values())
            known.again_at = now + min(_FRESH_SECONDS, known.cost * beside * _REST_FACTOR)

    async def _read_one(self, namesakes: _Namesakes, host_pid: int, payer: str) -> None:
        try:
            namesakes.pods.add(self._container(host_pid).pod_uid or "")
            found = await self._reader.ask(payer, self._tenant(host_pid), shared_files, host_pid)
            mapped = {(device, inode) for device, inode in found} & self._shown.keys()
        except ProcessGone:
            return
        except _HIDDEN as error:
            with suppress(ProcessGone):
                namesakes.hidden.append((_why(error), self._cgroup(host_pid)))
            return
        for shown in mapped:
            users = namesakes.users.setdefault(shown, [])
            if len(users) <= _MOST_USERS:
                users.append(host_pid)

    async def _judge(
        self, host_pid: int, proof: PodFile, ns_pid: int, payer: str
    ) -> ProcessHandle | UnresolvedReason | None:
        """Return its handle if it is an owner, the reason if it is a candidate but isn't, None if it is unrelated."""
        try:
            return await self._hold(host_pid, proof, ns_pid, payer)
        except ProcessGone:
            return None
        except _HIDDEN as error:
            # One that can't be read hides nobody's owner but its own.
            if not self._may_be_at_home(host_pid, proof):
                return None
            return _why(error)

    async def _hold(
        self, host_pid: int, proof: PodFile, ns_pid: int, payer: str
    ) -> ProcessHandle | UnresolvedReason | None:
        """Judge a process that maps the file, checking everything after it is held."""
        reason: UnresolvedReason | None = None
        with verify(self._procfs, host_pid, keep=True) as handle:
            if handle.process.ns_pids[-1:] != (ns_pid,):
                raise ProcessGone(f"{host_pid} is another process now")
            held = await self._held(host_pid, proof, payer)
            shown = proof.device, proof.inode
            mapped = await self._reader.ask(payer, self._tenant(host_pid), maps_shared, host_pid, *shown)
            home = self._at_home(host_pid, proof)
            if mapped and held:
                reason = self._unfit(host_pid, proof, held)
            elif home:
                reason = UnresolvedReason.NOT_MAPPED
        if mapped and held and reason is None:
            return handle
        handle.close()
        return reason

    def _unfit(
        self, host_pid: int, proof: PodFile, held: set[SuperblockPath | None]
    ) -> UnresolvedReason | None:
        """Return the reason that a process using the file is not the owner; None if it is."""
        container = only_container(self._procfs.cgroup(host_pid))
        if container is None or container.pod_uid != proof.pod_uid:
            return UnresolvedReason.OTHER_POD
        name = self._names.of(container.container_id)
        if name is None:
            return UnresolvedReason.UNPROVEN
        if name.container != proof.container_name:
            return UnresolvedReason.OTHER_CONTAINER
        return None if proof.file in held else UnresolvedReason.UNPROVEN

    async def _held(self, host_pid: int, proof: PodFile, payer: str) -> set[SuperblockPath | None]:
        """Locate the files that it holds open for writing, in the tree or possibly this one; None: unknown."""
        place = proof.tree.device, proof.tree.path, proof.opened
        held = await self._reader.ask(payer, ALL, written_in, host_pid, *place)
        return {SuperblockPath(*each) if each else None for each in held}

    def _tenant(self, host_pid: int) -> str:
        return self._container(host_pid).container_id or f"process {host_pid}"

    def _at_home(self, host_pid: int, proof: PodFile) -> bool:
        with suppress(AccessDenied, ProcessGone):
            return self._container(host_pid).pod_uid == proof.pod_uid
        return False

    def _may_be_at_home(self, host_pid: int, proof: PodFile) -> bool:
        with suppress(ProcessGone):
            return _may_be_at_home(self._cgroup(host_pid), proof)
        return False

    def _cgroup(self, host_pid: int) -> str | None:
        try:
            return self._procfs.cgroup(host_pid)
        except AccessDenied:
            return None

    def _container(self, host_pid: int) -> ContainerCgroup:
        return only_container(self._procfs.cgroup(host_pid)) or NO_CONTAINER


def _may_be_at_home(cgroup: str | None, proof: PodFile) -> bool:
    """Check if the cgroup, unless unreadable, names the pod."""
    return cgroup is None or proof.pod_uid in cgroup or proof.pod_uid.replace("-", "_") in cgroup


#: What keeps a process from being read, and why it may be meant all the same.
_HIDDEN = AccessDenied, TooLarge, TooSlow, WorkerFailed


def _why(error: Exception) -> UnresolvedReason:
    if isinstance(error, AccessDenied):
        return UnresolvedReason.ACCESS_DENIED
    return UnresolvedReason.TOO_LARGE if isinstance(error, TooLarge) else UnresolvedReason.TOO_SLOW


#: As long as any of the others has one of these, it may be the one that the slot means.
_MAY_BE_MEANT = {
    UnresolvedReason.OTHER_POD,
    UnresolvedReason.OTHER_CONTAINER,
    UnresolvedReason.UNPROVEN,
    UnresolvedReason.ACCESS_DENIED,
    UnresolvedReason.TOO_LARGE,
    UnresolvedReason.TOO_SLOW,
}
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
