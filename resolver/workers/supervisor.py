"""Children that do the dangerous work: started on first use, bounded in time, killed when late, restarted.

One class serves all of them. A worker speaks one message at a time over a SOCK_SEQPACKET socket on its
descriptor 0, and dies with the daemon (it asks the kernel for that). What goes wrong is an exception,
`WorkerFailed`, and a number that is shown; the daemon itself never waits longer than the time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING

from resolver.errors import WorkerFailed
from resolver.retry import doubled
from resolver.workers.spawn import child, spawn

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_MESSAGE = 1 << 18
_FIRST_DELAY = 0.05
_LONGEST_DELAY = 30.0
#: So many times its time limit a child is waited for that wants a CPU and gets none: the node is late, not the child.
_STARVED_TURNS = 10
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
#: How long a killed child is waited for: only one that hangs in the kernel takes longer.
KILLED_SECONDS = 0.1


class WorkerProcess:
    """One kind of child and its present process, if there is one.

    ``module`` has a ``main()`` and is started by `resolver.workers.child` without ``site``, so that it starts in
    milliseconds and stays small; ``paths`` is where it finds what it imports beside the standard library.
    ``timeout`` is in seconds, for one request. ``rights`` are the capabilities that it keeps of those the daemon has.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *paths: str,
        timeout: float,
        rights: frozenset[str] = frozenset(),
    ) -> None:
        self.name = name
        self.timeout = timeout
        self.starts = 0
        self.failures = 0  # deaths, time-outs and malformed answers, ever
        self.last_failure = ""
        self._argv = child(module, name, rights, *paths)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._in_a_row = 0
        self._not_before = 0.0
        self._turn = asyncio.Lock()
        self._unreaped: list[subprocess.Popen[bytes]] = []

    @property
    def host_pid(self) -> int | None:
        """PID of the present child; None between two of them."""
        return self._process.pid if self._process else None

    async def request(
        self,
        message: bytes,
        descriptors: Sequence[int] = (),
        *,
        limit: float | None = None,
        received: list[int] | None = None,
    ) -> bytes:
        """Send one message, return its answer; `WorkerFailed` when there is none in time (``limit``, or ``timeout``).

        What else the child handed over is in ``received``: open files, which are the caller's. Time in which a busy
        node gave the child no CPU does not count.

        Starts the child if there is none. After a failure the next start is immediate, after several in a
        row it waits (0.05 s doubling to 30 s), and requests fail at once until then.
        """
        async with self._turn:
            channel = self._send(message, list(descriptors))
            limit = self.timeout if limit is None else limit
            try:
                await self._answer(channel, limit)
                if received is None:
                    answer = channel.recv(_MAX_MESSAGE)
                else:
                    answer, files, _flags, _address = socket.recv_fds(channel, _MAX_MESSAGE, 1)
                    received += files
            except BlockingIOError:
                raise self._failed(f"did not answer within {limit:g} s") from None
            except ConnectionResetError:
                answer = b""  # it ended before it took the message
            except OSError as error:
                raise self._failed(f"broke off: {error.strerror}") from None
            except asyncio.CancelledError:
                self.stop()  # its answer would be taken for the next request's
                raise
            if not answer:
                raise self._ended()
            self._in_a_row = 0
            return answer

    def tell(self, message: bytes) -> None:
        """Say something that has no answer; nothing happens if there is no child, or if it can't take it now."""
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.send(message)

    async def _answer(self, channel: socket.socket, limit: float) -> None:
        """Wait ``limit`` seconds at most, but for those in which the child had no CPU."""
        host_pid = self.host_pid or 0
        for _ in range(_STARVED_TURNS):
            before = cpu_seconds(host_pid)
            if await _readable(channel, limit) or not starved(host_pid, before, limit):
                return

    def _send(self, message: bytes, descriptors: list[int]) -> socket.socket:
        """Give the message to the child. One that ended while it was idle took nothing: its successor gets it."""
        while True:
            idle = self._channel is not None
            channel = self._channel or self._start()
            try:
                # A thousand descriptors would not fit; callers keep below the kernel's 253 (SCM_MAX_FD).
                socket.send_fds(channel, [message], descriptors)
            except (BrokenPipeError, ConnectionResetError):
                error = self._ended()
                if not idle:
                    raise error from None
            except OSError as error:
                raise self._failed(f"could not be asked: {error.strerror}") from None
            else:
                return channel

    def malformed(self, what: str) -> WorkerFailed:
        """The answer made no sense: end the child, and return the error to raise."""
        return self._failed(what)

    def _start(self) -> socket.socket:
        self._unreaped = [process for process in self._unreaped if process.poll() is None]
        wait = self._not_before - time.monotonic()
        if wait > 0:
            raise WorkerFailed(
                f"the {self.name} failed {self._in_a_row} times in a row; next start in {wait:.1f} s",
                waiting=True,
            )
        try:
            self._process, ours = spawn(self._argv)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            raise self._failed(f"could not be started: {error.strerror}") from None
        ours.setblocking(False)
        self.starts += 1
        self._channel = ours
        return ours

    def _ended(self) -> WorkerFailed:
        """It closed its end of the socket: log how it ended, and return the error to raise."""
        process = self._process
        try:
            code = process.wait(0.2) if process else 0
        except subprocess.TimeoutExpired:
            return self._failed("closed its socket")
        if code >= 0:
            return self._failed(f"ended with code {code}")
        with contextlib.suppress(ValueError):  # not every signal has a name
            name = signal.Signals(-code).name
            return self._failed(f"was killed by {name}", own_fault=name in ("SIGBUS", "SIGSEGV"))
        return self._failed(f"was killed by signal {-code}")

    def _failed(self, what: str, *, own_fault: bool = False) -> WorkerFailed:
        self.stop()
        self.failures += 1
        self._in_a_row += 1
        if self._in_a_row > 1:
            delay = doubled(_FIRST_DELAY, _LONGEST_DELAY, self._in_a_row - 2)
            self._not_before = time.monotonic() + delay
        self.last_failure = f"the {self.name} {what}"
        return WorkerFailed(self.last_failure, own_fault=own_fault)

    def stop(self) -> None:
        """End the present child now. One that hangs in the kernel is left to die and reaped later."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(PermissionError):  # it is another user by now, and ends by its closed socket
            process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_SECONDS)
        if process.returncode is None:
            self._unreaped.append(process)


def cpu_seconds(host_pid: int) -> float:
    """What a child has used, by proc_pid_stat(5); 0 if that can't be read."""
    return _cpu_and_state(host_pid)[0]


def starved(host_pid: int, before: float, seconds: float) -> bool:
    """Whether a child wants a CPU, and had none for most of the last ``seconds``; ``before`` is what it had used then.

    One that hangs sleeps, is stopped, or waits in the kernel; one that goes round in circles uses what it gets.
    """
    used, state = _cpu_and_state(host_pid)
    return state == b"R" and used - before < seconds / 2


def _cpu_and_state(host_pid: int) -> tuple[float, bytes]:
    try:
        with open(f"/proc/{host_pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
    except OSError:
        return 0.0, b""
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND, fields[0]


async def _readable(channel: socket.socket, limit: float) -> bool:
    """Wait until there is an answer, ``limit`` seconds at most; whether it was seen.

    Whoever calls reads in either case: an answer that came in time is one, also if the loop was too busy to see it
    before the time was up.
    """
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def on_readable() -> None:
        if not readable.done():
            readable.set_result(None)

    number = channel.fileno()  # asyncio would describe a socket twice, for an error that nobody sees
    loop.add_reader(number, on_readable)
    try:
        await asyncio.wait({readable}, timeout=limit)
    finally:
        loop.remove_reader(number)
    return readable.done()
