"""The owner of a slot in a tree of files that every container has as a whole: KAI's placement.

There any tenant can make a directory with anybody's name, exchange directories, and open, map and write any file. What
it can't choose is its control group and what kubelet calls its container. So the owner is the process that

- has the slot's number as its own, maps the very file and holds it open for writing,
- is in the pod that the directory names, by the only pod in its cgroup,
- is in the container that the directory names, by the name that kubelet gave the log of the container in its cgroup,

and no other process on the node could be meant: every one that has this number, maps this file, and holds any file in
the tree open for writing, as HAMi-core does for as long as it lives. A file that was given another name is still open
in the processes that use it, so its slots are nobody else's. HAMi's monitor maps every file and holds none.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from resolver.errors import AccessDenied, ProcessGone
from resolver.linux.cgroup import NO_CONTAINER, only_container
from resolver.linux.mappings import maps_file, open_for_writing, place_of
from resolver.linux.procfs import TooLarge
from resolver.lookup.verify import verify
from resolver.reasons import UnresolvedReason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resolver.containers.log_names import ContainerNames
    from resolver.hami.discovery import PodFile
    from resolver.linux.cgroup import ContainerCgroup
    from resolver.linux.mappings import FilePlace
    from resolver.linux.procfs import ProcessHandle, Procfs

    #: Tells a process from a later one with its host PID, see `PidMap.arrival`.
    Arrival = tuple[int, int]
    #: Whose slot: in which file, with which number, and when the file was last written to.
    Question = tuple[PodFile, int, int]


#: Searches that were not ended; of those that are never asked again the first ones go.
MAX_BEGUN = 256


class PodOwner:
    """Judges the processes with a slot's number."""

    def __init__(self, procfs: Procfs, names: ContainerNames) -> None:
        self._procfs = procfs
        self._names = names
        self._begun: dict[
            Question, dict[int, Arrival]
        ] = {}  # who has nothing to do with it, as far as was asked

    def find(
        self, asked: Mapping[int, Arrival], about: Question, until: float
    ) -> ProcessHandle | UnresolvedReason:
        """The one of them that owns the slot; they are all that have its number. The caller closes the handle.

        ``until`` is in this thread's CPU time: those that were not asked by then could be meant as well, and the next
        call goes on with them. Whoever begins to use the file meanwhile writes to it, and so it is another question.
        """
        place, ns_pid, _ = about
        own: list[ProcessHandle] = []
        reasons: set[UnresolvedReason] = set()
        strangers = self._begun.pop(about, {})
        try:
            for host_pid, arrival in asked.items():
                if strangers.get(host_pid) == arrival:
                    continue
                if time.thread_time() > until:
                    reasons.add(UnresolvedReason.OVER_BUDGET)
                    self._remember(about, strangers)
                    break
                verdict = self._judge(host_pid, place, ns_pid)
                if verdict is None:
                    strangers[host_pid] = arrival
                elif isinstance(verdict, UnresolvedReason):
                    reasons.add(verdict)
                else:
                    own.append(verdict)
            if len(own) == 1 and not reasons & _MAY_BE_MEANT:
                return own.pop()
        finally:
            for handle in own:
                handle.close()
        if len(own) > 1 or (own and UnresolvedReason.OTHER_CONTAINER in reasons):
            reasons.add(UnresolvedReason.AMBIGUOUS)
        return next((each for each in _WORST_FIRST if each in reasons), UnresolvedReason.NO_SUCH_PROCESS)

    def _remember(self, about: Question, strangers: dict[int, Arrival]) -> None:
        if len(self._begun) >= MAX_BEGUN:
            self._begun.pop(next(iter(self._begun)))
        self._begun[about] = strangers

    def _judge(self, host_pid: int, place: PodFile, ns_pid: int) -> ProcessHandle | UnresolvedReason | None:
        """Its handle if it is an owner, why not if it could be meant, None if it has nothing to do with the slot."""
        try:
            if not maps_file(self._procfs, host_pid, place.device, place.inode, writable=True):
                return UnresolvedReason.NOT_MAPPED if self._at_home(host_pid, place) else None
            return self._hold(host_pid, place, ns_pid)
        except ProcessGone:
            return None
        except (AccessDenied, TooLarge) as error:
            # One that can't be read hides nobody's owner but its own.
            if not self._may_be_at_home(host_pid, place):
                return None
            denied = isinstance(error, AccessDenied)
            return UnresolvedReason.ACCESS_DENIED if denied else UnresolvedReason.TOO_LARGE

    def _hold(self, host_pid: int, place: PodFile, ns_pid: int) -> ProcessHandle | UnresolvedReason | None:
        """The same of a process that maps the file, with everything checked after it was taken hold of."""
        reason: UnresolvedReason | None = None
        with verify(self._procfs, host_pid, keep=True) as handle:
            if handle.process.ns_pids[-1:] != (ns_pid,):
                raise ProcessGone(f"{host_pid} is another process now")
            held = self._held(host_pid, place)
            mapped = maps_file(self._procfs, host_pid, place.device, place.inode, writable=True)
            home = self._at_home(host_pid, place)
            if mapped and held:
                reason = self._unfit(host_pid, place, held)
            elif home:
                reason = UnresolvedReason.NOT_MAPPED
        if mapped and held and reason is None:
            return handle
        handle.close()
        return reason

    def _unfit(self, host_pid: int, place: PodFile, held: set[FilePlace | None]) -> UnresolvedReason | None:
        """Why a process that uses the file is not the owner; None if it is."""
        container = only_container(self._procfs.cgroup(host_pid))
        if container is None or container.pod_uid != place.pod_uid:
            return UnresolvedReason.OTHER_POD
        name = self._names.of(container.container_id)
        if name is None:
            return UnresolvedReason.UNPROVEN
        if name.container != place.container_name:
            return UnresolvedReason.OTHER_CONTAINER
        return None if place.file in held else UnresolvedReason.UNPROVEN

    def _held(self, host_pid: int, place: PodFile) -> set[FilePlace | None]:
        """Where the files are that it holds open for writing, in the tree or maybe this one; None: unknown."""
        opened = open_for_writing(self._procfs, host_pid)
        mounts = self._procfs.mounts(host_pid) if opened else []
        inside = f"{place.tree.path.rstrip('/')}/"
        held: set[FilePlace | None] = set()
        for each in opened:
            where = place_of(each, mounts)
            if where is None:  # through a mount that it does not have: what it was started with, mostly
                maybe = each.inode == 0
            else:
                maybe = where.device == place.tree.device and where.path.startswith(inside)
            if maybe or 0 != each.inode == place.opened:
                held.add(where)
        return held

    def _at_home(self, host_pid: int, place: PodFile) -> bool:
        with suppress(AccessDenied, ProcessGone):
            return self._container(host_pid).pod_uid == place.pod_uid
        return False

    def _may_be_at_home(self, host_pid: int, place: PodFile) -> bool:
        """Unless its cgroup names no such pod: that of the host's first process, which may be closed, names none."""
        try:
            text = self._procfs.cgroup(host_pid)
        except AccessDenied:
            return True
        except ProcessGone:
            return False
        return place.pod_uid in text or place.pod_uid.replace("-", "_") in text

    def _container(self, host_pid: int) -> ContainerCgroup:
        return only_container(self._procfs.cgroup(host_pid)) or NO_CONTAINER


#: As long as any of the others has one of these, it may be the one that the slot means.
_MAY_BE_MEANT = {
    UnresolvedReason.OTHER_POD,
    UnresolvedReason.OTHER_CONTAINER,
    UnresolvedReason.UNPROVEN,
    UnresolvedReason.ACCESS_DENIED,
    UnresolvedReason.TOO_LARGE,
    UnresolvedReason.OVER_BUDGET,
}
_WORST_FIRST = (
    UnresolvedReason.OVER_BUDGET,
    UnresolvedReason.ACCESS_DENIED,
    UnresolvedReason.TOO_LARGE,
    UnresolvedReason.OTHER_POD,
    UnresolvedReason.AMBIGUOUS,
    UnresolvedReason.OTHER_CONTAINER,
    UnresolvedReason.UNPROVEN,
    UnresolvedReason.NOT_MAPPED,
)
