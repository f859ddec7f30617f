"""Coroutines that read by themselves (`resolver.workers.lanes.Direct`), run without an event loop."""

from __future__ import annotations

import math
from collections.abc import Coroutine
from typing import Any, TypeVar

from resolver.base.budget import Slices
from resolver.pids.pidmap import PidMap

_T = TypeVar("_T")


def catch_up(pidmap: PidMap, *, unhurried: bool = False) -> bool:
    """Read all processes, without an event loop."""
    return at_once(pidmap.catch_up(Slices(math.inf), unhurried=unhurried))


def at_once(work: Coroutine[Any, Any, _T]) -> _T:
    """Return what the coroutine returns, which waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        value: _T = end.value
        return value
    raise AssertionError(f"{work} waits")
