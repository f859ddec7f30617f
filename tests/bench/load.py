"""CPU, memory and lost events of the daemon, by source, on a node where 5,000 processes a second start and end.

The daemons of all sources run at the same time. The probes' cost in the kernel is charged to the forking processes,
so it is not in these figures: see `bpf`.
"""

import contextlib
import statistics
import subprocess
import time
from pathlib import Path
from typing import Final

from resolver import client
from tests.bench.timing import RowValues, progress
from tests.bench.usage import Cpu, children, cpu, rss
from tests.fakes.container import Container
from tests.fakes.daemon import BOUND, Daemon
from tests.fakes.node import Node

SOURCES: Final = ("bpf", "netlink", "scan")
_RATE: Final = 5000
_SETTLE, _QUIET, _LOOK_EVERY = 3.0, 10.0, 2.0


def measure(seconds: float, scratch: Path) -> list[RowValues]:
    program = scratch / "storm" / "storm"
    program.parent.mkdir()
    source = Path(__file__).with_name("storm.c")
    subprocess.run(["cc", "-O2", "-Wall", "-Werror", "-static", "-o", program, source], check=True)
    with Node(program.parent / "node", "535.183.01") as node, contextlib.ExitStack() as stack:
        for number in range(4):
            node.container(name=f"c{number}").tenant(load=10, guess="none")
        daemons = {source: stack.enter_context(_daemon(node, source)) for source in SOURCES}
        for daemon in daemons.values():
            daemon.wait_for("started")
        time.sleep(_SETTLE)
        progress(f"{_QUIET:.0f} s without a storm")
        began, before = time.monotonic(), _used(daemons)
        time.sleep(_QUIET)
        quiet = _since(before, daemons, began)
        began, before = time.monotonic(), _used(daemons)
        forks, took, lookups = _storm([str(program), str(_RATE), str(seconds)], node, daemons["bpf"])
        busy = _since(before, daemons, began)
        return [
            ("forks a second in a PID namespace", forks / took, "/s", None, f"{forks} in {took:.1f} s, wanted {_RATE}"),
            *(row for name in SOURCES for row in _rows(name, daemons[name], quiet[name], busy[name], lookups)),
        ]  # fmt: skip


def _daemon(node: Node, source: str) -> Daemon:
    """Return a daemon with its own run directory. All but the first are dry runs, because two would overwrite slots."""
    options = ["--source", source, *(["--dry-run"] if source != "bpf" else [])]
    return Daemon(node, node.root / f"run-{source}", *options, wrapper=BOUND)


def _used(daemons: dict[str, Daemon]) -> dict[str, Cpu]:
    return {name: cpu(daemon.process.pid) for name, daemon in daemons.items()}


def _since(before: dict[str, Cpu], daemons: dict[str, Daemon], began: float) -> dict[str, Cpu]:
    seconds = time.monotonic() - began
    return {name: used.per_cent(before[name], seconds) for name, used in _used(daemons).items()}


def _storm(command: list[str], node: Node, ours: Daemon) -> tuple[int, float, list[tuple[bool, float]]]:
    """Run the storm, and look up a new process every two seconds. Returns forks, seconds and look-ups."""
    lookups: list[tuple[bool, float]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as storm:
        while storm.poll() is None:
            if len(lookups) % 5 == 0:
                progress(f"{_RATE} forks a second, look-up {len(lookups)}")
            lookups.append(_look_up(node.containers[len(lookups) % len(node.containers)], ours))
            with contextlib.suppress(subprocess.TimeoutExpired):
                storm.wait(_LOOK_EVERY)
        said = storm.stdout.read() if storm.stdout else ""
    if storm.returncode != 0 or not said:
        raise RuntimeError("the storm ended early: its message is above")
    forks, took = said.split()
    return int(forks), float(took), lookups


def _look_up(container: Container, ours: Daemon) -> tuple[bool, float]:
    """Look up a new process of the container: True if the host PID is right, and milliseconds."""
    tenant = container.tenant(guess="none")
    path = f"/v1/lookup?container={container.container_id}&pid={tenant.ns_pid}"
    began = time.perf_counter()
    answer = client.get(path, socket_path=str(ours.socket), accept="text/plain")
    took = (time.perf_counter() - began) * 1e3
    right = answer == (200, f"{tenant.host_pid}\n")
    tenant.stop()
    return right, took


def _rows(
    source: str, daemon: Daemon, quiet: Cpu, busy: Cpu, lookups: list[tuple[bool, float]]
) -> list[RowValues]:
    """Return a daemon's rows. Its last log line, at its end, has the number of lost events."""
    pid, ours = daemon.process.pid, source == "bpf"
    without = f"without forks {sum(quiet):.2f}; children {busy.children:.2f}"
    rows: list[RowValues] = [
        (f"CPU of the daemon during these forks, --source {source}", sum(busy), "% core", None, without)
    ]
    weight, said = rss(pid), f"its children {sum(map(rss, children(pid))):.0f} MiB"
    if ours:
        took = [milliseconds for _, milliseconds in lookups]
        wrong = sum(not right for right, _ in lookups)
        beside = f"of {len(lookups)}; median {statistics.median(took):.1f} ms, longest {max(took):.1f} ms"
        rows.append(("  new processes that a look-up did not find at once", wrong, "", 0, beside))
    else:
        daemon.stop()
        counted = daemon.said("stopped")[-1]
        events = counted.get("source_events", 0)
        said = f"it lost {counted.get('source_lost', 0)} of {events} events" if events else ""
    return [*rows, ("  resident memory", weight, "MiB", None, said)]
