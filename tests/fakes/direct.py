"""Readers that work in this process instead of a lane, and coroutines run without an event loop."""

import asyncio
import math
import os
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from resolver.base.budget import Slices
from resolver.linux.procfs import Procfs
from resolver.pids.pidmap import PidMap
from resolver.workers.lanes import TenantReader

_T = TypeVar("_T")


class Waiting(TenantReader):
    """Reads in this process, after other coroutines had a turn, as with a lane."""

    async def ask(self, payer: str, about: str, function: Callable[..., Any], *arguments: Any) -> Any:
        await asyncio.sleep(0)
        return await super().ask(payer, about, function, *arguments)


class Stalling(TenantReader):
    """Reads in this process; reads about the process ``host_pid`` wait until ``go`` is set."""

    def __init__(self, procfs: Procfs, host_pid: int) -> None:
        super().__init__(procfs)
        self.host_pid, self.go = host_pid, asyncio.Event()

    async def ask(self, payer: str, about: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if about and arguments[0] == self.host_pid:
            await self.go.wait()
        return await super().ask(payer, about, function, *arguments)


@contextmanager
def ended_lane() -> Iterator[str]:
    """Yield the path of a descriptor of a child that has ended and is not reaped yet."""
    child = subprocess.Popen(["/bin/true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    yield f"/proc/{child.pid}/fd/5"
    child.wait()


class Refusing(TenantReader):
    """Reads in this process, records accounts and functions, and raises the ``errors`` given by function name."""

    def __init__(self, procfs: Procfs, **errors: Exception) -> None:
        super().__init__(procfs)
        self.errors, self.asked = errors, list[tuple[str, str]]()

    async def ask(self, payer: str, about: str, function: Callable[..., Any], *arguments: Any) -> Any:
        self.asked.append((about, function.__name__))
        if function.__name__ in self.errors:
            raise self.errors[function.__name__]
        return await super().ask(payer, about, function, *arguments)


def catch_up(pidmap: PidMap, *, rate_limited: bool = False) -> bool:
    return at_once(pidmap.catch_up(Slices(math.inf), rate_limited=rate_limited))


def at_once(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine that never waits, and return its result."""
    try:
        work.send(None)
    except StopIteration as end:
        value: _T = end.value
        return value
    raise AssertionError(f"{work} waits")
