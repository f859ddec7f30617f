"""A node where 5,000 processes a second begin and end: what the daemon costs, and what it loses.

Beside it, under the same load at the same time, the daemon with its other sources. What the probes cost
in the kernel is charged to the processes that fork, and is in none of these numbers: see `bpf`.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from resolver import client
from tests.bench.timing import Progress, RowValues
from tests.bench.usage import Cpu, children, cpu, rss
from tests.fakes.container import Container
from tests.fakes.daemon import BOUND, Daemon
from tests.fakes.node import Node

_RATE = 5000
_STARTS = 5
_SETTLE, _QUIET = 3.0, 10.0
_LOOK_EVERY = 2.0

_HERE = Path(__file__).parent


class Storm(NamedTuple):
    """What the storm did."""

    forks: int
    seconds: float


class Looks(NamedTuple):
    """Look-ups of processes that have just begun: how many, how many were not answered right, milliseconds of each."""

    made: int
    wrong: int
    milliseconds: list[float]


def measure(seconds: float, scratch: Path, progress: Progress) -> list[RowValues]:
    """All rows; takes some 50 seconds longer than the storm."""
    program = build_storm(scratch)
    with Node(scratch / "storm" / "node", "535.183.01") as node:
        for number in range(4):
            node.container(name=f"c{number}").tenant(load=10, guess="none")
        progress("how long the daemon takes to be ready with --source bpf")
        ready = sorted(_ready(node) for _ in range(_STARTS))
        return [*_storm(node, program, seconds, progress), _ready_row(ready)]


def build_storm(scratch: Path) -> Path:
    """The program that makes processes, see ``storm.c``."""
    program = scratch / "storm" / "storm"
    program.parent.mkdir()
    subprocess.run(["cc", "-O2", "-Wall", "-Werror", "-static", "-o", program, _HERE / "storm.c"], check=True)
    return program


def _ready_row(ready: list[float]) -> RowValues:
    middle = statistics.median(ready)
    return (
        "ready with --source bpf",
        middle,
        "s",
        1.5,
        f"of {len(ready)} starts the longest {ready[-1]:.2f} s",
    )


def _ready(node: Node) -> float:
    """Seconds from the start of the process to the word that everything runs."""
    with _daemon(node, "bpf") as daemon:
        return float(daemon.wait_for("started")["at"]) - daemon.started_at


def _daemon(node: Node, source: str) -> Daemon:
    """A daemon of its own run directory. All but the first only look: two that write would be in each other's way."""
    options = ["--source", source, *(["--dry-run"] if source != "bpf" else [])]
    return Daemon(node, node.root / f"run-{source}", *options, wrapper=BOUND)


# -- the storm ------------------------------------------------------------------------------------------------


class Watched:
    """A daemon and what it used before the storm and in it."""

    def __init__(self, source: str, daemon: Daemon) -> None:
        self.source = source
        self.daemon = daemon
        self.host_pid = daemon.process.pid
        self.quiet = self.busy = Cpu(0, 0)


def _storm(node: Node, program: Path, seconds: float, progress: Progress) -> list[RowValues]:
    with contextlib.ExitStack() as stack:
        watched = [
            Watched(source, stack.enter_context(_daemon(node, source)))
            for source in ("bpf", "netlink", "scan")
        ]
        for each in watched:
            each.daemon.wait_for("started")
        time.sleep(_SETTLE)
        progress(f"{_QUIET:.0f} s without a storm")
        began, before = time.monotonic(), [cpu(each.host_pid) for each in watched]
        time.sleep(_QUIET)
        for each, then in zip(watched, before, strict=True):
            each.quiet = cpu(each.host_pid).per_cent(then, time.monotonic() - began)
        began, before = time.monotonic(), [cpu(each.host_pid) for each in watched]
        storm, looks = _during(program, seconds, node, watched[0], progress)
        for each, then in zip(watched, before, strict=True):
            each.busy = cpu(each.host_pid).per_cent(then, time.monotonic() - began)
        rows = [_storm_row(storm), *_bpf_rows(watched[0], looks)]
        for each in watched[1:]:
            rows += _other_rows(each)
    return rows


def _during(
    program: Path, seconds: float, node: Node, ours: Watched, progress: Progress
) -> tuple[Storm, Looks]:
    """Let it storm, and ask the daemon for a process that has just begun, every two seconds."""
    looks = Looks(0, 0, [])
    with subprocess.Popen([program, str(_RATE), str(seconds)], stdout=subprocess.PIPE, text=True) as storm:
        began = time.monotonic()
        while (left := began + seconds - time.monotonic()) > 0:
            if looks.made % 5 == 0:
                progress(f"{_RATE} forks a second for another {left:.0f} s")
            looks = _look(node.containers[looks.made % len(node.containers)], ours, looks)
            time.sleep(min(_LOOK_EVERY, max(0.0, began + seconds - time.monotonic())))
        said = storm.stdout.read() if storm.stdout else ""
    if storm.returncode != 0 or not said:
        raise RuntimeError("the storm ended early: its message is above")
    forks, took = said.split()
    return Storm(int(forks), float(took)), looks


def _look(container: Container, ours: Watched, looks: Looks) -> Looks:
    """A new process of the container, by the daemon's socket: its host PID must be the true one."""
    tenant = container.tenant(guess="none")
    path = f"/v1/lookup?container={container.container_id}&pid={tenant.ns_pid}"
    began = time.perf_counter()
    answer = client.get(path, socket_path=str(ours.daemon.socket), accept="text/plain")
    took = (time.perf_counter() - began) * 1e3
    right = answer == (200, f"{tenant.host_pid}\n")
    tenant.stop()
    return Looks(looks.made + 1, looks.wrong + (not right), [*looks.milliseconds, took])


# -- rows -----------------------------------------------------------------------------------------------------


def _storm_row(storm: Storm) -> RowValues:
    reached = storm.forks / storm.seconds
    beside = f"{storm.forks} in {storm.seconds:.1f} s, wanted {_RATE}"
    return ("forks a second in a PID namespace", reached, "/s", None, beside)


def _bpf_rows(ours: Watched, looks: Looks) -> list[RowValues]:
    weight, theirs = rss(ours.host_pid), sum(map(rss, children(ours.host_pid)))
    middle, longest = statistics.median(looks.milliseconds), max(looks.milliseconds)
    return [
        ("daemon, --source bpf, CPU under it", sum(ours.busy), "% core", 0.5, _without(ours)),
        (
            "  new processes not found at once through its socket",
            looks.wrong,
            "",
            0,
            f"of {looks.made}; median {middle:.1f} ms, longest {longest:.1f} ms",
        ),
        ("  resident memory", weight, "MiB", None, f"its children {theirs:.0f} MiB"),
    ]


def _other_rows(other: Watched) -> list[RowValues]:
    """The daemon with another source. What it lost, it says when it ends."""
    weight = rss(other.host_pid)
    other.daemon.stop()
    counted = other.daemon.said("stopped")[-1]
    events = counted.get("source_events", 0)
    said = (
        f"its buffer was full {counted.get('source_overruns', 0)} times in {events} events" if events else ""
    )
    return [
        (f"daemon, --source {other.source}, CPU under it", sum(other.busy), "% core", None, _without(other)),
        ("  resident memory", weight, "MiB", None, said),
    ]


def _without(watched: Watched) -> str:
    return f"without it {sum(watched.quiet):.2f}; of its children {watched.busy.children:.2f}"
