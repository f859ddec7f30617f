"""Coroutines that read by themselves (`resolver.workers.lanes.Direct`), run without an event loop."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


def at_once(work: Coroutine[Any, Any, _T]) -> _T:
    """Return what the coroutine returns, which waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        value: _T = end.value
        return value
    raise AssertionError(f"{work} waits")
