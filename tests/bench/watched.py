"""The daemon with its event loop watched (`tests.bench.loop_clock`)."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench import loop_clock as clock
from tests.fakes.daemon import Daemon
from tests.fakes.node import Node
from tests.fakes.traced import Tracer
from tests.fakes.warm import ROOT
from tests.patience import until

_GIVE_UP_SECONDS = 20.0


class WatchedDaemon(Daemon):
    """A running daemon of the checkout ``tree``; ``metrics`` is the port of /metrics."""

    def __init__(
        self,
        node: Node,
        scratch: Path,
        options: Sequence[str] = (),
        *,
        metrics: int,
        tree: Path = ROOT,
        number: int = 0,
    ) -> None:
        """``number`` distinguishes daemons that share ``scratch``, and thus a run directory."""
        self.metrics = metrics
        figures = scratch / f"figures-{number}"
        figures.write_bytes(bytes(4096))
        self._figures = clock.mapped(figures)
        super().__init__(
            node,
            scratch / "run",
            "--metrics-addr",
            f"127.0.0.1:{metrics}",
            *options,
            wrapper=(sys.executable, clock.__file__, str(figures)),
            tree=tree,
        )

    def wait_until_it_listens(self) -> None:
        until(lambda: self.socket.exists() or not self.alive, "its socket", _GIVE_UP_SECONDS)
        assert self.alive, f"it ended: {self.tail()}"

    def close(self) -> None:
        self.kill()
        self._figures.close()
        clock.stacks_of(self.process.pid).unlink(missing_ok=True)

    def reset_longest(self) -> None:
        clock.set_to(self._figures, clock.LONGEST, 0)
        clock.set_to(self._figures, clock.LONGEST_WALL, 0)

    def longest_wait(self) -> float:
        """Return the wall seconds of the longest stretch since `reset_longest`, including the unfinished one."""
        longest = clock.get(self._figures, clock.LONGEST_WALL)
        began = clock.get(self._figures, clock.BEGAN_WALL)
        if clock.get(self._figures, clock.BEGAN):
            longest = max(longest, clock.awake(self.process.pid) - began)
        return longest / 1e9

    def longest_block(self) -> float:
        """Return the CPU seconds of the longest stretch since `reset_longest`, including the unfinished one."""
        longest = clock.get(self._figures, clock.LONGEST)
        began = clock.get(self._figures, clock.BEGAN)
        if began:
            with contextlib.suppress(OSError, ValueError):
                pid = self.process.pid
                used = int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0])
                if clock.get(self._figures, clock.BEGAN) == began:  # else a new stretch has begun
                    longest = max(longest, used - began)
        return longest / 1e9

    def unlisted(self, tracer: Tracer) -> list[str]:
        """Return calls that its loop may not make (`tests.fakes.loop_calls`), with their stacks, once it has ended."""
        stacks = clock.stacks_of(self.process.pid)
        texts = stacks.read_text().split("Stack (most recent call first):")[1:] if stacks.exists() else []
        return tracer.unlisted(self.process, texts)

    def stopped_after(self) -> float | None:
        """Send SIGTERM and return the seconds until the daemon ended; None if it was killed after 20 s.

        A child blocked in the kernel may outlive the daemon and keep the log's pipe open: its end is not awaited.
        """
        began = time.monotonic()
        seconds: float | None = None
        self.process.terminate()
        try:
            self.process.wait(_GIVE_UP_SECONDS)
            seconds = time.monotonic() - began
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.wait()
        return seconds
