"""Where PIDs come from. One protocol; `choose` takes the best source that works here.

A source answers from what it knows and never guesses; whoever writes or prints an answer verifies it first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


class Source(Protocol):
    """What every source offers. PIDs are those of the reader's namespace (the host's, in production)."""

    name: str

    def refresh(self) -> Changes:
        """Bring the source up to date with every process that exists at the time of the call."""

    def ns_pids(self) -> Mapping[int, tuple[int, ...]]:
        """``{host_pid: its NSpid numbers, outermost first}`` as of the last refresh. Not to be changed."""


class Changes:
    """What a refresh found: host PIDs that came, host PIDs that went, and how many could not be read."""

    __slots__ = ("came", "unreadable", "went")

    def __init__(self, came: list[int], went: list[int], unreadable: int) -> None:
        self.came = came
        self.went = went
        self.unreadable = unreadable
