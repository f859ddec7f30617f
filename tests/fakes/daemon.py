"""The real `resolver run` as a child: started on a miniature node, its log read as it comes."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tests.fakes.node import Node
from tests.fakes.process import NodeError
from tests.patience import PATIENCE_S

RESOLVER: Final = Path(sys.executable).parent / "resolver"
FIXED: Final = ("--source", "scan", "--log-format", "json")
BOUND: Final = ("setpriv", "--pdeathsig", "KILL")  # whatever becomes of us, no daemon stays behind


class DaemonError(RuntimeError):
    """The daemon did not do what it must: it ended by itself, or did not end when told to."""


class Daemon:
    """A running daemon. `events` are its log lines so far, each a dict with at least `event`."""

    def __init__(self, node: Node, options: Sequence[str] = ()) -> None:
        self.node = node
        self.events: list[dict[str, Any]] = []
        self.noise: list[str] = []  # lines that are no JSON: a traceback, a warning
        self._options = tuple(options)

    def __enter__(self) -> Self:
        if not RESOLVER.exists():
            raise NodeError(f"{RESOLVER} does not exist: run `make setup` first")
        directories = (
            "--containers-dir",
            str(self.node.containers_dir),
            "--run-dir",
            str(self.node.root / "run"),
        )
        self.started_at = time.monotonic()
        self._child = subprocess.Popen(
            [*BOUND, str(RESOLVER), "run", *directories, *FIXED, *self._options],
            env=self.node.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        with contextlib.suppress(DaemonError):
            self.stop()
        self._child.kill()
        self._child.wait()
        self._reader.join()

    def stop(self, timeout_s: float = PATIENCE_S) -> float:
        """SIGTERM; returns the seconds it took. Raises DaemonError when it does not end, or not well."""
        begin = time.monotonic()
        self._child.send_signal(signal.SIGTERM)
        try:
            status = self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise DaemonError(f"the daemon did not end within {timeout_s} s of SIGTERM") from None
        if status != 0:
            raise DaemonError(f"the daemon ended with {status}: {self.last_words()}")
        return time.monotonic() - begin

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    def last_words(self) -> str:
        """The end of what it said, for an error message."""
        lines = self.noise[-5:] or [json.dumps(event) for event in self.events[-3:]]
        return "\n".join(lines)

    def repairs(self) -> list[dict[str, Any]]:
        """Its `repair` lines: container, slot, ns_pid, reason, before, after."""
        return [event for event in list(self.events) if event["event"] == "repair"]

    def _read(self) -> None:
        assert self._child.stderr is not None
        with self._child.stderr as lines:
            for line in lines:
                try:
                    self.events.append(json.loads(line))
                except ValueError:
                    self.noise.append(line.rstrip())
