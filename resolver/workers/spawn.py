"""Start of children, with one end of a socket as descriptor 0.

They inherit the first message's descriptors: the kernel counts those in flight per user, and a tenant with the same
user could use the count up (ETOOMANYREFS).
"""

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from resolver.linux.pidfd import fetch
from resolver.linux.procfs import run_delay, usage
from resolver.workers.child import INHERITED

#: Variables that a child gets, if they are set: where libraries are, how text is encoded, and the driver's own.
_VARIABLES, _PREFIXES = ("PATH", "LD_LIBRARY_PATH", "LANG", "TZ"), ("LC_", "NVIDIA_", "NVML_")
_WORKERS = os.path.dirname(os.path.abspath(__file__))
#: Bytes of a message either way, and descriptors in one.
MAX_MESSAGE, _MAX_DESCRIPTORS = 1 << 18, 32
#: How long a child may take to end after it has closed its socket, and the pauses of a wait for that.
ENDING_SECONDS, _PAUSE_SECONDS = 0.2, 0.002
#: A child that waited for a CPU during a larger share of the time was starved.
_STARVED_SHARE = 0.2


def child(module: str, name: str, rights: Iterable[str], *paths: str) -> list[str]:
    """Command line that runs a module's ``main()`` with these capabilities.

    It imports the standard library, this package and ``paths``.
    """
    script, above = os.path.join(_WORKERS, "child.py"), os.path.dirname(os.path.dirname(_WORKERS))
    return [sys.executable, "-I", "-S", script, module, name, ",".join(sorted(rights)), above, *paths]


def spawn(
    argv: Sequence[str],
    descriptors: Sequence[int] = (),
    *,
    environment: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a program; return it, and this end of its socket. Raises OSError.

    ``descriptors`` keep their numbers. ``environment`` replaces the usual one; ``quiet`` closes stderr.
    """
    passed = (name for name in os.environ if name in _VARIABLES or name.startswith(_PREFIXES))
    variables = {name: os.environ[name] for name in passed} if environment is None else dict(environment)
    variables[INHERITED] = ",".join(map(str, descriptors))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        # The default is too small for a full region.
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_MESSAGE)
        try:
            for fd in descriptors:
                os.set_inheritable(fd, True)
            # A new group: Ctrl-C is for the daemon, which ends its children.
            process = subprocess.Popen(
                argv,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if quiet else None,
                env=variables,
                # execve(2) closes all descriptors. Before it, vfork(2) suspends this thread: it would wait while the
                # child drops a last reference.
                close_fds=False,
                process_group=0,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            for fd in descriptors:
                os.set_inheritable(fd, False)
    return process, ours


class ChildProcess:
    """Process of a command line, and this end of its socket; ended ones stay in ``unreaped`` until the kernel is done.

    Nothing here waits for the kernel, except `wait`.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv
        self._process: subprocess.Popen[bytes] | None = None
        self.channel: socket.socket | None = None
        self._closed_at = math.inf  # when its socket was seen closed
        self.unreaped: list[subprocess.Popen[bytes]] = []
        self._measured = 0.0, 0.0  # CPU seconds and run delay

    @property
    def host_pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self, descriptors: Sequence[int]) -> socket.socket:
        """Return the socket of a new process. Raises OSError."""
        self._process, self.channel = spawn(self._argv, descriptors)
        self.channel.setblocking(False)
        return self.channel

    def poll(self) -> int | None:
        """Return the exit code, 0 without a process; None while it runs."""
        return self._process.poll() if self._process else 0

    def ending(self) -> bool:
        """Check if the process still runs, and closed its socket only a short time ago."""
        now = time.monotonic()
        self._closed_at = min(self._closed_at, now)
        return self.poll() is None and now - self._closed_at < ENDING_SECONDS

    def how_it_ended(self) -> tuple[str, int]:
        """Describe the end of a process that closed its socket: a verb phrase, and the signal that killed it or 0."""
        code = self.poll()
        if code is None:
            return "closed its socket", 0
        if code >= 0:
            return f"ended with code {code}", 0
        names = {entry.value: entry.name for entry in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}", -code

    def measure(self) -> None:
        """Note its use of CPUs, for `starved`."""
        self._measured = usage(self.host_pid or 0).cpu_seconds, run_delay(self.host_pid or 0)

    def starved(self, seconds: float) -> bool:
        """Check if it waited for a CPU for much of the ``seconds`` since `measure`, or waits now and had little of one.

        The kernel adds a wait when it ends.
        """
        (used, delayed), host_pid = self._measured, self.host_pid or 0
        now = usage(host_pid)
        waits = now.state == b"R" and now.cpu_seconds - used < seconds / 2
        return waits or run_delay(host_pid) - delayed > seconds * _STARVED_SHARE

    def end(self, *, kill: bool) -> None:
        """Close the socket, which ends the process, and kill it if asked."""
        self._closed_at = math.inf
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        process, self._process = self._process, None
        if process is not None:
            if kill:
                with contextlib.suppress(PermissionError):  # it changed its user: its closed socket ends it
                    process.kill()
            self.unreaped.append(process)

    def reap(self) -> None:
        self.unreaped = [process for process in self.unreaped if process.poll() is None]

    async def gone(self) -> None:
        """Wait a short time until the kernel has ended all processes."""
        deadline = time.monotonic() + ENDING_SECONDS
        while self.unreaped and time.monotonic() < deadline:
            await asyncio.sleep(_PAUSE_SECONDS)
            self.reap()

    def wait(self, seconds: float) -> None:
        """Block until the last one has ended, for at most ``seconds``."""
        if self.unreaped:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.unreaped[-1].wait(seconds)
        self.reap()


def ask_once(
    argv: Sequence[str], request: bytes, timeout: float, **how: Any
) -> tuple[dict[str, Any] | None, list[int], int]:
    """Start a child, ask it, and return its JSON answer if any, descriptors sent with that, and its exit code.

    ``fetch`` in an answer has their numbers in the child instead, if too many are in flight. Raises OSError and
    ValueError.
    """
    process, channel = spawn(argv, **how)
    answer, descriptors = None, list[int]()
    try:
        channel.settimeout(timeout)
        with contextlib.suppress(BrokenPipeError):  # it ended already, maybe with an answer
            channel.send(request)
        with contextlib.suppress(ConnectionResetError):  # it ended before it took the request
            message, descriptors, _, _ = socket.recv_fds(
                channel, MAX_MESSAGE, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
            answer = json.loads(message) if message else None
            if answer and "fetch" in answer:
                descriptors = fetch(process.pid, answer["fetch"])
    finally:
        channel.close()
        process.kill()  # its work is done
        code = process.wait()
    return answer, descriptors, code
