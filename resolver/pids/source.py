"""Sources of PIDs behind one interface. A caller that writes or prints an answer verifies it first."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from resolver.pids.bpf_map import BpfPidMap

#: How long a process that has ended is remembered, for a utilization sample that was taken before.
TOMBSTONE_SECONDS = 60.0


class PidSource(ABC):
    """Source of host PIDs."""

    name: str
    #: Whether `candidates` makes use of a namespace that it is given.
    namespaced = False

    @abstractmethod
    def refreshing(self) -> Iterator[None]:
        """Learn of every process, in steps; may be left at any point."""

    def refresh(self) -> None:
        """Learn of every process."""
        for _ in self.refreshing():
            pass

    @abstractmethod
    def look(self, host_pid: int) -> None:
        """Learn of one process, if it exists."""

    @property
    def tend_at(self) -> float:
        """Return when `tend` is due, on the monotonic clock."""
        return math.inf

    def tend(self) -> None:  # noqa: B027 - not every source needs it
        """Do cheap upkeep; called with every pass."""

    @abstractmethod
    def candidates(self, ns_pid: int, pidns: int | None = None) -> list[int]:
        """Return host PIDs with the innermost number ``ns_pid``, in ``pidns`` if `namespaced`."""

    def everywhere(self, ns_pid: int) -> Iterator[int]:
        """Yield them for each namespace, or 0; complete for processes that live all the while."""
        return iter(self.candidates(ns_pid))

    def namespaces_of(self, _host_pid: int, _arrival: int) -> tuple[int, ...]:
        """Return a process's PID namespace inodes, the host's first; empty if unknown."""
        return ()

    @abstractmethod
    def inits_mark(self) -> object:
        """Return a cheap value that is equal as long as `inits` is."""

    @abstractmethod
    def inits(self) -> Iterator[tuple[int, int]]:
        """Yield host PID and arrival of first processes, maybe without the host's."""

    @abstractmethod
    def arrival(self, host_pid: int) -> int:
        """Return a number that no other process with that PID gets; 0 if unknown."""

    @abstractmethod
    def ended(self, host_pid: int) -> int:
        """Return the `arrival` of the last process that ended within a minute, or 0."""

    def shortage(self) -> str:
        """Explain why it needs help to know every process, with the fix; or empty."""
        return ""

    def incomplete(self) -> str:
        """Explain why a process that is not found may exist; or empty."""
        return ""

    def exact(self) -> BpfPidMap | None:
        """Return the kernel's map while its absences are proof; or None."""
        return None

    def trouble(self) -> str:
        """Explain why this source must be left; or empty."""
        return ""

    def counters(self) -> Mapping[str, int]:
        """Return losses and repairs since the start."""
        return {}

    def close(self) -> None:  # noqa: B027 - not every source holds something
        """Give everything back."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of known processes."""

    def __contains__(self, host_pid: object) -> bool:
        return isinstance(host_pid, int) and self.arrival(host_pid) != 0


def close(source: PidSource) -> None:
    """Close a replaced source; a failure is logged and stops nothing."""
    try:
        source.close()
    except Exception as error:  # noqa: BLE001 - it is not in use any more, and nothing else can be done about it
        from resolver.base.journal import Journal

        Journal().log.warning("source_not_closed", source=source.name, why=f"{type(error).__name__}: {error}")
