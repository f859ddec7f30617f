"""Which process a slot belongs to: right PID, right container, maps the very file, held so it cannot change.

The container is determined from the process's own mount table: a HAMi container has its directory
``<hook>/containers/<podUID>_<containerName>`` bind-mounted. Superblock and path inside it are compared
exactly, so a tenant that makes mounts of its own cannot pass for another container. A process that shows no such mount
can still be in the container, by its control group: that a mount is not seen proves nothing.

In a tree that every container has as a whole the mount proves nothing, see `resolver.hami.pod_owner`.

A region inside a container has no such directory. There the owner is in the container that the region was found in,
holds the very file open for writing, and maps it for all to see: the kernel lets nobody do that who could not write to
the file himself.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import TYPE_CHECKING, NamedTuple

from resolver.containers.known_namespaces import MAX_NAMESPACES, KnownNamespaces
from resolver.containers.log_names import ContainerNames
from resolver.errors import AccessDenied, ProcessGone
from resolver.hami.discovery import ClaimDirectory, MappedFile, Place, PodFile, SharedDirectory, Shown
from resolver.hami.owner_walks import OwnerWalks
from resolver.hami.pod_owner import PodOwner
from resolver.hami.process_facts import FIRST_PAUSE, LONGEST_PAUSE, ProcessFacts
from resolver.linux.mappings import maps_file, opened_by_name, place_of
from resolver.linux.procfs import HOST_PIDNS, ProcessHandle, Procfs, TooLarge
from resolver.lookup.verify import verify
from resolver.reasons import UnresolvedReason
from resolver.retry import longer

if TYPE_CHECKING:
    from collections.abc import Callable

    from resolver.budget import Slices
    from resolver.pids.pidmap import PidMap


class Seen(NamedTuple):
    """A file as it shows in ``maps``, and when it was last written to (``st_mtime_ns``)."""

    shown: Shown
    mtime_ns: int


#: Places whose owners are searched through their containers' PID namespaces.
_Searched = SharedDirectory | MappedFile
#: CPU seconds of one refresh in which every process is asked, where every owner is searched so: there is no other way.
_POD_SECONDS = 0.02


class OwnerFinder:
    """Finds the owner of a slot, verified.

    It is searched by key: in the PID namespaces of the slot's container (`KnownNamespaces`) and in the host's. Where
    none is known, every process with that number is checked, for one slot of a region with each refresh of the map,
    and for a moment only: with the next one it goes on from there. What failed is remembered for that process, and
    checked again ever more rarely.
    """

    def __init__(
        self,
        procfs: Procfs,
        pidmap: PidMap,
        clock: Callable[[], float] = time.monotonic,
        names: ContainerNames | None = None,
        known: KnownNamespaces | None = None,
    ) -> None:
        """``names`` are kubelet's; without them nobody owns a file in a tree that every container has.

        ``known`` are the node's namespaces, where somebody else keeps them, too.
        """
        self._procfs = procfs
        self._in_pod = PodOwner(procfs, names or ContainerNames("", ""))
        self._pidmap = pidmap
        self._clock = clock
        self._facts = ProcessFacts(procfs, pidmap, clock)
        self._index = known or KnownNamespaces(procfs, pidmap, clock)
        self._index.read_mounts(self._facts.read_directories)
        self._failed: dict[int, _Failure] = {}
        self._walks = OwnerWalks(pidmap, clock)

    def update(self, *, bounded: bool = True) -> None:
        """Take in what the last refresh of the map changed; without this, the next question does.

        ``bounded=False``: from now on take the time that it takes.
        """
        self._walks.bounded = bounded
        self._index.update(bounded=bounded)

    async def catch_up(self, slices: Slices, *, bounded: bool = True) -> None:
        """The same, but the loop's other tasks go on meanwhile; from then on no question does it."""
        self._walks.bounded = bounded
        await self._index.catch_up(slices, bounded=bounded)

    def owner(
        self, place: Place, shown: Shown, ns_pid: int, mtime_ns: int = 0
    ) -> ProcessHandle | UnresolvedReason:
        """The process that knows itself as ``ns_pid``, is in the container of ``place`` and maps its file.

        ``shown`` is how that file shows in ``maps``, see `mappings.mapped_as`. ``mtime_ns`` is when it was last written
        to: a process that attaches does that, so what failed before then is not remembered.

        Exactly one process must fit. The caller closes the handle. Everything is checked after the process was
        taken hold of, so a PID that is used again in between gives NO_SUCH_PROCESS, never another process.
        """
        if isinstance(place, PodFile):
            return self._owner_in_pod(place, ns_pid, mtime_ns)
        namespaces = self._index.of(place)
        refused = self._refused(place, namespaces)
        if refused is not None:
            return refused
        seen, found = Seen(shown, mtime_ns), _Findings()
        if self._index.behind:
            # One of them may be missing, so only all processes prove that one alone fits.
            namespaces = frozenset()
        if namespaces:
            found = self._search(self._by_key(namespaces, ns_pid), place, seen, ns_pid, namespaces)
        # Not all containers that share a file are known, so every process with that number is asked once it matters.
        shared = len(found.fitting) == 1 and isinstance(place, MappedFile | ClaimDirectory)
        if not namespaces or shared:
            found.add(self._walk(place, seen, ns_pid, besides=found.asked))
        else:
            self._walks.ended(place)
        if found.cut:
            found.close()
            return UnresolvedReason.OVER_BUDGET
        return self._judge(found, place)

    def _refused(self, place: _Searched, namespaces: frozenset[int]) -> UnresolvedReason | None:
        """Why no owner is searched for there at all."""
        if len(namespaces) > MAX_NAMESPACES:
            return UnresolvedReason.TOO_LARGE
        if isinstance(place, SharedDirectory) and self._facts.in_shared_tree(place):
            return UnresolvedReason.UNPROVEN  # whoever has the tree can mount it as the device plugin does
        return None

    def _owner_in_pod(self, place: PodFile, ns_pid: int, mtime_ns: int) -> ProcessHandle | UnresolvedReason:
        """Every process with that number is asked: in that tree, any of them could be meant."""
        if not self._walks.may_go_on(place, again=True, seconds=_POD_SECONDS):
            return UnresolvedReason.OVER_BUDGET
        source = self._pidmap.source
        asked = {host_pid: self._pidmap.arrival(host_pid) for host_pid in source.candidates(ns_pid)}
        found = self._in_pod.find(asked, (place, ns_pid, mtime_ns), self._walks.until(_POD_SECONDS))
        if source.incomplete():
            if isinstance(found, ProcessHandle):
                found.close()
            return UnresolvedReason.ACCESS_DENIED
        return found

    def _judge(self, found: _Findings, place: _Searched) -> ProcessHandle | UnresolvedReason:
        if len(found.fitting) == 1:
            (handle,) = found.fitting
            host_pid = handle.process.host_pid
            beside = self._index.container_ids(place) if isinstance(place, ClaimDirectory) else set()
            if not self._any_beside(host_pid, found.hidden, beside):
                if (
                    not isinstance(place, MappedFile)
                    or self._facts.container_id(host_pid) == place.container_id
                ):
                    self.learn(place, host_pid)
                    return handle
                found.seen.add(UnresolvedReason.OTHER_CONTAINER)
        found.close()
        if len(found.fitting) > 1:
            return UnresolvedReason.AMBIGUOUS
        if self._pidmap.source.incomplete():
            found.seen.add(UnresolvedReason.ACCESS_DENIED)
        return next(
            (reason for reason in _WORST_FIRST if reason in found.seen), UnresolvedReason.NO_SUCH_PROCESS
        )

    def learn(self, place: Place, host_pid: int) -> None:
        """That process certainly belongs to the place: its namespace is searched from now on."""
        with contextlib.suppress(AccessDenied, ProcessGone):
            pidns = self._facts.pidns(host_pid)
            if pidns:
                self._index.learn(place, pidns, self._facts.container_id(host_pid) or "")

    def forget(self, place: Place) -> None:
        """The region of that place is gone."""
        self._index.forget(place)
        self._walks.forget(place)

    def vacant(self, place: Place, ns_pid: int) -> bool:
        """Whether the kernel says that no process of the container has that number; True is never a guess.

        The container's PID namespace must be known: a slot's verified owner was in it, or its first process has the
        directory where HAMi has it. Otherwise the numbers may be those of a virtual machine's processes. The map must
        hold every process. Where a file may be several containers', one of them may be a virtual machine.
        """
        if not isinstance(place, SharedDirectory) or isinstance(place, ClaimDirectory):
            return False
        namespaces = self._index.of(place)
        if self._index.behind or len(namespaces) > MAX_NAMESPACES or self._pidmap.source.incomplete():
            return False
        if not self._index.proven(place) and not self._learn_by_mount(place):
            return False
        ids = self._index.container_ids(place)
        try:
            for host_pid in self._by_key(namespaces, ns_pid):
                try:
                    elsewhere = self._facts.pidns(host_pid) not in namespaces
                    elsewhere = elsewhere and self._facts.container_id(host_pid) not in ids
                except ProcessGone:
                    elsewhere = False  # what can't be told of one that is still there proves nothing
                if not elsewhere:
                    with contextlib.suppress(ProcessGone):  # a zombie owns nothing
                        self._procfs.open_handle(host_pid).close()
                        return False
        except AccessDenied:
            return False
        return True

    def _learn_by_mount(self, place: Place) -> bool:
        """Whether a container's first process has the directory at HAMi's place; it is learned then.

        The servers of virtual machines have it elsewhere, and gVisor's is known by its program.
        """
        for host_pid in self._index.first_processes(place):
            with contextlib.suppress(AccessDenied, ProcessGone, TooLarge):
                points = [
                    each.mount_point
                    for each in self._procfs.mounts(host_pid)
                    if place == (each.device, each.root)
                ]
                if any(point.endswith("/vgpu") for point in points) and not self._procfs.program(
                    host_pid
                ).startswith("runsc"):
                    self.learn(place, host_pid)
                    return True
        return False

    # -- candidates ---------------------------------------------------------------------------------

    def _by_key(self, namespaces: frozenset[int], ns_pid: int) -> list[int]:
        """Host PIDs of processes with that number in those namespaces, or in the host's."""
        searched = namespaces | {HOST_PIDNS}
        found = []
        for host_pid in self._pidmap.candidates_in(ns_pid, searched):
            with contextlib.suppress(ProcessGone, AccessDenied):  # it is reported when it is checked
                if self._facts.pidns(host_pid) not in searched:
                    continue
            found.append(host_pid)
        return found

    def _walk(self, place: _Searched, seen: Seen, ns_pid: int, besides: list[int]) -> _Findings:
        """Ask every process of the node with that number, ``besides`` those that were asked.

        It goes on for a moment with each refresh, however many namespaces there are, and proves nothing before its end.
        """
        found = _Findings()
        found.cut = True
        if not self._walks.may_go_on(place, again=bool(besides)):
            return found
        walk = self._walks.walk(place, seen, ns_pid)
        if walk is None:
            return found
        until = self._walks.until()
        for host_pid in itertools.chain(walk.held, walk.left):
            if time.thread_time() > until:
                walk.held = (host_pid,)
                return found
            if host_pid and host_pid not in besides and self._concerns(host_pid, place):
                walk.concerned.add(host_pid)
        walk.held = ()
        # They are judged in one go: what was seen of the first ones may not be true any more. If there are too many for
        # that, what was read of them is remembered, so the next refresh gets further.
        concerned = sorted(walk.concerned)
        found = self._search(concerned, place, seen, ns_pid, frozenset(), until=self._walks.until())
        if not found.cut:
            self._walks.ended(place)
        return found

    def _concerns(self, host_pid: int, place: _Searched) -> bool:
        """Whether that process has anything to do with the place, as far as is known."""
        try:
            return self._may_fit(host_pid, place, frozenset())
        except ProcessGone:
            return False
        except (AccessDenied, TooLarge):
            return True

    # -- one candidate ------------------------------------------------------------------------------

    def _search(
        self,
        host_pids: list[int],
        place: _Searched,
        seen: Seen,
        ns_pid: int,
        namespaces: frozenset[int],
        *,
        until: float | None = None,
    ) -> _Findings:
        """Ask these; those not asked by ``until``, in this thread's CPU time, cut it off: then it proves nothing."""
        found = _Findings()
        for host_pid in host_pids:
            if until is not None and time.thread_time() > until:
                found.cut = True
                break
            found.asked.append(host_pid)
            try:
                handle = self._examine(host_pid, place, seen, ns_pid, namespaces)
                if handle is not None:
                    found.fitting.append(handle)
            except _Unfit as unfit:
                found.seen.add(unfit.reason)
                if unfit.reason in _MAY_FIT:
                    found.hidden.append(host_pid)
            except AccessDenied:
                found.seen.add(UnresolvedReason.ACCESS_DENIED)
                found.hidden.append(host_pid)
            except ProcessGone:
                continue  # also a zombie that nobody reaps: it owns nothing any more
            except BaseException:  # no descriptors left: none must be lost
                found.close()
                raise
        return found

    def _examine(
        self, host_pid: int, place: _Searched, seen: Seen, ns_pid: int, namespaces: frozenset[int]
    ) -> ProcessHandle | None:
        """Its handle if it fits, None if it has nothing to do with the place; `_Unfit` otherwise."""
        arrival, about = self._pidmap.arrival(host_pid), (place, seen)
        epoch, now = self._pidmap.refreshes, self._clock()
        failure = self._failed.get(host_pid)
        if failure and (failure.arrival, failure.about) == (arrival, about):
            if failure.epoch == epoch or now < failure.until:
                raise _Unfit(failure.reason)
        else:
            failure = None
        try:
            if not self._may_fit(host_pid, place, namespaces):
                return None
            handle = self._hold(host_pid, place, seen, ns_pid, namespaces)
        except (_Unfit, TooLarge) as error:
            reason = error.reason if isinstance(error, _Unfit) else UnresolvedReason.TOO_LARGE
            pause = longer(failure.pause, FIRST_PAUSE, LONGEST_PAUSE) if failure else 0.0
            self._failed = self._facts.pruned(self._failed)
            self._failed[host_pid] = _Failure(
                arrival=arrival, about=about, epoch=epoch, until=now + pause, pause=pause, reason=reason
            )
            raise _Unfit(reason) from None
        self._failed.pop(host_pid, None)
        return handle

    def _may_fit(self, host_pid: int, place: _Searched, namespaces: frozenset[int]) -> bool:
        if isinstance(place, MappedFile):
            return maps_file(self._procfs, host_pid, place.device, place.inode, writable=True)
        if place in self._facts.directories(host_pid, place):
            return True
        # In the host's namespace a process has that number by chance, unless the container is there.
        return bool(namespaces) and (HOST_PIDNS in namespaces or self._facts.pidns(host_pid) != HOST_PIDNS)

    def _hold(
        self, host_pid: int, place: _Searched, seen: Seen, ns_pid: int, namespaces: frozenset[int]
    ) -> ProcessHandle:
        """Take hold of the process, then check everything again; `_Unfit` if it is not the owner after all."""
        procfs = self._procfs
        with verify(procfs, host_pid, keep=True) as handle:
            if handle.process.ns_pids[-1:] != (ns_pid,):
                raise ProcessGone(f"{host_pid} is another process now")
            if namespaces and len(handle.process.ns_pids) > 1 and procfs.pidns(host_pid) not in namespaces:
                raise ProcessGone(f"{host_pid} is another process now")
            if isinstance(place, MappedFile):
                mapped = maps_file(procfs, host_pid, place.device, place.inode, writable=True)
                self._check_file(host_pid, place)
            else:
                self._check_container(host_pid, place, namespaces)
                mapped = maps_file(procfs, host_pid, *seen.shown)
            if not mapped:
                raise _Unfit(UnresolvedReason.NOT_MAPPED)
        return handle

    def _check_container(self, host_pid: int, place: SharedDirectory, namespaces: frozenset[int]) -> None:
        """The directory is mounted, or the process is in the container all the same: after chroot, in its own mounts.

        Such a process shows no mount, which proves nothing. It is in the container if its cgroup says so, by the id
        of a process that has the mount.
        """
        if self._procfs.has_mount(host_pid, place.device, place.root):
            return
        if not namespaces:
            raise ProcessGone(f"{host_pid} is another process now")
        if self._facts.container_id(host_pid) not in self._index.container_ids(place):
            raise _Unfit(UnresolvedReason.OTHER_CONTAINER)

    def _check_file(self, host_pid: int, place: MappedFile) -> None:
        """Raise `_Unfit` unless the process holds this very file open: maps alone can't distinguish it from another."""
        opened = opened_by_name(self._procfs, host_pid, place.file.path.rsplit("/", 1)[-1])
        mounts = self._procfs.mounts(host_pid) if opened else []
        places = {place_of(each, mounts) for each in opened if each.writable}
        if place.file in places:
            return
        raise _Unfit(
            UnresolvedReason.NOT_MAPPED if places and None not in places else UnresolvedReason.UNPROVEN
        )

    def _any_beside(self, host_pid: int, others: list[int], beside: set[str]) -> bool:
        """Whether any of the others may be in that process's container, or one beside, as far as their cgroups show.

        A tenant that makes itself unreadable (a mount table of many MiB) hides nobody's owner but its own.
        """
        if not others:
            return False
        own = self._facts.container_id(host_pid)
        return not own or any(self._facts.container_id(other) in {None, "", own, *beside} for other in others)


