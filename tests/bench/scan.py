"""A full scan of ``/proc``, and ``resolver lookup`` with a daemon and without, on a crowded node."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from resolver.linux.procfs import Procfs
from resolver.pids.pidmap import PidMap
from resolver.pids.scan import ScanSource
from tests.bench.timing import Progress, RowValues, command, medians
from tests.fakes.daemon import BOUND, RESOLVER, Daemon
from tests.fakes.direct import catch_up
from tests.fakes.node import Node
from tests.patience import until


def measure(wanted: Sequence[str], scratch: Path, progress: Progress) -> list[RowValues]:
    """The rows for both; to be called while the crowd is there."""
    rows: list[RowValues] = []
    if "scan" in wanted:
        progress("scanning /proc beside grep, psutil and ps")
        rows += _scan()
    if "lookup" in wanted:
        progress("resolver lookup beside python3 -c pass")
        rows += _lookup(scratch)
    return rows


def _scan() -> list[RowValues]:
    def ours() -> PidMap:
        pidmap = PidMap(ScanSource(Procfs()))
        catch_up(pidmap)
        return pidmap

    def through_psutil() -> None:
        # psutil does not give NSpid; uids come from the same file. Without its cache: ours starts anew as well.
        psutil.process_iter.cache_clear()
        for _process in psutil.process_iter(["uids"]):
            pass

    settled = ours()

    def again() -> None:
        catch_up(settled)

    found = medians(
        {
            "scan": ours,
            "again": again,
            "grep": command("grep -h NSpid /proc/[0-9]*/status 2>/dev/null || true"),
            "psutil": through_psutil,
            "ps": command(["ps", "-e", "-o", "pid,pidns"]),
        },
        turns=7,
    )
    count = len(settled.source)
    scan, grep, psutil_seconds, ps = found["scan"], found["grep"], found["psutil"], found["ps"]
    return [
        (f"full scan of {count} processes", scan * 1e3, "ms", None, f"ps {ps * 1e3:.0f} ms"),
        ("  over grep -h NSpid /proc/[0-9]*/status", scan / grep, "times", 1.2, f"grep {grep * 1e3:.0f} ms"),
        ("  over psutil", scan / psutil_seconds, "times", 0.5, f"psutil {psutil_seconds * 1e3:.0f} ms"),
        ("the same again, nothing changed", found["again"] * 1e3, "ms", None, ""),
    ]


def _lookup(scratch: Path) -> list[RowValues]:
    """The command beside an empty Python: its start is most of both."""
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
