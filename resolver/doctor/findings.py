"""Result of a check: a state, the finding, and a problem's cause and fix."""

from enum import StrEnum
from functools import partial
from typing import NamedTuple


class State(StrEnum):
    """From well to worst. ``warning``: the daemon works with restrictions, or not for long.

    ``unknown``: it can't be checked from here. ``failed``: some of the daemon's work is not done because of this.
    """

    OK = "ok"
    WARNING = "warning"
    UNKNOWN = "unknown"
    FAILED = "failed"


class Finding(NamedTuple):
    """State with words; ``cause`` and ``fix`` have a line for each problem, ``detail`` a compiler's output."""

    state: State
    found: str
    cause: str = ""
    fix: str = ""
    detail: str = ""


ok = partial(Finding, State.OK)
warning = partial(Finding, State.WARNING)
unknown = partial(Finding, State.UNKNOWN)
failed = partial(Finding, State.FAILED)


def together(well: str, troubles: list[Finding]) -> Finding:
    """Several findings as one: as bad as the worst, with the words of all, worst first. ``well`` if there are none."""
    if not troubles:
        return ok(well)
    troubles = sorted(troubles, key=lambda trouble: -list(State).index(trouble.state))
    summary = "; ".join(dict.fromkeys(trouble.found for trouble in troubles))
    cause, fix = (
        "\n".join(dict.fromkeys(texts)) for texts in zip(*(trouble[2:4] for trouble in troubles), strict=True)
    )
    return Finding(troubles[0].state, summary, cause, fix)
