"""Sources of PIDs. Callers verify answers before writing or printing them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

from resolver.pids.bpf_map import KernelMap


class PidSource(ABC):
    """Source of host PIDs."""

    name: str
    #: True if `candidates` uses ``pidns``.
    namespaced = False
    #: Capacity of the kernel's map in processes; 0 without a map.
    room = 0

    @abstractmethod
    def refreshing(self) -> Iterator[None]:
        """Read every process, in steps; the caller may abandon the iterator."""

    def refresh(self) -> None:
        """Read every process."""
        for _ in self.refreshing():
            pass

    @abstractmethod
    def read(self, host_pid: int) -> None:
        """Read a process, if it exists."""

    @property
    def tend_at(self) -> float:
        """When `tend` is due (monotonic clock)."""
        return math.inf

    def tend(self) -> None:  # noqa: B027 - not every source needs it
        """Do cheap upkeep, with every pass."""

    @abstractmethod
    def candidates(self, ns_pid: int, pidns: int | None = None) -> list[int]:
        """Host PIDs with the innermost number ``ns_pid``, in ``pidns`` if `namespaced`."""

    def everywhere(self, ns_pid: int) -> Iterator[int]:
        """Yield such a host PID, or 0, for each namespace; complete for processes alive throughout."""
        return iter(self.candidates(ns_pid))

    def namespaces_of(self, _host_pid: int, _arrival: int) -> tuple[int, ...]:
        """PID namespace inodes, the host's first; empty if unknown."""
        return ()

    @abstractmethod
    def inits(self) -> Iterator[tuple[int, int]]:
        """Yield first processes' host PID and arrival, maybe without the host's."""

    @abstractmethod
    def arrival(self, host_pid: int) -> int:
        """Return a number unique among processes with that PID; 0 if unknown."""

    def shortage(self) -> str:
        """Explain why the source can't know every process, with the fix."""
        return ""

    def incomplete(self) -> str:
        """Explain why a missing process may exist."""
        return ""

    def exact(self) -> KernelMap | None:
        """Return the kernel's map while its absences are proof."""
        return None

    def trouble(self) -> str:
        """Explain why the source must be replaced."""
        return ""

    def counters(self) -> Mapping[str, int]:
        """Count losses and repairs since the start."""
        return {}

    def close(self) -> None:  # noqa: B027 - not every source holds something
        """Release all resources."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of known processes."""

    def __contains__(self, host_pid: object) -> bool:
        return isinstance(host_pid, int) and self.arrival(host_pid) != 0


def close(source: PidSource) -> None:
    """Close a replaced source; failures are only logged."""
    try:
        source.close()
    except Exception as error:  # noqa: BLE001 - it is not in use any more, and nothing else can be done about it
        from resolver.base.journal import Journal

        Journal().log.warning("source_not_closed", source=source.name, why=f"{type(error).__name__}: {error}")
