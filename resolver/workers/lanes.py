"""Lanes: children for the reads that a tenant can delay in the kernel.

If the *first lane* is late (`LATE_SECONDS`) with a container's question, it is killed, and the *second lane* asks for
that container, ever more rarely, until it is quick again. A container pays by wall-clock time. Mount tables have one
lock for the machine: a late answer there blames no container, and a third lane reads them for a while, ever longer.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from resolver.base import errors
from resolver.base.counters import CounterName, Shortage
from resolver.base.errors import RegionRejected, TooSlow, WorkerFailed
from resolver.base.reasons import RegionReason
from resolver.base.retry import longer
from resolver.linux.procfs import TooLarge
from resolver.workers.child import LACKING
from resolver.workers.lane import ALL, WINDOW, load
from resolver.workers.means import shortage_of
from resolver.workers.supervisor import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from resolver.linux.procfs import Procfs

_T = TypeVar("_T")
#: Seconds in which the first lane has to answer, and the second one.
LATE_SECONDS, LONGEST_SECONDS = 0.1, 2.0
#: Seconds until a container that was late is asked again, doubled each time; forgotten after some quick minutes.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
_LOADED = (
    "resolver.containers.find",
    "resolver.hami.directory_reads",
    "resolver.hami.process_reads",
    "resolver.hami.region",
    "resolver.hami.region_location",
)
_HELLO = json.dumps([f"{load.__module__}:{load.__qualname__}", *_LOADED]).encode()
_RIGHTS = frozenset({"SYS_PTRACE", "DAC_OVERRIDE"})


class TenantReader(Protocol):
    """Answers questions that may wait."""

    async def ask(self, payer: str, about: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Result of a top-level ``function(procfs, *arguments)``, by way of JSON.

        Raises errors from `base.errors`, OSError, `TooSlow` and `WorkerFailed`. ``payer`` is charged; ``about`` is the
        container that can delay the answer, or `ALL`.
        """


def begin(
    work: Coroutine[Any, Any, _T], on_end: Callable[[], None] = lambda: None
) -> Future[_T] | asyncio.Task[_T]:
    """Begin a lane's work, and call ``on_end`` after it; without an event loop, do it now."""
    try:
        task = asyncio.get_running_loop().create_task(work)
    except RuntimeError:
        done: Future[_T] = Future()
    else:
        task.add_done_callback(lambda _: on_end())
        return task
    try:
        work.send(None)
    except StopIteration as end:
        done.set_result(end.value)
    except Exception as error:  # noqa: BLE001 - it is raised where the result is taken
        done.set_exception(error)
    return done


class Direct:
    """A `TenantReader` without a child, for commands and tests."""

    def __init__(self, procfs: Procfs) -> None:
        self._procfs = procfs

    async def ask(self, payer: str, about: str, function: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ARG002
        """Call it now."""
        return function(self._procfs, *arguments)


class Lanes:
    """The daemon's `TenantReader`; ``spend(account, seconds)`` charges a container."""

    def __init__(
        self, spend: Callable[[str, float], None] | None = None, counters: Counter[str] | None = None
    ) -> None:
        self.spend = spend or (lambda _account, _seconds: None)
        self._counters = counters if counters is not None else Counter()
        self._counters[CounterName.TOO_SLOW] += 0
        self._first, self._second, self._mounts = (
            WorkerProcess(
                name, "resolver.workers.lane", timeout=seconds, rights=_RIGHTS, window=WINDOW, hello=_HELLO
            )
            for name, seconds in (
                ("reader", LATE_SECONDS),
                ("second reader", LONGEST_SECONDS),
                ("mount reader", LONGEST_SECONDS),
            )
        )
        # Until when a container is not asked (`ALL`: the first lane is not), and that pause.
        self._late: dict[str, tuple[float, float]] = {}
        self._closed = False
        self._slow = set[str]()  # those that the first lane doesn't serve

    @property
    def workers(self) -> Sequence[WorkerProcess]:
        """All lanes."""
        return self._first, self._second, self._mounts

    def too_slow(self) -> frozenset[str]:
        """Containers that were late and not quick since."""
        return frozenset(self._slow - {ALL})

    async def ask(self, payer: str, about: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """See `TenantReader.ask`. Once closed, who asks is cancelled."""
        if self._closed:
            raise asyncio.CancelledError
        message = json.dumps([f"{function.__module__}:{function.__qualname__}", *arguments]).encode()
        slow, lane = about in self._slow, self._first
        if slow and about == ALL:
            lane = self._mounts
        elif slow:
            self._make_appointment(about)
            lane = self._second
        try:
            text = await lane.request(message, on_late=partial(self._was_late, about))
            wall, own_cpu, error, value = json.loads(text)
        except ValueError:
            raise lane.malformed("answered something malformed") from None
        except OSError as failure:  # counted already
            why = f"the {lane.name} could not be started: {failure.strerror}"
            raise WorkerFailed(why, waiting=True) from None
        except WorkerFailed as failure:
            if not failure.late:
                raise
            raise TooSlow(f"what its container makes the kernel wait for: {failure}") from None
        self.spend(payer, wall if about != ALL else own_cpu)
        if slow and wall < LATE_SECONDS and (about != ALL or time.monotonic() >= self._late[ALL][0]):
            self._slow.discard(about)
        if error == "OSError" and value[0] in LACKING:
            why = f"the {lane.name} could not work: {value[1]}"
            lane.means.refused(shortage_of(value[0]) or Shortage.MEMORY, why)
            raise WorkerFailed(why, waiting=True)
        lane.means.sufficed()
        if error:
            raise _raised(error, value)
        return value

    def _make_appointment(self, about: str) -> None:
        now = time.monotonic()
        until, pause = self._late[about]
        if now < until or self._second.busy:
            raise TooSlow("its container made the kernel wait: it is asked again later")
        self._late[about] = now + pause, pause

    def _was_late(self, about: str) -> None:
        now = time.monotonic()
        self._counters[CounterName.TOO_SLOW] += 1
        known = self._late.get(about)
        pause = longer(known[1] if known else 0.0, FIRST_PAUSE, LONGEST_PAUSE)
        self._late[about] = now + pause, pause
        self._slow.add(about)

    def tidy(self) -> None:
        """Forget quick containers, and end the other lanes if nothing is slow."""
        now = time.monotonic()
        if self._late:
            self._late = {
                about: (until, pause)
                for about, (until, pause) in self._late.items()
                if now < until + 2 * LONGEST_PAUSE
            }
            self._slow &= self._late.keys()
        for lane, needed in ((self._second, self._slow - {ALL}), (self._mounts, ALL in self._slow)):
            if not needed and not lane.busy and lane.host_pid:
                lane.stop(0)
            lane.reap()

    def close(self) -> None:
        """End all, for good: a task that goes on must not start another one."""
        self._closed = True
        for lane in self.workers:
            lane.stop()


def _raised(error: str, value: list[Any]) -> Exception:
    if error == "RegionRejected":
        return RegionRejected(RegionReason(value[0]), value[1])
    if error == "OSError":
        return OSError(*value)
    kind = TooLarge if error == "TooLarge" else getattr(errors, error)
    return kind(*value)
