"""The daemon under test, `resolver run`: its process, its log lines as values, its children."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

from tests.fakes.names import COUNTERS, EVENTS
from tests.fakes.node import Node
from tests.fakes.warm import ROOT, Process, Stock
from tests.patience import PATIENCE_S, until

RESOLVER: Final = Path(sys.executable).parent / "resolver"
#: A wrapper: the daemon dies with its parent.
BOUND: Final = ("setpriv", "--pdeathsig", "KILL")

Line = dict[str, Any]


class DaemonError(RuntimeError):
    """The daemon did not end when told to, or not well."""


class Counters(Counter[str]):
    """Counts by name; refuses a name that the product doesn't count."""

    def __missing__(self, name: str) -> int:
        assert name in COUNTERS, f"no counter is called {name!r}: resolver/base/counters.py lists them"
        return 0


class Daemon:
    """A running daemon. `lines` are its log lines in order, each with `at`, the monotonic time at which it came.

    `other_output` has the lines that are no JSON: a traceback, a warning.
    """

    _started: Callable[[int], None] = staticmethod(lambda _: None)  # also of those started in another way

    def __init__(
        self,
        node: Node | None,
        run_dir: Path,
        *arguments: str,
        containers_dir: Path | None = None,
        environment: dict[str, str] | None = None,
        wrapper: tuple[str, ...] = (),
        stock: Stock | None = None,
        tree: Path = ROOT,
        started: Callable[[int], None] | None = None,
    ) -> None:
        """``tree`` is the checkout whose daemon it is. ``started`` is called with its PID when its loop is at work."""
        if started is not None:
            self._started = started
        words = ["run", "--run-dir", str(run_dir), "--log-format", "json"]
        if place := containers_dir or (node and node.containers_dir):
            words += ["--containers-dir", str(place)]
        if "--metrics-addr" not in arguments:
            words += ["--metrics-addr", "off"]  # one port, and many daemons
        if environment is None:
            environment = node.environment() if node else dict(os.environ)
        self.run_dir = run_dir
        if stock is not None and not wrapper:
            self._watch(stock.start([*words, *arguments], environment, ROOT))
        else:
            self._launch([*wrapper, sys.executable, "-m", "resolver", *words, *arguments], environment, tree)

    def _launch(self, command: list[str], environment: dict[str, str], tree: Path = ROOT) -> None:
        self._watch(
            subprocess.Popen(
                command,
                cwd=tree,
                env=environment,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )

    def _watch(self, process: subprocess.Popen[str] | Process) -> None:
        self.started_at = time.monotonic()
        self.process = process
        self.lines: list[Line] = []
        self.other_output: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="daemon log")
        self._reader.start()

    @property
    def socket(self) -> Path:
        return self.run_dir / "resolver.sock"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.alive:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for text in stream:
                at = time.monotonic()
                with self._news:
                    try:
                        self.lines.append({**json.loads(text), "at": at})
                        if self.lines[-1]["event"] == "started":
                            self._started(self.process.pid)
                    except ValueError:
                        self.other_output.append(text.rstrip("\n"))
                    self._news.notify_all()

    def said(self, event: str, **fields: object) -> list[Line]:
        """Every line of that event whose fields have these values; refuses an event that the product doesn't log."""
        assert event in EVENTS, f"no event is called {event!r}: docs/monitoring.md lists them"
        wanted = {"event": event, **fields}
        return [line for line in list(self.lines) if wanted.items() <= line.items()]

    def wait_for(
        self, event: str, *, timeout_s: float = PATIENCE_S, count: int = 1, **fields: object
    ) -> Line:
        """Wait for the line number `count` of that event with these values."""
        deadline = time.monotonic() + timeout_s
        with self._news:
            while len(found := self.said(event, **fields)) < count:
                left = deadline - time.monotonic()
                assert left > 0, f"within {timeout_s} s not said: {event} {fields}; said: {self.tail()}"
                assert self.alive or self._reader.is_alive(), f"it ended: {self.tail()}"
                self._news.wait(min(left, 0.2))
        return found[count - 1]

    def tail(self) -> str:
        return "\n".join(str(line) for line in [*self.lines[-20:], *self.other_output[-20:]])

    def counters(self) -> dict[str, int]:
        """The counters of its last line; it has to be stopped. A counter that is not there is 0."""
        (last,) = self.said("stopped")
        return Counters(
            {name: value for name, value in last.items() if isinstance(value, int) and name != "at"}
        )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def children(self) -> dict[str, int]:
        return children_of(self.process.pid)

    def child(self, name: str) -> int:
        """PID of a child, waited for if it is only now being started."""
        until(lambda: name in self.children(), f"a {name}")
        return self.children()[name]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        if self.alive:
            self.process.terminate()
        return self.wait()

    def wait(self) -> int:
        """Until it has ended by itself; returns its exit code. Raises DaemonError after the time limit."""
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise DaemonError(f"it did not end within {PATIENCE_S} s: {self.tail()}") from None
        self._reader.join()
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()


def children_of(host_pid: int) -> dict[str, int]:
    try:
        text = Path(f"/proc/{host_pid}/task/{host_pid}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    found = {}
    for child in map(int, text.split()):
        try:
            if runs(child):
                found[Path(f"/proc/{child}/comm").read_text().strip()] = child
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def runs(host_pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{host_pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
