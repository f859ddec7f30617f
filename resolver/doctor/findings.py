"""What a check finds: a state, what was seen, and a problem's cause and fix."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class State(StrEnum):
    """From well to worst. ``unknown``: it cannot be checked from here, which is not the same as ok."""

    OK = "ok"
    WARNING = "warning"
    UNKNOWN = "unknown"
    FAILED = "failed"


#: The better first.
RANKING = tuple(State)


class Finding(NamedTuple):
    """``cause`` and ``fix`` are empty while all is well; with several troubles they have a line for each.

    ``detail`` is what a compiler, a kernel or a library printed about it: lines for finding the cause.
    """

    state: State
    found: str
    cause: str = ""
    fix: str = ""
    detail: str = ""


def ok(found: str) -> Finding:
    """All is well."""
    return Finding(State.OK, found)


def warning(found: str, cause: str, fix: str) -> Finding:
    """The daemon does its work, but not as well as it could, or not for long."""
    return Finding(state=State.WARNING, found=found, cause=cause, fix=fix)


def failed(found: str, cause: str, fix: str) -> Finding:
    """Some of the daemon's work is not done because of this."""
    return Finding(state=State.FAILED, found=found, cause=cause, fix=fix)


def unknown(found: str, cause: str, fix: str) -> Finding:
    """Whether it is ok cannot be checked from here."""
    return Finding(state=State.UNKNOWN, found=found, cause=cause, fix=fix)


def worst(states: Iterable[State]) -> State:
    """The worst of them; ok if there are none."""
    return max(states, key=RANKING.index, default=State.OK)


def together(well: str, troubles: list[Finding]) -> Finding:
    """Several findings as one: as bad as the worst, with the words of all, worst first. ``well`` if there are none."""
    if not troubles:
        return ok(well)
    troubles = sorted(troubles, key=lambda each: -RANKING.index(each.state))
    return Finding(
        state=troubles[0].state,
        found="; ".join(dict.fromkeys(each.found for each in troubles)),
        cause="\n".join(dict.fromkeys(each.cause for each in troubles)),
        fix="\n".join(dict.fromkeys(each.fix for each in troubles)),
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
