"""Children for dangerous work: started on first use, killed when late, restarted.

A child has a SOCK_SEQPACKET socket as descriptor 0, and dies with the daemon. Failures raise `WorkerFailed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import select
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING

from resolver.base.counters import Shortage
from resolver.base.errors import WorkerFailed
from resolver.base.retry import doubled
from resolver.linux.procfs import usage
from resolver.workers.means import Means, shortage_of
from resolver.workers.spawn import child, spawn

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_MESSAGE = 1 << 18
_FIRST_DELAY = 0.05
_LONGEST_DELAY = 30.0
#: After a refusal for lack of means: what another process took it can give back at any time.
_LONGEST_DELAY_FOR_MEANS = 0.5
#: Between two looks for an answer, in seconds, where the kernel allows no further epoll watch.
_LOOK_SECONDS = 0.002
#: So many times its time limit a child is waited for that wants a CPU and gets none: the node is late, not the child.
_STARVED_TURNS = 10
#: Children that the kernel may hold at a time; then none is started until one of them has ended.
_MOST_LEFT_BEHIND = 64
#: How long a killed child is waited for: only one that hangs in the kernel takes longer.
KILLED_SECONDS = 0.1


class Child:
    """Kind of child, and its process: started, ended, reaped, failures counted."""

    def __init__(self, name: str, argv: Sequence[str]) -> None:
        self.name = name
        self.starts = 0
        self.failures = 0  # deaths, time-outs and malformed answers, ever
        self.last_failure = ""
        self.means = Means()
        self._argv = argv
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._in_a_row = 0  # failures since the last answer
        self._not_before = 0.0
        self._unreaped: list[subprocess.Popen[bytes]] = []

    @property
    def host_pid(self) -> int | None:
        """PID of the child, if any."""
        return self._process.pid if self._process else None

    def _start(self, descriptors: Sequence[int] = ()) -> socket.socket:
        """Return a new child's socket. Raises `WorkerFailed`, and OSError without descriptors."""
        self._unreaped = [process for process in self._unreaped if process.poll() is None]
        if time.monotonic() < self._not_before:
            # The same words each time: a trouble is logged when they change.
            raise WorkerFailed(
                f"{self.last_failure}, several times in a row; it is tried again", waiting=True
            )
        if len(self._unreaped) >= _MOST_LEFT_BEHIND:
            raise WorkerFailed(f"the kernel holds {_MOST_LEFT_BEHIND} children of this kind", waiting=True)
        try:
            self._process, channel = spawn(self._argv, descriptors)
        except OSError as error:
            lacks = shortage_of(error.errno)
            if lacks is Shortage.DESCRIPTORS:
                self.means.refused(lacks, f"the {self.name} could not be started: {error.strerror}")
                raise
            raise self._failed(f"could not be started: {error.strerror}", lacks=lacks) from None
        channel.setblocking(False)
        self.starts += 1
        self._channel = channel
        return channel

    def _failed(
        self, what: str, *, own_fault: bool = False, late: bool = False, lacks: Shortage | None = None
    ) -> WorkerFailed:
        """End the child, count it, return the error."""
        self._end()
        self.failures += 1
        self._in_a_row += 1
        if self._in_a_row > 1:
            longest = _LONGEST_DELAY if lacks is None else _LONGEST_DELAY_FOR_MEANS
            self._not_before = time.monotonic() + doubled(_FIRST_DELAY, longest, self._in_a_row - 2)
        self.last_failure = f"the {self.name} {what}"
        if lacks is not None:
            self.means.refused(lacks, self.last_failure)
        return WorkerFailed(self.last_failure, own_fault=own_fault, late=late)

    def forget_failures(self) -> None:
        """Delay the next start no more: the child answered, or its input alone was to blame."""
        self._in_a_row = 0
        self.means.sufficed()

    def _end(self, *, kill: bool = True) -> None:
        """End the child, by its closed socket unless killed; it is reaped later."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        process, self._process = self._process, None
        if process is not None:
            if kill:
                with contextlib.suppress(PermissionError):  # another user's by now: its socket ends it
                    process.kill()
            self._unreaped.append(process)

    def stop(self) -> None:
        """End the child now. If hung in the kernel, it is reaped later."""
        self._end()
        self._reap()

    def _reap(self) -> None:
        if self._unreaped:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._unreaped[-1].wait(KILLED_SECONDS)
        self._unreaped = [each for each in self._unreaped if each.poll() is None]


class WorkerProcess(Child):
    """Child that handles one message at a time; for the arguments see `child`."""

    def __init__(
        self,
        name: str,
        module: str,
        *paths: str,
        timeout: float,
        rights: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(name, child(module, name, rights, *paths))
        self.timeout = timeout
        self._turn = asyncio.Lock()

    def _end(self, *, kill: bool = True) -> None:
        super()._end(kill=kill)
        if kill:
            self._reap()

    async def request(
        self,
        message: bytes,
        descriptors: Sequence[int] = (),
        *,
        limit: float | None = None,
    ) -> bytes:
        """Send a message and return its answer. Raises `WorkerFailed` after ``limit`` s (default: ``timeout``).

        Time without a CPU does not count. After several failures in a row requests fail at once until the next start
        (0.05 s, doubled up to 30 s).
        """
        async with self._turn:
            channel = self._send(message, list(descriptors))
            limit = self.timeout if limit is None else limit
            try:
                await self._answer(channel, limit)
                answer = channel.recv(_MAX_MESSAGE)
            except BlockingIOError:
                raise self._failed(f"did not answer within {limit:g} s", late=True) from None
            except ConnectionResetError:
                answer = b""  # it ended before it took the message
            except OSError as error:
                raise self._failed(f"broke off: {error.strerror}") from None
            except asyncio.CancelledError:
                self.stop()  # its answer would be taken for the next request's
                raise
            if not answer:
                raise self._ended()
            self.forget_failures()
            return answer

    async def _answer(self, channel: socket.socket, limit: float) -> None:
        """Wait ``limit`` seconds of the child having a CPU."""
        host_pid = self.host_pid or 0
        for _ in range(_STARVED_TURNS):
            before = usage(host_pid).cpu_seconds
            if await _readable(channel, limit) or not starved(host_pid, before, limit):
                return

    def _send(self, message: bytes, descriptors: list[int]) -> socket.socket:
        """Send to the child, or to a new one if it ended or can't get descriptors."""
        while True:
            idle = self._channel is not None
            channel = self._channel or self._start(descriptors)
            try:
                # A thousand descriptors would not fit; callers keep below the kernel's 253 (SCM_MAX_FD).
                socket.send_fds(channel, [message], descriptors if idle else ())
            except (BrokenPipeError, ConnectionResetError):
                error = self._ended()
                if not idle:
                    raise error from None
            except OSError as error:
                if idle and error.errno == errno.ETOOMANYREFS:
                    self.means.counts[Shortage.IN_FLIGHT] += 1
                    self._end(kill=False)
                    continue
                lacks = shortage_of(error.errno)
                raise self._failed(f"could not be asked: {error.strerror}", lacks=lacks) from None
            else:
                return channel

    def malformed(self, what: str) -> WorkerFailed:
        """End a child after nonsense; return the error."""
        return self._failed(what)

    def _ended(self) -> WorkerFailed:
        """Reap a child that closed its socket; return the error."""
        process = self._process
        try:
            code = process.wait(0.2) if process else 0
        except subprocess.TimeoutExpired:
            return self._failed("closed its socket")
        if code >= 0:
            return self._failed(f"ended with code {code}")
        with contextlib.suppress(ValueError):  # not every signal has a name
            name = signal.Signals(-code).name
            lacks = Shortage.KILLED if name == "SIGKILL" else None
            faulty = name in ("SIGBUS", "SIGSEGV")
            return self._failed(f"was killed by {name}", own_fault=faulty, lacks=lacks)
        return self._failed(f"was killed by signal {-code}")


def starved(host_pid: int, before: float, seconds: float) -> bool:
    """Check if a ready child had no CPU for most of the last ``seconds``."""
    now = usage(host_pid)
    return now.state == b"R" and now.cpu_seconds - before < seconds / 2


async def _readable(channel: socket.socket, limit: float) -> bool:
    """Wait ``limit`` seconds for an answer; True if seen.

    The caller reads in either case: the loop may have been busy. Without epoll watches the channel is polled.
    """
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def on_readable() -> None:
        if not readable.done():
            readable.set_result(None)

    number = channel.fileno()  # asyncio would describe a socket twice, for an error that nobody sees
    try:
        loop.add_reader(number, on_readable)
    except OSError:
        return await _looked_at(number, limit)
    try:
        await asyncio.wait({readable}, timeout=limit)
    finally:
        loop.remove_reader(number)
    return readable.done()


async def _looked_at(number: int, limit: float) -> bool:
    """Replace `_readable`, without epoll."""
    poll = select.poll()
    poll.register(number, select.POLLIN)
    deadline = time.monotonic() + limit
    while not poll.poll(0):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(_LOOK_SECONDS)
    return True
