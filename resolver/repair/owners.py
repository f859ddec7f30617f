"""Owners of slots: their search, and their handles until their end is reported."""

import contextlib
import select
from collections import Counter

from resolver.base.counters import Shortage
from resolver.base.errors import AccessDenied, ProcessGone
from resolver.base.reasons import UnresolvedReason
from resolver.containers.log_names import ContainerNames
from resolver.hami.owner_check import Pause
from resolver.hami.slot_owner import OwnerFinder
from resolver.linux.cgroup import NO_CONTAINER, ContainerCgroup
from resolver.linux.procfs import ProcessHandle, ProcessIdentity, Procfs
from resolver.pids.pidmap import PidMap
from resolver.repair.abandoned import Abandoned
from resolver.repair.region import RegionRepairs
from resolver.repair.slots import OwnedSlot
from resolver.workers.means import Shortages, shortage_of


class Owners:
    """Owners of all resolved slots, watched by one epoll."""

    def __init__(
        self,
        procfs: Procfs,
        pidmap: PidMap,
        names: ContainerNames,
        finder: OwnerFinder,
        abandoned: Abandoned,
    ) -> None:
        self.finder, self._abandoned = finder, abandoned
        self._procfs, self._pidmap, self._names = procfs, pidmap, names
        self.exits = select.epoll()
        self._watched: dict[int, tuple[RegionRepairs, OwnedSlot]] = {}  # by the handle's descriptor
        self._unregistered = set[int]()  # polled, because a pidfd or an epoll watch is missing
        self.means = Shortages("the watch over owners")
        self._slots = Counter[int]()  # by host PID
        self._owners: dict[int, tuple[ProcessIdentity, ContainerCgroup, str]] = {}
        self.changes = 0  # owners that came or went, ever

    def __contains__(self, host_pid: object) -> bool:
        return host_pid in self._owners

    def process(self, host_pid: int) -> ProcessIdentity | None:
        return self._owners[host_pid][0] if host_pid in self._owners else None

    def container(self, host_pid: int) -> ContainerCgroup:
        return self._owners[host_pid][1] if host_pid in self._owners else NO_CONTAINER

    def container_id(self, host_pid: int) -> str:
        """Return a slot owner's container id; empty without one."""
        return self.container(host_pid).container_id

    def by_container(self) -> dict[str, int]:
        """Return an owner's host PID per container with a resolved slot."""
        owners = ((owner.container_id, host_pid) for host_pid, (_, owner, _) in self._owners.items())
        return {container_id: host_pid for container_id, host_pid in owners if container_id}

    @property
    def fd(self) -> int:
        """Descriptor, readable when an owner with a pidfd has ended."""
        return self.exits.fileno()

    @property
    def polled(self) -> bool:
        """True if any owner lacks a pidfd (before Linux 5.3), or an epoll watch."""
        return bool(self._unregistered)

    async def search(self, repairs: RegionRepairs, index: int, now: float, pause: Pause) -> None:
        """Find a slot's owner, and watch it; else decide if the slot is dead or the file may be abandoned."""
        slots, proof, payer = repairs.slots, repairs.proof, repairs.ownership.account
        ns_pid, hostpid, _ = slots.at(index)
        found = await self.finder.owner(proof, repairs.shown, ns_pid, payer, hostpid, pause)
        if repairs.closed:
            if isinstance(found, ProcessHandle):
                found.close()
            return
        *_, state = slots.at(index)
        if state is not None:
            if slots.keeps_owner(state, found):
                return
            self.unwatch(state)
        if isinstance(found, ProcessHandle):
            self.watch(repairs, slots.own(index, found))
            return
        missed = slots.not_found(index, found, now)
        undecided = found is UnresolvedReason.OVER_BUDGET and not missed.dead
        if found is UnresolvedReason.OTHER_CONTAINER and proof.open:
            slots.call_dead(index, dead=False)  # another container of the pod uses the file
        elif found is UnresolvedReason.NO_SUCH_PROCESS and not missed.dead and missed.looks > 1:
            dead = self.finder.vacant(proof, ns_pid)
            slots.call_dead(index, dead=dead)
            undecided = not dead
        if undecided:
            self._abandoned.suspect(repairs)

    def watch(self, repairs: RegionRepairs, state: OwnedSlot) -> None:
        """Watch for an owner's end, and find its container: the directory may name an init container."""
        owner, ownership = state.owner, repairs.ownership
        self._watched[owner.fd] = repairs, state
        self.changes += 1
        self._unregistered.add(owner.fd)
        try:
            if owner.is_pidfd:
                self.exits.register(owner.fd, select.EPOLLIN)
                self._unregistered.remove(owner.fd)
                self.means.recovered()
        except OSError as error:
            why = f"the ends of slots' owners are polled: {error.strerror}"
            self.means.refused(shortage_of(error.errno) or Shortage.WATCHES, why)
        host_pid = owner.process.host_pid
        self._slots[host_pid] += 1
        container = self.container(host_pid)
        with contextlib.suppress(ProcessGone, AccessDenied):
            container = self._procfs.container(host_pid)
        beyond = "" if ownership.claim else ownership.container  # the name kept after its end
        self._owners[host_pid] = owner.process, container, beyond or container.container_id
        self._names.refresh()
        name = self._names.of(container.container_id)
        state.named(container.pod_uid or "", name.container if name else "")

    def unwatch(self, state: OwnedSlot) -> None:
        """Forget the slot's owner and return its handle."""
        owner = state.owner
        if self._watched.pop(owner.fd, None) is not None:
            self.changes += 1
            if owner.fd not in self._unregistered:
                self.exits.unregister(owner.fd)
            self._unregistered.discard(owner.fd)
            host_pid = owner.process.host_pid
            self._slots[host_pid] -= 1
            if not self._slots[host_pid]:
                del self._slots[host_pid]
                self._pidmap.name_container(host_pid, self._owners.pop(host_pid)[2])
        owner.close()

    def release(self, repairs: RegionRepairs) -> None:
        """Close a region, and forget its owners and its container."""
        for state in repairs.slots.owned.values():
            self.unwatch(state)
        repairs.close()
        self.finder.forget(repairs.proof)
        self._abandoned.forget(repairs.region.path)

    def note_ends(self) -> None:
        """Note ends of owners in their regions."""
        if not self._watched:
            return
        ended = [self._watched[fd] for fd, _ in self.exits.poll(0)]
        polled = [self._watched[fd] for fd in self._unregistered]
        ended += [(repairs, state) for repairs, state in polled if not state.owner.alive()]
        for repairs, state in ended:
            self.unwatch(state)
            repairs.ended(state)

    def close(self) -> None:
        """Close the epoll; the handles belong to the slots."""
        self.exits.close()
