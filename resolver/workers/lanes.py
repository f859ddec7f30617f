"""Lanes: children for the reads that a tenant can delay in the kernel.

If the *first lane* is late (`LATE_SECONDS`) with a container's question, it is killed, and the *second lane* asks for
that container, ever more rarely, until it is quick again. If a question takes the first lane over `COSTLY_SECONDS` of
CPU, the second lane answers it, and serves the container for a while. Accounts take turns before each lane, and pay by
wall-clock time, less waits for a CPU. Mount tables and file leases have one lock each for the machine: a late answer
there blames no container, and a lane of their own has them for a while, ever longer.
"""

import asyncio
import json
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from resolver.base import errors
from resolver.base.budget import Budgets
from resolver.base.counters import CounterName, Shortage
from resolver.base.errors import RegionRejected, TooSlow, WorkerFailed
from resolver.base.reasons import RegionReason
from resolver.base.retry import longer
from resolver.linux.procfs import Procfs, TooLarge
from resolver.workers.child import LACKING
from resolver.workers.lane import ALL, LEASES, load
from resolver.workers.means import shortage_of
from resolver.workers.supervisor import WorkerProcess

#: Time limits of the first and the second lane, in seconds.
LATE_SECONDS, LONGEST_SECONDS = 0.1, 2.0
#: CPU seconds after which a question moves its container to the second lane, and for how many seconds.
COSTLY_SECONDS, COSTLY_FOR = 0.02, 60.0
#: Most questions sent to a lane at a time: no other account's question can overtake those.
_ROOM = 4
#: Seconds before a late container is asked again, doubled each time; reset after some quick minutes.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
_LOADED = (
    "resolver.containers.find",
    "resolver.hami.directory_reads",
    "resolver.hami.process_reads",
    "resolver.hami.region",
)
_RIGHTS = frozenset({"SYS_PTRACE", "DAC_OVERRIDE"})


class _Elsewhere(Exception):
    """The first lane gave the question up, or its container was late while the question waited for that lane."""


