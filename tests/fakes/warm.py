"""Starts `python -m resolver` at a third of the cost: forked from a process that has imported the daemon's modules.

Most tests start a daemon, and imports are most of a start. All else is as with `subprocess.Popen`: an own process with
its own environment, directory, descriptors and children. A test of the start itself (under a wrapper, or of the command
line in /proc) needs `exec`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

ROOT: Final = Path(__file__).parent.parent.parent
_LIMIT: Final = 1 << 18  # bytes of a request: arguments and an environment


class Process:
    """The part of `subprocess.Popen` that tests use. Signals go to this process and to no other that has its number."""

    def __init__(self, stock: Stock, pid: int, stderr: int, stacks: int) -> None:
        self.pid = pid
        #: When it has ended: the stacks of its main thread at each SIGURG.
        self.stacks: list[str] = []
        self._stacks = stacks
        self.returncode: int | None = None
        self.stderr: TextIO = os.fdopen(stderr)
        self._stock, self._pidfd, self._reaping = stock, os.pidfd_open(pid), threading.Lock()

    def poll(self) -> int | None:
        return self._reaped(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._reaped(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("resolver", timeout or 0)
        return code

    def _reaped(self, seconds: float | None) -> int | None:
        with self._reaping:
            if self.returncode is None and self._ended(seconds):
                self.returncode = os.waitstatus_to_exitcode(self._stock.ask({"reap": self.pid}))
                os.close(self._pidfd)
                with os.fdopen(self._stacks, "r") as file:
                    file.seek(0)
                    self.stacks = file.read().split("Stack (most recent call first):")[1:]
            return self.returncode

    def _ended(self, seconds: float | None) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(None if seconds is None else seconds * 1000))

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Stock:
    """A process that has imported every module; it ends with this process, and so do the processes it started."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fakes.warm", str(theirs.fileno())],
                cwd=ROOT,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], cwd: Path) -> Process:
        (ours, theirs), stacks = os.pipe(), os.memfd_create("stacks")
        try:
            wanted = {"start": [*arguments], "environment": dict(environment), "cwd": str(cwd)}
            pid = self.ask(wanted, 1, theirs, stacks)
        finally:
            os.close(theirs)
        return Process(self, pid, ours, stacks)

    def ask(self, request: Mapping[str, Any], *descriptors: int) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            return int(self._socket.recv(64))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def _serve(channel: socket.socket) -> list[str]:
    """Answers requests; returns in each process that is started, with its arguments."""
    children: set[int] = set()
    while True:
        data, received, _, _ = socket.recv_fds(channel, _LIMIT, 3)
        if not data:
            break
        request = json.loads(data)
        if "reap" in request:
            children.discard(request["reap"])
            answer = os.waitpid(request["reap"], 0)[1]
        else:
            answer = os.fork()
            if answer == 0:
                channel.close()
                _become(request, *received)
                return list(request["start"])
            children.add(answer)
        for fd in received:
            os.close(fd)
        channel.send(str(answer).encode())
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _become(request: dict[str, Any], stdout: int, stderr: int, stacks: int) -> None:
    faulthandler.register(signal.SIGURG, os.fdopen(stacks, "wb"), all_threads=False)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    random.seed()


if __name__ == "__main__":
    # Imports of `run` before it drops rights; later imports must work without them.
    import resolver.cli.run
    import resolver.daemon.service  # noqa: F401
    from resolver.cli import main

    arguments = _serve(socket.socket(fileno=int(sys.argv[1])))
    sys.argv = [str(ROOT / "resolver/__main__.py"), *arguments]
    sys.exit(main())
