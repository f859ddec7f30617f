"""``resolver lookup`` with a daemon and without, on a crowded node."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.bench.timing import Progress, RowValues, command, medians
from tests.fakes.daemon import BOUND, RESOLVER, Daemon
from tests.fakes.node import Node
from tests.patience import until


def measure(scratch: Path, progress: Progress) -> list[RowValues]:
    """The command beside an empty Python: its start is most of both. To be called while the crowd is there."""
    progress("resolver lookup beside python3 -c pass")
    run_dir = scratch / "lookup"
    daemon = Daemon(None, run_dir, "--dry-run", "--source", "bpf", wrapper=BOUND)
    with daemon, Node(scratch / "lookup-node", "535.183.01") as node:
        container = node.container(watcher=False)
        host_pid = container.init_host_pid
        until(daemon.socket.exists, "its socket")
        ask = [str(RESOLVER), "lookup", container.container_id, "1", "--socket"]
        steps = {"pass": command([sys.executable, "-c", "pass"])}
        for name, place in (("no daemon", "/nonexistent"), ("through the daemon", str(daemon.socket))):
            answer = subprocess.run([*ask, place], capture_output=True, text=True, check=True).stdout
            if int(answer) != host_pid:
                raise RuntimeError(f"lookup, {name}, said {answer.strip()}, the truth is {host_pid}")
            steps[name] = command([*ask, place])
        found = medians(steps, turns=21)
    nothing = found.pop("pass")
    beside = f"python3 -c pass {nothing * 1e3:.1f} ms"
    rows: list[RowValues] = []
    for (name, lookup), bound in zip(found.items(), (2.6, 2.2), strict=True):
        separator = ", " if name == "no daemon" else " "
        rows += [
            (f"resolver lookup{separator}{name}", lookup * 1e3, "ms", None, beside),
            ("  over python3 -c pass", lookup / nothing, "times", bound, ""),
        ]
    return rows
