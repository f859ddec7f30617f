"""Where PIDs come from. One protocol; `resolver.pids.ladder` takes the best source that works here.

There are two kinds: a *lister* reads what came and went and is indexed by `resolver.pids.listing.Listing`; the
kernel's own map is asked directly (`resolver.pids.bpf.Mapped`). A source answers from what it knows and never guesses;
a caller that writes or prints an answer verifies it first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from resolver.pids.bpf_map import BpfPidMap


class PidSource(Protocol):
    """What every source offers. PIDs are those of the reader's namespace (the host's, in production)."""

    name: str
    #: Whether `candidates` makes use of a namespace that it is given.
    namespaced: bool

    def refresh(self) -> None:
        """Know of every process that exists at the time of the call."""

    def ahead(self) -> Iterator[None]:
        """Do the long part of the next `refresh`, a process at a time; may be left at any point.

        The `refresh` right after its end, with nothing in between, need not list the processes again.
        """

    def look(self, host_pid: int) -> None:
        """Know of the process with that host PID, if there is one; nothing else is brought up to date."""

    @property
    def tend_at(self) -> float:
        """When `tend` is to be called, on the monotonic clock, though there is no other reason for a pass."""

    def tend(self) -> None:
        """Called with every pass, whether anything is asked or not: cheap upkeep."""

    def candidates(self, ns_pid: int, pidns: int | None = None) -> list[int]:
        """Host PIDs of every process, in whatever namespace, whose own (innermost) number is ``ns_pid``.

        A source that knows namespaces leaves out those that are not in ``pidns``, if it is given.
        """

    def everywhere(self, ns_pid: int) -> Iterator[int]:
        """The same of all namespaces, one after the other: 0 where nobody has that number; may be left at any point.

        However long it takes: who has it all the while is among them.
        """

    def namespaces_of(self, host_pid: int, arrival: int) -> tuple[int, ...]:
        """Inodes of the PID namespaces that the process which arrived then is in, the host's first; none: not known."""

    def inits_mark(self) -> object:
        """A value that is equal to that of before as long as `inits` has nothing else to give; cheap."""

    def inits(self) -> Iterator[tuple[int, int]]:
        """Host PID and arrival of the first process of every PID namespace; that of the host may be left out."""

    def arrival(self, host_pid: int) -> int:
        """A number that this source never uses again for another process with that PID; 0 if it is not known."""

    def ended(self, host_pid: int) -> int:
        """The `arrival` of the last process with that host PID that ended within the last minute; 0 if none did."""

    def shortage(self) -> str:
        """Why it needs help to know every process, and what to do about it; empty while it needs none."""

    def incomplete(self) -> str:
        """Why a process that is not found may exist all the same; empty if it does not."""

    def exact(self) -> BpfPidMap | None:
        """The kernel's own map, while it holds every process, so that an absence proves one; None of other sources."""

    def trouble(self) -> str:
        """Why this source must not be used any more; empty while it works."""

    def counters(self) -> Mapping[str, int]:
        """What was lost, missed and repaired since the start."""

    def close(self) -> None:
        """Give everything back."""

    def __len__(self) -> int:
        """How many processes are known."""

    def __contains__(self, host_pid: object) -> bool:
        """Whether a process with that host PID is known."""


def close(source: PidSource) -> None:
    """Give back what a source has that is not used any more; one that cannot even be closed stops nobody."""
    try:
        source.close()
    except Exception as error:  # noqa: BLE001 - it is not in use any more, and nothing else can be done about it
        from resolver.log.journal import Journal

        Journal().log.warning("source_not_closed", source=source.name, why=f"{type(error).__name__}: {error}")


class ProcessChanges:
    """What a lister found: host PIDs that came, host PIDs that went, and how many could not be read."""

    __slots__ = ("came", "unreadable", "went")

    def __init__(self, came: list[int], went: list[int], unreadable: int) -> None:
        self.came = came
        self.went = went
        self.unreadable = unreadable


class Lister(Protocol):
    """A source that knows processes by listing them."""

    name: str

    def refresh(self) -> ProcessChanges:
        """What changed since the last call, up to now."""

    def ahead(self) -> Iterator[int]:
        """As `PidSource.ahead`: gives the host PIDs to `look` at, and 0 in between."""

    def look(self, host_pid: int) -> ProcessChanges:
        """What changed about the process with that host PID; never a thread's."""

    def ns_pids(self) -> Mapping[int, tuple[int, ...]]:
        """``{host_pid: its NSpid numbers, outermost first}`` as of the last refresh. Not to be changed."""

    @property
    def tend_at(self) -> float:
        """When `tend` is to be called, on the monotonic clock, though there is no other reason for a pass."""

    def tend(self) -> None:
        """Called with every pass, whether anything is asked or not: cheap upkeep."""

    def trouble(self) -> str:
        """Why this lister must not be used any more; empty while it works."""

    def counters(self) -> Mapping[str, int]:
        """What was lost, missed and repaired since the start."""

    def close(self) -> None:
        """Give everything back."""