class _Failure(NamedTuple):
    """Why a process was not the owner, for which file, and until when it is not checked again."""

    arrival: tuple[int, int]
    about: tuple[_Searched, Seen]
    epoch: int
    until: float
    pause: float
    reason: UnresolvedReason


class _Findings:
    """What a search found: handles of those that fit, and those that could not be judged, which may fit as well."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.fitting: list[ProcessHandle] = []
        self.hidden: list[int] = []
        self.seen: set[UnresolvedReason] = set()
        self.cut = False

    def add(self, other: _Findings) -> None:
        self.asked += other.asked
        self.cut = self.cut or other.cut
        self.fitting += other.fitting
        self.hidden += other.hidden
        self.seen |= other.seen

    def close(self) -> None:
        for handle in self.fitting:
            handle.close()


class _Unfit(Exception):
    def __init__(self, reason: UnresolvedReason) -> None:
        super().__init__(reason)
        self.reason = reason


#: They may be the owner for all that can be seen of them.
_MAY_FIT = (UnresolvedReason.UNPROVEN, UnresolvedReason.TOO_LARGE)
_WORST_FIRST = (
    UnresolvedReason.ACCESS_DENIED,
    UnresolvedReason.TOO_LARGE,
    UnresolvedReason.OTHER_CONTAINER,
    UnresolvedReason.UNPROVEN,
    UnresolvedReason.NOT_MAPPED,
)
