"""Children for dangerous work: started on first use, killed when late, restarted.

A child has a SOCK_SEQPACKET socket as descriptor 0, and dies with the daemon. Failures raise `WorkerFailed`.
"""

import asyncio
import contextlib
import errno
import math
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

from resolver.base.counters import Shortage
from resolver.base.errors import WorkerFailed
from resolver.base.retry import doubled
from resolver.workers.means import Shortages, shortage_of
from resolver.workers.spawn import MAX_MESSAGE, ChildProcess, child

_FIRST_DELAY = 0.05
_LONGEST_DELAY = 30.0
#: Longest delay of a start after a lack of resources, which other processes may free at any time.
_LONGEST_DELAY_FOR_MEANS = 0.5
#: Seconds for the start of a child that gets a ``hello``.
_START_SECONDS = 5.0
#: Seconds between two polls for an answer if the kernel allows no further epoll watch.
_LOOK_SECONDS = 0.002
#: Most extensions, of half its time limit each, for a child that gets no CPU: the node is late, not the child.
STARVED_TURNS = 10
#: Most ended or killed children of a kind that the kernel still holds; beyond, no new one starts.
_MOST_LEFT_BEHIND = 64
#: Seconds to wait for a killed child: only one that hangs in the kernel takes longer.
KILLED_SECONDS = 0.1


