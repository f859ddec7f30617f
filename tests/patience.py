"""A test's patience: many times the usual time of an event, so that a busy machine fails no test."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

#: Seconds; spent only if the event never comes.
PATIENCE_S: Final = 180.0


def until(condition: Callable[[], object], what: str = "it", timeout_s: float = PATIENCE_S) -> float:
    """Poll until the condition holds; return the seconds that took. Fails with `what` after the time limit."""
    began, waited = time.monotonic(), 0.0
    while not condition():
        assert waited < timeout_s, f"within {timeout_s} s not seen: {what}"
        time.sleep(min(0.002 + waited / 20, 0.025))  # poll slow conditions less often
        waited = time.monotonic() - began
    return waited


async def happens(condition: Callable[[], object]) -> None:
    """The same for the tasks of a loop."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s"
        await asyncio.sleep(0.01)


def never(condition: Callable[[], object], what: str, for_s: float = 0.5) -> None:
    deadline = time.monotonic() + for_s
    while time.monotonic() < deadline:
        assert not condition(), f"seen, and should not be: {what}"
        time.sleep(0.005)
