"""Lanes: children for the reads that a tenant can delay in the kernel.

If the *first lane* is late (`LATE_SECONDS`) with a container's question, it is killed, and the *second lane* asks for
that container, ever more rarely, until it is quick again. A container pays by wall-clock time. Mount tables have one
lock for the machine: a late answer there blames no container.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter, deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from resolver.base import errors
from resolver.base.counters import CounterName
from resolver.base.errors import RegionRejected, TooSlow, WorkerFailed
from resolver.base.reasons import RegionReason
from resolver.base.retry import longer
from resolver.linux.procfs import TooLarge, usage
from resolver.workers.lane import ALL, WINDOW, load
from resolver.workers.means import shortage_of
from resolver.workers.spawn import child
from resolver.workers.supervisor import Child, starved

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine, Sequence

    from resolver.linux.procfs import Procfs

_T = TypeVar("_T")
#: Seconds in which the first lane has to answer, and the second one.
LATE_SECONDS, LONGEST_SECONDS = 0.1, 2.0
#: Seconds until a container that was late is asked again, doubled each time; forgotten after some quick minutes.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
#: And until it has started and loaded what it runs.
_START_SECONDS = 5.0
_LOADED = (
    "resolver.containers.find",
    "resolver.hami.directory_reads",
    "resolver.hami.process_reads",
    "resolver.hami.region",
    "resolver.hami.region_location",
)
_HELLO = json.dumps([f"{load.__module__}:{load.__qualname__}", *_LOADED]).encode()
#: So many halves of its limit a lane is waited for that wants a CPU and gets none.
_STARVED_TURNS = 10
_IDLE_SECONDS = 30.0  # after which the second lane ends
_MAX_ANSWER = 1 << 18
_RIGHTS = frozenset({"SYS_PTRACE", "DAC_OVERRIDE"})


class TenantReader(Protocol):
    """Answers questions that may wait."""

    async def ask(self, payer: str, about: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Result of a top-level ``function(procfs, *arguments)``, by way of JSON.

        Raises errors from `base.errors`, OSError, `TooSlow` and `WorkerFailed`. ``payer`` is charged; ``about`` is the
        container that can delay the answer, or `ALL`.
        """


def begin(work: Coroutine[Any, Any, _T]) -> Future[_T] | asyncio.Task[_T]:
    """Begin a lane's work; without an event loop, do it now."""
    try:
        return asyncio.get_running_loop().create_task(work)
    except RuntimeError:
        done: Future[_T] = Future()
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


