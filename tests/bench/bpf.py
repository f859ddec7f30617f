"""What the kernel's map costs: to seed it, and for each fork and exit."""

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from resolver.linux.procfs import Procfs
from resolver.pids.bpf_map import LAYOUTS, KernelMap, run_stats, start
from resolver.pids.scan import ScanSource
from tests.bench.crowd import crowd
from tests.bench.timing import RowValues, command, medians, progress
from tests.fakes.bpf.lives import put, reconcile

STATS = Path("/proc/sys/kernel/bpf_stats_enabled")


def measure(processes: int) -> list[RowValues]:
    """All rows. Forks are measured before the crowd comes: it would only make the caches colder."""
    progress("the kernel's own statistics of the probes")
    rows = _in_the_kernel()
    progress(f"starting {processes} processes in 50 PID namespaces")
    with crowd(50, processes // 50):
        progress("seeding beside our scan, psutil and ps")
        return rows + _seeding()


def _fork_and_end(count: int) -> None:
    for _ in range(count):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)


def _in_the_kernel() -> list[RowValues]:
    before = STATS.read_text()
    STATS.write_text("1")
    try:
        with contextlib.closing(start()) as pidmap:
            rows = _events(pidmap, "on the host", _fork_and_end)
            return rows + _events(pidmap, "in a PID namespace", _in_a_namespace)
    finally:
        STATS.write_text(before)


def _in_a_namespace(count: int) -> None:
    code = f"from tests.bench.bpf import _fork_and_end; _fork_and_end({count})"
    subprocess.run(
        ["unshare", "--pid", "--fork", sys.executable, "-c", code],
        check=True,
        cwd=Path(__file__).parent.parent.parent,
    )


def _events(pidmap: KernelMap, where: str, work: Callable[[int], None]) -> list[RowValues]:
    """The median over turns of the mean: a busy neighbour makes the caches cold for some of them."""
    found: dict[str, list[float]] = {"on_fork": [], "on_exit": []}
    for _ in range(9):
        before = {name: run_stats(pidmap.loaded.descriptors[name]) for name in found}
        work(500)
        after = {name: run_stats(pidmap.loaded.descriptors[name]) for name in found}
        for name, values in found.items():
            spent, runs = (after[name][field] - before[name][field] for field in ("run_time_ns", "run_cnt"))
            values.append(spent / runs / 1e3)
    return [
        (
            f"in the kernel, each {name.removeprefix('on_')} {where}",
            statistics.median(values),
            "us",
            1.5,
            f"{min(values):.2f} to {max(values):.2f} us",
        )
        for name, values in found.items()
    ]


def _seeding() -> list[RowValues]:
    seeds, ready, count = [], [], 0
    for _ in range(3):
        began = time.perf_counter()
        with contextlib.closing(start()) as pidmap:
            ready.append(time.perf_counter() - began)
            count = pidmap.report["seeded"]
            for keys in [keys for keys, _ in pidmap.processes.batches()]:  # as before it is seeded
                for key in LAYOUTS["level"].iter_unpack(keys):
                    put(pidmap.processes, LAYOUTS["level"].pack(*key), b"")
            began = time.perf_counter()
            reconcile(pidmap)
            seeds.append((time.perf_counter() - began) * 1e3)

    kept = []
    with tempfile.TemporaryDirectory() as directory:
        start(kept_in=directory).close()
        for _ in range(3):
            began = time.perf_counter()
            start(kept_in=directory).close()
            kept.append(time.perf_counter() - began)

    def scan() -> None:
        ScanSource(Procfs()).refresh()

    def through_psutil() -> None:
        psutil.process_iter.cache_clear()
        for _process in psutil.process_iter(["uids"]):
            pass

    steps = {"scan": scan, "psutil": through_psutil, "ps": command(["ps", "-e", "-o", "pid,pidns"])}
    beside = {name: seconds * 1e3 for name, seconds in medians(steps, turns=5).items()}
    seed = statistics.median(seeds)
    with contextlib.closing(start()) as pidmap:
        reconciling = medians({"reconcile": lambda: reconcile(pidmap)}, turns=5)["reconcile"]
    return [
        (f"seeding {count} processes", seed, "ms", 30.0, ""),
        ("  over our own scan", seed / beside["scan"], "times", 1 / 8, f"scan {beside['scan']:.0f} ms"),
        ("  over psutil", seed / beside["psutil"], "times", 1 / 15, f"psutil {beside['psutil']:.0f} ms"),
        ("  over ps -e -o pid,pidns", seed / beside["ps"], "times", 1 / 40, f"ps {beside['ps']:.0f} ms"),
        ("ready after", statistics.median(ready), "s", 1.5, "compiling included"),
        ("  with the program that an earlier start kept", statistics.median(kept), "s", 0.5, "no LLVM"),
        ("reconciling all of them", reconciling * 1e3, "ms", None, ""),
    ]