class TenantReader:
    """Answers questions that the kernel can delay. This base class has no child: it is for commands and tests."""

    workers: Sequence[WorkerProcess] = ()

    def __init__(self, procfs: Procfs) -> None:
        self._procfs, self.budgets = procfs, Budgets()

    def tidy(self) -> None:
        """Forget outdated state."""

    async def ask(self, payer: str, about: str, function: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ARG002
        """Return the result of a top-level ``function(procfs, *arguments)``; from a child, by way of JSON.

        Raises errors from `base.errors`, OSError, `TooSlow` and `WorkerFailed`. ``payer`` is charged; ``about`` is the
        container that can delay the answer, or `ALL`.
        """
        return function(self._procfs, *arguments)


class Line:
    """Line before a lane that takes ``room`` questions: accounts take turns, those with most budget ``left`` first."""

    def __init__(self, room: int, left: Callable[[str], float]) -> None:
        self._room, self._left = room, left
        self._at_lane: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def turn(self, account: str) -> AsyncIterator[None]:
        """Wait for the account's turn; the block is its question."""
        if self._waiting or self._at_lane.total() >= self._room:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(account, deque()).append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if mine.done() and not mine.cancelled():
                    self._leave(account)  # its turn had come
                raise
        else:
            self._at_lane[account] += 1
        try:
            yield
        finally:
            self._leave(account)

    def _leave(self, account: str) -> None:
        self._at_lane[account] -= 1
        self._at_lane += Counter()  # drop accounts without any
        while self._waiting and self._at_lane.total() < self._room:
            chosen = min(self._waiting, key=lambda each: (self._at_lane[each], -self._left(each)))
            future = self._waiting[chosen].popleft()
            if not self._waiting[chosen]:
                del self._waiting[chosen]
            if not future.done():  # else it was cancelled
                self._at_lane[chosen] += 1
                future.set_result(None)


class Lanes(TenantReader):
    """The daemon's `TenantReader`, which charges ``budgets``."""

    def __init__(self, counters: Counter[str] | None = None) -> None:
        self.budgets = Budgets()
        self._counters = counters if counters is not None else Counter()
        self._counters[CounterName.TOO_SLOW] += 0
        self.workers = self._first, self._second, mounts, leases = tuple(
            WorkerProcess(
                name,
                "resolver.workers.lane",
                timeout=seconds,
                rights=_RIGHTS,
                window=_ROOM,
                hello=json.dumps([f"{load.__module__}:{load.__qualname__}", most, *_LOADED]).encode(),
            )
            for name, seconds, most in (
                ("reader", LATE_SECONDS, COSTLY_SECONDS),
                ("second reader", LONGEST_SECONDS, 0),
                ("mount reader", LONGEST_SECONDS, 0),
                ("lease reader", LONGEST_SECONDS, 0),
            )
        )
        self._apart = {ALL: mounts, LEASES: leases}
        self._lines = defaultdict[WorkerProcess, Line](lambda: Line(_ROOM, self.budgets.left))
        #: Account of a container's costly question, and the end of its time in the second lane.
        self.costly: dict[str, tuple[str, float]] = {}
        #: When a late container may be asked again (a lock of the machine: by the first lane), and the last pause.
        self.late: dict[str, tuple[float, float]] = {}
        self._closed = False
        self._slow = set[str]()  # late ones that the first lane doesn't serve

    def too_slow(self) -> frozenset[str]:
        """Containers that were late and not quick since."""
        return frozenset(self._slow - self._apart.keys())

    async def ask(self, payer: str, about: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """See `TenantReader.ask`. Once closed, it cancels the caller."""
        if self._closed:
            raise asyncio.CancelledError
        message = json.dumps([f"{function.__module__}:{function.__qualname__}", *arguments]).encode()
        try:
            return await self._answer(self._lane(payer, about), payer, about, message)
        except _Elsewhere:
            lane = self._lane(payer, about) if about in self._slow else self._second
            return await self._answer(lane, payer, about, message)

    async def _answer(self, lane: WorkerProcess, payer: str, about: str, message: bytes) -> Any:
        try:
            async with self._lines[lane].turn(payer):
                if lane is self._first and about in self._slow:
                    raise _Elsewhere
                text = await lane.request(message, on_late=self._was_late, about=about)
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
        self._took(payer, about, wall, own_cpu, costly=error == "TooCostly")
        if error == "OSError" and value[0] in LACKING:
            why = f"the {lane.name} could not work: {value[1]}"
            lane.means.refused(shortage_of(value[0]) or Shortage.MEMORY, why)
            raise WorkerFailed(why, waiting=True)
        lane.means.recovered()
        if error:
            raise _raised(error, value)
        return value

    def _lane(self, payer: str, about: str) -> WorkerProcess:
        """Choose the lane. Raises `TooSlow` if the question has to wait."""
        if about in self._slow:
            if about in self._apart:
                return self._apart[about]
            now = time.monotonic()
            until, pause = self.late[about]
            if now < until or self._second.busy:
                raise TooSlow("its container made the kernel wait: it is asked again later")
            self.late[about] = now + pause, pause
            return self._second
        by, _ = self.costly.get(about if about not in self._apart else payer, (None, 0.0))
        if by is None:
            return self._first
        if by != payer and self._second.busy:  # another account asked the costly question
            raise TooSlow("questions about its container take long: it is asked again later")
        return self._second

    def _took(self, payer: str, about: str, wall: float, own_cpu: float, *, costly: bool) -> None:
        """Charge an answer, and note its evidence of the container."""
        now, apart = time.monotonic(), about in self._apart
        seconds = own_cpu if apart else wall
        self.budgets.spend(payer, seconds)
        if (guilty := payer if apart else about) and (costly or seconds > COSTLY_SECONDS):
            self.costly[guilty] = payer, now + COSTLY_FOR
        if about in self._slow and wall < LATE_SECONDS and (not apart or now >= self.late[about][0]):
            self._slow.discard(about)

    def _was_late(self, about: str) -> None:
        now = time.monotonic()
        self._counters[CounterName.TOO_SLOW] += 1
        lateness = self.late.get(about)
        pause = longer(lateness[1] if lateness else 0.0, FIRST_PAUSE, LONGEST_PAUSE)
        self.late[about] = now + pause, pause
        self._slow.add(about)

    def tidy(self) -> None:
        """Forget quick and cheap containers, and end the lanes that nothing needs."""
        now = time.monotonic()
        self.costly = {about: entry for about, entry in self.costly.items() if now < entry[1]}
        self.late = {about: entry for about, entry in self.late.items() if now < entry[0] + 2 * LONGEST_PAUSE}
        self._slow &= self.late.keys()
        second = self.costly or self._slow - self._apart.keys()
        for lane, needed in (
            (self._second, second),
            *((lane, about in self._slow) for about, lane in self._apart.items()),
        ):
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
    kind = {"TooLarge": TooLarge, "TooCostly": _Elsewhere}.get(error) or getattr(errors, error)
    return kind(*value)
