"""What a check finds: a state, what was seen, and for what is not well a cause and a remedy."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class State(StrEnum):
    """From well to worst. ``unknown``: it cannot be told from here, which is not the same as well."""

    OK = "ok"
    WARNING = "warning"
    UNKNOWN = "unknown"
    FAILED = "failed"


#: The better first.
RANKING = tuple(State)


class Finding(NamedTuple):
    """``cause`` and ``remedy`` are empty while all is well; with several troubles they have a line for each.

    ``detail`` is what a compiler, a kernel or a library printed about it: lines for those who look into the cause.
    """

    state: State
    found: str
    cause: str = ""
    remedy: str = ""
    detail: str = ""


def ok(found: str) -> Finding:
    """All is well."""
    return Finding(State.OK, found)


def warning(found: str, cause: str, remedy: str) -> Finding:
    """The daemon does its work, but not as well as it could, or not for long."""
    return Finding(State.WARNING, found, cause, remedy)


def failed(found: str, cause: str, remedy: str) -> Finding:
    """Some of the daemon's work is not done because of this."""
    return Finding(State.FAILED, found, cause, remedy)


def unknown(found: str, cause: str, remedy: str) -> Finding:
    """Whether it is well cannot be told from here."""
    return Finding(State.UNKNOWN, found, cause, remedy)


def worst(states: Iterable[State]) -> State:
    """The worst of them; ok if there are none."""
    return max(states, key=RANKING.index, default=State.OK)


def together(well: str, troubles: list[Finding]) -> Finding:
    """Several findings as one: as bad as the worst, with the words of all, worst first. ``well`` if there are none."""
    if not troubles:
        return ok(well)
    troubles = sorted(troubles, key=lambda each: -RANKING.index(each.state))
    return Finding(
        troubles[0].state,
        "; ".join(dict.fromkeys(each.found for each in troubles)),
        "\n".join(dict.fromkeys(each.cause for each in troubles)),
        "\n".join(dict.fromkeys(each.remedy for each in troubles)),
    )


def several(number: int, one: str, more: str = "") -> str:
    """``1 file``, ``2 files``."""
    return f"{number} {one if number == 1 else more or one + 's'}"


def listed(names: Iterable[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def some(names: Iterable[str], most: int = 3) -> str:
    """A few of the names, and how many more there are."""
    all_of_them = list(names)
    more = len(all_of_them) - most
    return ", ".join(all_of_them[:most]) + (f" and {more} more" if more > 0 else "")