class _Request:
    __slots__ = ("about", "descriptors", "future", "message", "on_late", "repeatable", "seconds")

    def __init__(
        self,
        message: bytes,
        descriptors: Sequence[int],
        seconds: float,
        on_late: Callable[[str], None] | None = None,
        about: str = "",
    ) -> None:
        self.message, self.descriptors, self.seconds = message, descriptors, seconds
        self.on_late, self.repeatable, self.about = on_late, on_late is not None, about
        self.future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class WorkerProcess:
    """Kind of child, and its process, which answers in order, up to ``window`` messages at a time.

    A new process gets ``hello`` first, and a few seconds to answer it. For the other arguments see `child`.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *paths: str,
        timeout: float,
        rights: frozenset[str] = frozenset(),
        window: int = 1,
        hello: bytes = b"",
    ) -> None:
        self.name = name
        self.timeout = timeout
        self.starts = 0
        self.failures = 0  # deaths, time-outs and malformed answers, ever
        self.last_failure = ""
        self.means = Shortages(name)
        self._child = ChildProcess(child(module, name, rights, *paths))
        self._window, self._hello = window, hello
        self.failures_in_a_row = 0  # failures since the last answer
        self.not_before = 0.0
        self._waiting, self._asked = deque[_Request](), deque[_Request]()
        self._since, self._turns = 0.0, 0  # start and number of the first order's half time
        self.timer: asyncio.TimerHandle | None = None
        self._look_every = math.inf

    @property
    def host_pid(self) -> int | None:
        return self._child.host_pid

    @property
    def busy(self) -> bool:
        return bool(self._asked or self._waiting)

    async def request(
        self,
        message: bytes,
        descriptors: Sequence[int] = (),
        *,
        limit: float | None = None,
        on_late: Callable[[str], None] | None = None,
        about: str = "",
    ) -> bytes:
        """Send a message and return its answer. Raises `WorkerFailed`, and OSError without descriptors.

        The child may take ``limit`` s (default: ``timeout``), not counting waits for a CPU. After several failures in
        a row requests fail at once until the next start (0.05 s, doubled up to 30 s). A request with ``on_late`` only
        reads: it is repeated once if the child ends. If it is late, ``on_late`` is called, and waiting requests
        ``about`` the same fail, too.
        """
        seconds = self.timeout if limit is None else limit
        request = _Request(message, list(descriptors), seconds, on_late, about)
        self._waiting.append(request)
        self._send()
        try:
            return await request.future
        except asyncio.CancelledError:
            if self._window == 1 and request in self._asked:
                self._asked.clear()
                self._end()  # no caller waits, and later descriptors may be other files by then
                self._send()
            raise

    def _send(self) -> None:
        """Send as many requests as the child may have; if it ended or can't get descriptors, to a new child."""
        while self._waiting and len(self._asked) < self._window:
            request, fresh = self._waiting[0], self._child.channel is None
            if request.future.done():  # cancelled
                self._waiting.popleft()
                continue
            try:
                channel = self._child.channel or self._start(request.descriptors)
            except (WorkerFailed, OSError) as error:
                while self._waiting:
                    self._waiting.popleft().fail(error)
                return
            try:
                # The kernel takes at most 253 descriptors (SCM_MAX_FD); callers send fewer.
                socket.send_fds(channel, [request.message], () if fresh else request.descriptors)
            except OSError as error:
                if self._asked:
                    return  # the next answer or the child's end sends the rest
                if not fresh and error.errno == errno.ETOOMANYREFS:
                    self.means.counts[Shortage.IN_FLIGHT] += 1
                    self._end(kill=False)
                    continue
                if not isinstance(error, BrokenPipeError | ConnectionResetError):
                    why = f"could not be asked: {error.strerror}"
                    self._waiting.popleft().fail(self._failed(why, lacks=shortage_of(error.errno)))
                    continue
                if not fresh:
                    self._ended()
                    continue  # at once: the request's descriptors may be other files' later
            self._note(channel, self._waiting.popleft())

    def _note(self, channel: socket.socket, request: _Request) -> None:
        """Wait for a sent request's answer, if it is the first one."""
        self._asked.append(request)
        if len(self._asked) > 1:
            return
        self._since, self._turns, self._look_every = time.monotonic(), 0, math.inf
        try:  # by number: asyncio formats a socket for an error, even unlogged
            asyncio.get_running_loop().add_reader(channel.fileno(), self._take)
        except OSError as error:
            self.means.counts[shortage_of(error.errno) or Shortage.WATCHES] += 1
            self._look_every = _LOOK_SECONDS
        self._check_in(request.seconds / 2)

    def _check_in(self, seconds: float) -> None:
        if self.timer is None:  # the next request may have less time than this one
            wait = min(seconds, self.timeout / 2, self._look_every)
            self.timer = asyncio.get_running_loop().call_later(wait, self._check)

    def _take(self) -> None:
        while self._asked and self._child.channel is not None:
            try:
                answer = self._child.channel.recv(MAX_MESSAGE)
            except BlockingIOError:
                break
            except OSError:
                answer = b""  # it ended before it took the message
            if not answer and self._child.ending():
                self._rest()  # its socket stays readable
                self._look_every = _LOOK_SECONDS
                self._check_in(_LOOK_SECONDS)
                return
            request = self._asked.popleft()
            if answer:
                self._since, self._turns = time.monotonic(), 0
                self.forget_failures()
                if not request.future.done():
                    request.future.set_result(answer)
                continue
            failed = self._ended()
            if request.repeatable:
                request.repeatable = False
                self._waiting.appendleft(request)
            else:
                request.fail(failed)
        self._send()
        if not self._asked:
            self._rest()

    def _check(self) -> None:
        """Take answers that came while the loop was busy, then give up the first request if it is late."""
        self.timer = None
        self._take()
        if not self._asked or self.timer is not None:
            return
        request, now = self._asked[0], time.monotonic()
        half = request.seconds / 2
        left = self._since + half - now
        # Without a CPU in the second half of its time, the child gets more: the node is late, not the child.
        if left <= 0 and (not self._turns or (self._turns <= STARVED_TURNS and self._child.starved(half))):
            self._since, self._turns, left = now, self._turns + 1, half
            self._child.measure()
        if left > 0:
            self._check_in(left)
            return
        self._asked.popleft()
        failed = self._failed(f"did not answer within {request.seconds:g} s", late=True)
        if request.on_late is not None:
            request.on_late(request.about)
            for other in self._waiting:
                if other.on_late is not None and other.about == request.about:
                    other.fail(failed)
        request.fail(failed)
        self._send()

    def _rest(self) -> None:
        self._child.reap()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self._child.channel is not None:
            with contextlib.suppress(RuntimeError):  # no loop runs any more
                asyncio.get_running_loop().remove_reader(self._child.channel.fileno())

    # -- the process --------------------------------------------------------------------------------

    def _start(self, descriptors: Sequence[int] = ()) -> socket.socket:
        """Return a new child's socket. Raises `WorkerFailed`, and OSError without descriptors."""
        self._child.reap()
        if time.monotonic() < self.not_before:
            raise WorkerFailed(self.last_failure, waiting=True)  # unchanged, because a change is logged
        if len(self._child.unreaped) >= _MOST_LEFT_BEHIND:
            raise WorkerFailed(f"the kernel holds {_MOST_LEFT_BEHIND} children of this kind", waiting=True)
        try:
            channel = self._child.start(descriptors)
        except OSError as error:
            if (lacks := shortage_of(error.errno)) is Shortage.DESCRIPTORS:
                self.means.refused(lacks, f"the {self.name} could not be started: {error.strerror}")
                raise
            raise self._failed(f"could not be started: {error.strerror}", lacks=lacks) from None
        self.starts += 1
        if self._hello:
            with contextlib.suppress(OSError):  # the next send notices its end
                channel.send(self._hello)
                hello = _Request(self._hello, (), _START_SECONDS)
                hello.future.cancel()  # no caller waits
                self._note(channel, hello)
        return channel

    def _failed(
        self, what: str, *, own_fault: bool = False, late: bool = False, lacks: Shortage | None = None
    ) -> WorkerFailed:
        """End the child, count it, return the error. The next one gets the unanswered requests."""
        self._end()
        self.failures += 1
        self.failures_in_a_row += 1
        if self.failures_in_a_row > 1:
            longest = _LONGEST_DELAY if lacks is None else _LONGEST_DELAY_FOR_MEANS
            self.not_before = time.monotonic() + doubled(_FIRST_DELAY, longest, self.failures_in_a_row - 2)
        self.last_failure = f"the {self.name} {what}"
        if lacks is not None:
            self.means.refused(lacks, self.last_failure)
        error = WorkerFailed(self.last_failure, own_fault=own_fault, late=late)
        while self._asked:
            request = self._asked.pop()
            if request.descriptors:
                request.fail(error)  # they may be other files' by now
            else:
                self._waiting.appendleft(request)
        return error

    def ended_idle(self) -> WorkerFailed | None:
        """Reap a child that ended with no request to fail; return the error."""
        ended = self.host_pid is not None and self._child.poll() is not None
        return self._ended() if ended and not self._asked else None

    def forget_failures(self) -> None:
        """Stop delaying the next start: the child answered, or only its input was at fault."""
        self.failures_in_a_row = 0

    def malformed(self, what: str) -> WorkerFailed:
        """End a child after nonsense; return the error."""
        failed = self._failed(what)
        self._send()
        return failed

    def _ended(self) -> WorkerFailed:
        """Reap a child that closed its socket; return the error."""
        how, number = self._child.how_it_ended()
        return self._failed(
            how,
            own_fault=number in (signal.SIGBUS, signal.SIGSEGV),
            lacks=Shortage.KILLED if number == signal.SIGKILL else None,
        )

    def _end(self, *, kill: bool = True) -> None:
        """End the child, by its closed socket unless killed; it is reaped later."""
        self._rest()
        self._child.end(kill=kill)

    def reap(self) -> None:
        self._child.reap()

    async def end(self) -> None:
        """Do as `stop` does, without blocking the loop."""
        self.stop(0)
        try:
            await self._child.gone()
        except asyncio.CancelledError:
            self.stop()
            raise

    def stop(self, seconds: float = KILLED_SECONDS) -> None:
        """End the child now; its requests are cancelled. It is waited for, or reaped later."""
        self._end()
        self._child.wait(seconds)
        for requests in (self._asked, self._waiting):
            while requests:
                requests.popleft().future.cancel()