class _Question:
    """Question, and where its answer goes."""

    __slots__ = ("about", "future", "message", "tries")

    def __init__(self, about: str, message: bytes) -> None:
        self.about, self.message, self.tries = about, message, 0
        self.future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Lane(Child):
    """Child and its questions, each with a limit of ``seconds``."""

    def __init__(self, name: str, seconds: float, on_late: Callable[[str], None]) -> None:
        """Call ``on_late(about)`` for each late question."""
        super().__init__(name, child("resolver.workers.lane", name, _RIGHTS))
        self._seconds, self._on_late = seconds, on_late
        self._waiting = deque[_Question]()
        self._asked = deque[_Question]()
        self._since, self._turns = 0.0, 0  # the half of the first one's time, and its number
        self._used = 0.0  # CPU time at its begin
        self._timer: asyncio.TimerHandle | None = None
        self.last_asked = 0.0

    @property
    def busy(self) -> bool:
        """Whether questions are unanswered."""
        return bool(self._asked or self._waiting)

    async def ask(self, about: str, message: bytes) -> list[Any]:
        """Seconds, error and value (`lane`). Raises `TooSlow` and `WorkerFailed`."""
        question = _Question(about, message)
        self.last_asked = time.monotonic()
        self._waiting.append(question)
        self._send()
        return await question.future

    def _send(self) -> None:
        while self._waiting and len(self._asked) < WINDOW:
            try:
                channel = self._channel or self._begin_child()
            except WorkerFailed as error:
                self._fail_all(error)
                return
            try:
                channel.send(self._waiting[0].message)
            except BlockingIOError:
                if self._asked:
                    return  # after the next answer
                self._fail_all(self._failed("takes no question"))
                return
            except OSError:
                self._ended()
                continue
            if not self._asked:
                self._begin()
            self._asked.append(self._waiting.popleft())

    def _begin(self) -> None:
        """Start the first question's time."""
        self._since, self._turns = time.monotonic(), 0
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds / 2, self._check)

    def _take(self) -> None:
        """Take the answers received."""
        while self._asked and self._channel is not None:
            try:
                text = self._channel.recv(_MAX_ANSWER)
            except BlockingIOError:
                break
            except OSError:
                text = b""
            if not text:
                self._ended()
                break
            question = self._asked.popleft()
            self._since, self._turns = time.monotonic(), 0
            self.forget_failures()
            if not question.future.done():
                try:
                    question.future.set_result(json.loads(text))
                except ValueError:
                    question.fail(self._failed("answered something malformed"))
                    self._again()
        if not self._asked and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._channel is not None and not self._asked:
            with contextlib.suppress(BlockingIOError):
                if not self._channel.recv(1):  # it ended while it was idle
                    self._ended()
        self._send()

    def _check(self) -> None:
        """Give up the first question if it is late."""
        self._timer = None
        self._take()
        if not self._asked:
            return
        question, now, host_pid = self._asked[0], time.monotonic(), self.host_pid or 0
        half = (_START_SECONDS if question.message == _HELLO else self._seconds) / 2
        left = self._since + half - now
        # In the second half the child has to be seen to have a CPU: else the node is late, and not the container.
        if left <= 0 and (
            not self._turns or (self._turns <= _STARVED_TURNS and starved(host_pid, self._used, half))
        ):
            self._since, self._turns, self._used, left = (
                now,
                self._turns + 1,
                usage(host_pid).cpu_seconds,
                half,
            )
        if left > 0:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(left, self._check)
            return
        self._asked.popleft()
        why = self._failed(f"did not answer within {2 * half:g} s")
        if question.message != _HELLO:
            self._on_late(question.about)
            question.fail(TooSlow(f"what its container makes the kernel wait for: {why}"))
        self._again()

    def _again(self) -> None:
        """Ask the rest again."""
        self._put_back()
        self._send()

    def _put_back(self) -> None:
        self._waiting.extendleft(each for each in reversed(self._asked) if each.message != _HELLO)
        self._asked.clear()

    def _begin_child(self) -> socket.socket:
        try:
            channel = self._start()
        except OSError as error:  # counted already
            raise WorkerFailed(f"the {self.name} could not be started: {error.strerror}") from None
        try:
            asyncio.get_running_loop().add_reader(channel.fileno(), self._take)
        except OSError as error:
            lacks = shortage_of(error.errno)
            raise self._failed(f"could not be started: {error.strerror}", lacks=lacks) from None
        with contextlib.suppress(OSError):  # its end is seen by the next one who sends
            channel.send(_HELLO)
            self._asked.append(_Question(ALL, _HELLO))
            self._begin()
        return channel

    def _ended(self) -> None:
        """Replace an ended child, and repeat its questions, each once."""
        self._failed("ended")
        if self._asked:
            self._asked[0].tries += 1
            if self._asked[0].tries > 1:
                self._asked.popleft().fail(WorkerFailed(self.last_failure))
        self._put_back()

    def _fail_all(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, deque()
        for question in waiting:
            question.fail(error)

    def _end(self, *, kill: bool = True) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._channel is not None:
            with contextlib.suppress(RuntimeError):  # no loop runs any more
                asyncio.get_running_loop().remove_reader(self._channel.fileno())
        super()._end(kill=kill)

    def stop(self) -> None:
        """End the child; its questions are cancelled."""
        super().stop()
        for question in (*self._asked, *self._waiting):
            question.future.cancel()
        self._asked.clear()
        self._waiting.clear()


class Lanes:
    """The daemon's `TenantReader`; ``spend(account, seconds)`` charges a container."""

    def __init__(
        self, spend: Callable[[str, float], None] | None = None, counters: Counter[str] | None = None
    ) -> None:
        self.spend = spend or (lambda _account, _seconds: None)
        self._counters = counters if counters is not None else Counter()
        self._counters[CounterName.TOO_SLOW] += 0
        self._first = Lane("reader", LATE_SECONDS, self._was_late)
        self._second = Lane("second reader", LONGEST_SECONDS, self._was_late)
        self._late: dict[str, tuple[float, float]] = {}  # until when one is not asked, and that pause
        self._closed = False
        self._slow = set[str]()  # those that the first lane doesn't serve

    @property
    def workers(self) -> Sequence[Lane]:
        """Both lanes."""
        return self._first, self._second

    def too_slow(self) -> frozenset[str]:
        """Containers that were late and not quick since."""
        return frozenset(self._slow - {ALL})

    async def ask(self, payer: str, about: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """See `TenantReader.ask`. Once closed, who asks is cancelled."""
        if self._closed:
            raise asyncio.CancelledError
        message = json.dumps([f"{function.__module__}:{function.__qualname__}", *arguments]).encode()
        slow = about in self._slow
        if slow and about != ALL:
            self._make_appointment(about)
        lane = self._second if slow else self._first
        wall, own_cpu, error, value = await lane.ask(about, message)
        self.spend(payer, wall if about != ALL else own_cpu)
        if slow and wall < LATE_SECONDS:
            self._slow.discard(about)
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
        """Forget quick containers, and end an idle second lane."""
        now = time.monotonic()
        if self._late:
            self._late = {
                about: (until, pause)
                for about, (until, pause) in self._late.items()
                if now < until + 2 * LONGEST_PAUSE
            }
            self._slow &= self._late.keys()
        if self._second.host_pid and not self._second.busy and now > self._second.last_asked + _IDLE_SECONDS:
            self._second.stop()

    def close(self) -> None:
        """End both, for good: a task that goes on must not start another one."""
        self._closed = True
        self._first.stop()
        self._second.stop()


def _raised(error: str, value: list[Any]) -> Exception:
    if error == "RegionRejected":
        return RegionRejected(RegionReason(value[0]), value[1])
    if error == "OSError":
        return OSError(*value)
    kind = TooLarge if error == "TooLarge" else getattr(errors, error)
    return kind(*value)
