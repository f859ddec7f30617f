"""The processes that own slots: each is held, and its end is reported at once."""

from __future__ import annotations

import contextlib
import select
from typing import TYPE_CHECKING

from resolver.errors import AccessDenied, ProcessGone

if TYPE_CHECKING:
    from resolver.linux.procfs import ProcessHandle, ProcessIdentity, Procfs
    from resolver.repair.slot_states import SlotState


class Owners:
    """Watches the owner of every resolved slot: one epoll for all, so that a pass costs one system call."""

    def __init__(self, procfs: Procfs) -> None:
        self._procfs = procfs
        self._exits = select.epoll()
        self._states: dict[int, SlotState] = {}  # by the handle's descriptor
        self._without_pidfd: set[int] = set()
        self._slots: dict[int, int] = {}  # host PID -> how many slots it owns
        self._container_ids: dict[int, str] = {}
        self._processes: dict[int, ProcessIdentity] = {}
        self.changes = 0  # how often one came or went

    def __contains__(self, host_pid: object) -> bool:
        return host_pid in self._slots

    def container_ids(self) -> frozenset[str]:
        """Ids of the containers that have at least one resolved slot."""
        return frozenset(self._container_ids.values())

    def process(self, host_pid: int) -> ProcessIdentity | None:
        """The process, if it owns a slot."""
        return self._processes.get(host_pid)

    def container_id(self, host_pid: int) -> str:
        """Id of the container of a process that owns a slot; empty if it has none."""
        return self._container_ids.get(host_pid, "")

    def by_container(self) -> dict[str, int]:
        """One process for each container that has a resolved slot."""
        return {container_id: host_pid for host_pid, container_id in self._container_ids.items()}

    @property
    def fd(self) -> int:
        """Readable when an owner has ended, but for those that can only be polled."""
        return self._exits.fileno()

    @property
    def polled(self) -> bool:
        """Whether some have no pidfd (before Linux 5.3), so that their end is not reported."""
        return bool(self._without_pidfd)

    def watch(self, state: SlotState, owner: ProcessHandle) -> None:
        """From now on report when this slot's owner ends."""
        self._states[owner.fd] = state
        self.changes += 1
        if owner.is_pidfd:
            self._exits.register(owner.fd, select.EPOLLIN)
        else:
            self._without_pidfd.add(owner.fd)
        host_pid = owner.process.host_pid
        self._slots[host_pid] = self._slots.get(host_pid, 0) + 1
        self._processes[host_pid] = owner.process
        with contextlib.suppress(ProcessGone, AccessDenied):
            container_id = self._procfs.container(host_pid).container_id
            if container_id:
                self._container_ids[host_pid] = container_id

    def unwatch(self, state: SlotState) -> None:
        """Forget the slot's owner and give its handle back; nothing happens if it has none."""
        owner = state.owner
        if owner is None:
            return
        if self._states.pop(owner.fd, None) is not None:
            self.changes += 1
            if owner.is_pidfd:
                self._exits.unregister(owner.fd)
            self._without_pidfd.discard(owner.fd)
            host_pid = owner.process.host_pid
            self._slots[host_pid] -= 1
            if not self._slots[host_pid]:
                del self._slots[host_pid]
                self._container_ids.pop(host_pid, None)
                self._processes.pop(host_pid, None)
        state.release()

    def ended(self) -> list[SlotState]:
        """The slots whose owner ended since the last call; they are not watched any more."""
        if not self._states:
            return []
        states = [self._states[fd] for fd, _ in self._exits.poll(0)]
        for fd in self._without_pidfd:
            owner = self._states[fd].owner
            if owner is not None and not owner.alive():
                states.append(self._states[fd])
        for state in states:
            self.unwatch(state)
            state.owner_ended()
        return states

    def close(self) -> None:
        """Close the epoll; the handles belong to the slots."""
        self._exits.close()
