"""The real daemon with its event loop watched: how much CPU it takes in one go before it gives way.

The daemon runs unchanged, under this file as its launcher: the selector of its loop is replaced by one that reads the
thread's CPU clock before and after each wait. So a stretch is all that runs between two looks for news, in the
thread's own CPU time: neither waiting nor a busy machine counts. The figures are in a file that is mapped by both
sides, so they can be read while the loop stands still.

    python tests/bench/watched.py FIGURES PYTHON -m resolver run ...
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType, TracebackType

#: Nanoseconds of the longest stretch, and the thread's clock at the beginning of the present one, 0 while it waits;
#: number of stretches; the answer and the question for the number of objects that Python's collector knows.
_LONGEST, _BEGAN, _STRETCHES, _OBJECTS, _WANTED = range(0, 40, 8)
_WORD: Final = struct.Struct("=Q")
_ROOT: Final = Path(__file__).parent.parent.parent
_GIVE_UP_SECONDS = 20.0


class _Watching(selectors.DefaultSelector):
    """Reads the clock at both ends of a wait. ``figures`` is the mapped file."""

    figures: mmap.mmap

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As of the selector that it replaces."""
        figures, began = self.figures, _get(self.figures, _BEGAN)
        if began:
            taken = time.thread_time_ns() - began
            if taken > _get(figures, _LONGEST):
                _set(figures, _LONGEST, taken)
            _set(figures, _BEGAN, 0)
            _set(figures, _STRETCHES, _get(figures, _STRETCHES) + 1)
        if _get(figures, _WANTED):
            _set(figures, _OBJECTS, len(gc.get_objects()))
            _set(figures, _WANTED, 0)
        if _stacks:
            signal.setitimer(signal.ITIMER_PROF, 0)
        found = super().select(timeout)
        if _stacks:
            signal.setitimer(signal.ITIMER_PROF, 0.05)
        _set(figures, _BEGAN, time.thread_time_ns())
        return found


#: To find out why: a file for the stack of each stretch when it is 50 ms of CPU old.
_stacks: Final = os.environ.get("WATCHED_STACKS", "")


def _say_where(_number: int, frame: FrameType | None) -> None:
    with open(_stacks, "a") as file:
        file.write("".join(traceback.format_stack(frame)) + "\n")


def _get(figures: mmap.mmap, at: int) -> int:
    return int(_WORD.unpack_from(figures, at)[0])


def _set(figures: mmap.mmap, at: int, value: int) -> None:
    _WORD.pack_into(figures, at, value)


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 4096)


def main() -> None:
    """Become the daemon."""
    _Watching.figures = _map(Path(sys.argv[1]))
    selectors.DefaultSelector = _Watching  # type: ignore[misc]
    if _stacks:
        signal.signal(signal.SIGPROF, _say_where)
    sys.path[0] = os.getcwd()  # as `python -m` does it
    module, sys.argv = sys.argv[4], sys.argv[4:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class WatchedDaemon:
    """A running daemon of the checkout ``tree``; its log is the file ``log``, JSON line by line.

    ``socket_path`` is the API's, ``metrics`` the port of /metrics.
    """

    def __init__(
        self,
        scratch: Path,
        containers_dir: Path,
        environment: dict[str, str],
        options: Sequence[str] = (),
        *,
        metrics: int,
        tree: Path = _ROOT,
        number: int = 0,
    ) -> None:
        """``number`` tells those apart that share a ``scratch``, and with it a run directory."""
        self.log = scratch / f"daemon-{number}.log"
        self.run_dir = scratch / "run"
        self.socket_path = self.run_dir / "resolver.sock"
        self.metrics = metrics
        figures = scratch / f"figures-{number}"
        figures.write_bytes(bytes(4096))
        self._figures = _map(figures)
        command = [sys.executable, str(Path(__file__).resolve()), str(figures), sys.executable]
        command += ["-m", "resolver", "run", "--containers-dir", str(containers_dir), "--log-format", "json"]
        command += ["--run-dir", str(self.run_dir), "--metrics-addr", f"127.0.0.1:{metrics}", *options]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=tree, env=environment, stdin=subprocess.DEVNULL, stderr=log
            )

    def __enter__(self) -> Self:
        self.wait_until(self.socket_path.exists, "it listens")
        return self

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """RuntimeError if it ends before that, or not within twenty seconds."""
        deadline = time.monotonic() + _GIVE_UP_SECONDS
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"waited in vain until {what}: {self.log.read_text()[-2000:]}")
            time.sleep(0.01)

    def said(self, event: str) -> bool:
        """Whether its log has a line of that event."""
        return any(line.get("event") == event for line in lines_of(self.log))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Nothing of it is left."""
        self.kill()
        self._figures.close()

    # -- its loop -----------------------------------------------------------------------------------

    def reset_longest(self) -> None:
        """From now on."""
        _set(self._figures, _LONGEST, 0)

    def longest_block(self) -> float:
        """CPU seconds of the longest stretch since `reset_longest`; the present one counts as far as it got."""
        longest = _get(self._figures, _LONGEST)
        began = _get(self._figures, _BEGAN)
        if began:
            with contextlib.suppress(OSError, ValueError):
                pid = self.process.pid
                used = int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0])
                if _get(self._figures, _BEGAN) == began:  # it is the same stretch
                    longest = max(longest, used - began)
        return longest / 1e9

    def objects(self, within_s: float = 5.0) -> int | None:
        """How many objects Python's collector knows; None if the loop had no time to say so."""
        _set(self._figures, _WANTED, 1)
        deadline = time.monotonic() + within_s
        while _get(self._figures, _WANTED):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        return _get(self._figures, _OBJECTS)

    # -- its end ------------------------------------------------------------------------------------

    def stop(self) -> float | None:
        """SIGTERM; seconds until it has ended, None if it had to be killed after twenty."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_GIVE_UP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return None
        return time.monotonic() - began

    def kill(self) -> None:
        """SIGKILL, and waits."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def lines_of(log: Path) -> list[dict[str, Any]]:
    """The lines of a log; what is no JSON comes as the field ``noise``."""
    lines: list[dict[str, Any]] = []
    for text in log.read_text(errors="replace").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            lines.append({"noise": text})
    return lines


def free_port() -> int:
    """A TCP port of the loopback's that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    main()
