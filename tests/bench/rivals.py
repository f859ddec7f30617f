"""What one would take instead of the daemon: tools that print every fork, exec and exit.

They are Debian packages that nothing here needs; without them the table says so.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.bench.timing import RowValues
from tests.bench.usage import Cpu, cpu, rss

_START_SECONDS = 30.0
_SETTLE = 2.0
#: The three tracepoints that the daemon's own programs are attached to.
_PRINTING = (
    'tracepoint:sched:sched_process_fork { printf("fork %d %d\\n", args->parent_pid, args->child_pid); } '
    'tracepoint:sched:sched_process_exec { printf("exec %d %s\\n", pid, str(args->filename)); } '
    'tracepoint:sched:sched_process_exit { printf("exit %d\\n", pid); }'
)
#: They read tracepoints' formats in there; a mount that nobody else sees.
_TRACEFS = 'mountpoint -q /sys/kernel/tracing || mount -t tracefs tracefs /sys/kernel/tracing; exec "$@"'


class Rival:
    """A tool that writes into a file in ``scratch``. `why_not` says why it is not measured."""

    def __init__(self, name: str, argv: list[str], scratch: Path, ready: str, why_not: str) -> None:
        self.name = name
        self.why_not = why_not
        self._argv = ["unshare", "--mount", "sh", "-c", _TRACEFS, "sh", *argv]
        self._ready = ready  # in its output once it sees everything
        self._output, self._complaints = scratch / f"{name}.out", scratch / f"{name}.err"
        self._process: subprocess.Popen[bytes] | None = None
        self._began, self._before, self.cpu = 0.0, Cpu(0, 0), Cpu(0, 0)
        self._rss, self._lost = 0.0, ""

    def __enter__(self) -> Self:
        if not self.why_not:
            with self._output.open("wb") as out, self._complaints.open("wb") as err:
                self._process = subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *self._argv],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", "PATH": _path()},
                )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def wait_until_ready(self) -> None:
        """Until it sees everything; one that does not within half a minute gets a `why_not`."""
        if self._process is None:
            return
        deadline = time.monotonic() + _START_SECONDS
        while self._ready not in self._output.read_text(errors="replace"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                last = self._complaints.read_text(errors="replace").strip().splitlines()[-1:]
                ended = self._process.poll() is not None
                self.why_not = f"it ended: {last[0] if last else ''}" if ended else "it printed nothing"
                self._process.kill()
                self._process.wait()
                self._process = None
                return
            for _ in range(10):  # something to print, until its buffer is full for the first time
                subprocess.run(["true"], check=True)
        time.sleep(_SETTLE)

    @property
    def host_pid(self) -> int | None:
        """Its process; None if it is not measured."""
        return None if self._process is None else self._process.pid

    def begin(self) -> None:
        """The load begins now."""
        if self._process is not None:
            self._began, self._before = time.monotonic(), cpu(self._process.pid)

    def end(self, forks: int) -> None:
        """The load, with so many forks, has ended."""
        if self._process is None:
            return
        self.cpu = cpu(self._process.pid).per_cent(self._before, time.monotonic() - self._began)
        self._rss = rss(self._process.pid)
        time.sleep(_SETTLE)
        self._process.send_signal(signal.SIGINT)  # it empties its buffers
        try:
            self._process.wait(_START_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        seen = lost = 0
        with self._output.open(errors="replace") as lines:
            for line in lines:
                seen += line.startswith("fork ")
                if match := re.match(r"(?:Lost|Possibly lost) (\d+)", line):
                    lost += int(match[1])
        self._lost = f"it says it lost {lost}" + (
            f"; printed {seen} forks, the storm made {forks}" if seen else ""
        )

    def rows(self) -> list[RowValues]:
        """Its rows, or one that says why there are none."""
        if self.why_not:
            return [(f"{self.name}, CPU under it", None, "% core", None, f"not measured: {self.why_not}")]
        return [
            (f"{self.name}, CPU under it", sum(self.cpu), "% core", None, self._lost),
            ("  resident memory", self._rss, "MiB", None, ""),
        ]


def rivals(scratch: Path) -> list[Rival]:
    """``bpftrace`` that prints the same three tracepoints, and ``execsnoop-bpfcc``."""
    return [
        Rival("bpftrace", ["bpftrace", "-e", _PRINTING], scratch, "fork ", _missing("bpftrace", "bpftrace")),
        Rival(
            "execsnoop-bpfcc",
            ["execsnoop-bpfcc"],
            scratch,
            "PCOMM",
            _missing("execsnoop-bpfcc", "bpfcc-tools") or _no_kprobes(),
        ),
    ]


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _missing(command: str, package: str) -> str:
    return "" if shutil.which(command, path=_path()) else f"not installed: apt-get install {package}"


def _no_kprobes() -> str:
    if Path("/sys/bus/event_source/devices/kprobe").exists() or Path("/sys/kernel/kprobes").exists():
        return ""
    with open("/proc/kallsyms", encoding="ascii") as symbols:
        if any(line.split()[2] == "register_kprobe" for line in symbols):
            return ""
    return "this kernel has no kprobes (CONFIG_KPROBES), and it is made of them"
