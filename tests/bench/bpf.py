"""What the kernel's map costs: to seed it, for each fork and exit, and to ask it."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from resolver.linux.procfs import Procfs
from resolver.pids.bpf_map import BpfPidMap, Sizes, start
from resolver.pids.ladder import room
from resolver.pids.scan import ScanSource
from tests.bench.crowd import crowd
from tests.bench.timing import Progress, RowValues, command, medians

STATS = Path("/proc/sys/kernel/bpf_stats_enabled")
PID_MAX = Path("/proc/sys/kernel/pid_max")
TRUE = "/bin/true"


def measure(processes: int, progress: Progress) -> list[RowValues]:
    """All rows. Forks are measured before the crowd comes: it would only make the caches colder for both sides."""
    progress("fork, exec and exit with the probes and without, in turns")
    rows = _with_and_without()
    progress("the kernel's own statistics of the probes")
    rows += _in_the_kernel()
    progress(f"starting {processes} processes in 50 PID namespaces")
    with crowd(50, processes // 50):
        progress("seeding beside our scan, psutil and ps")
        rows += _seeding()
        progress("look-ups")
        rows += _look_ups()
    return rows + _crowded(progress)


@contextlib.contextmanager
def loaded() -> Iterator[BpfPidMap]:
    """The map, for as long as the block lasts."""
    pidmap = start()
    try:
        yield pidmap
    finally:
        pidmap.close()


# -- fork and exit --------------------------------------------------------------------------------------------


def _live_and_end(count: int) -> None:
    for _ in range(count):
        os.waitpid(os.posix_spawn(TRUE, [TRUE], {}), 0)


def _timed(count: int) -> float:
    """Microseconds for one fork, exec, exit and wait."""
    began = time.perf_counter()
    _live_and_end(count)
    return (time.perf_counter() - began) / count * 1e6


def _with_and_without(turns: int = 8, count: int = 250) -> list[RowValues]:
    with_probes, without = [], []
    _live_and_end(count)
    for _ in range(turns):
        without.append(_timed(count))
        with loaded():
            with_probes.append(_timed(count))
    on, off = statistics.median(with_probes), statistics.median(without)
    spread = max(without) - min(without)
    return [
        ("fork + exec + exit with the probes", on, "us", None, f"without {off:.0f} us"),
        ("  difference, and the spread without the probes as its bound", abs(on - off), "us", spread, ""),
    ]


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
        with loaded() as pidmap:
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


def _events(pidmap: BpfPidMap, where: str, work: Callable[[int], None]) -> list[RowValues]:
    """The median over turns of the mean: a busy neighbour makes the caches cold for some of them."""
    found: dict[str, list[float]] = {"on_fork": [], "on_exit": []}
    for _ in range(9):
        before = pidmap.run_stats()
        work(500)
        after = pidmap.run_stats()
        for name, values in found.items():
            spent, runs = (after[name][field] - before[name][field] for field in ("run_time_ns", "run_cnt"))
            values.append(spent / runs / 1e3)
    return [
        (
            f"in the kernel, each {name.removeprefix('on_')} {where}",
            statistics.median(values),
            "us",
            0.5 if where == "on the host" else 0.7,
            f"{min(values):.2f} to {max(values):.2f} us",
        )
        for name, values in found.items()
    ]


# -- a hundred thousand -----------------------------------------------------------------------------------------


def _crowded(progress: Progress, few: int = 1000, many: int = 100_000) -> list[RowValues]:
    """Real processes, which share their container's memory; ``kernel.pid_max`` is raised for as long as they run."""
    progress(f"starting {few} processes, then {many}")
    with crowd(10, few // 10, light=True):
        _, before, _, _ = _seed_and_look_up()
    allowed = PID_MAX.read_text()
    PID_MAX.write_text(str(max(int(allowed), 4 * many)))
    try:
        with crowd(100, many // 100, light=True):
            seed, slow, memory, places = _seed_and_look_up()
    finally:
        PID_MAX.write_text(allowed)
    return [
        (f"seeding {many} processes", seed, "ms", 120.0, f"the map has room for {places}"),
        ("  a look-up among them", slow, "us", None, "by namespace and PID, at random"),
        (f"  over one among {few}", slow / before, "times", 1.5, f"{before:.2f} us"),
        (
            "  the maps' kernel memory",
            memory,
            "MiB",
            None,
            f"{memory * 2**20 / places:.0f} bytes for each place",
        ),
    ]


def _seed_and_look_up() -> tuple[float, float, float, int]:
    """Milliseconds, microseconds, MiB, and for how many processes there is room."""
    places = room(Procfs(), 0)
    seeds = []
    for _ in range(3):
        with contextlib.closing(start(Sizes(processes=places))) as pidmap:
            seeds.append(pidmap.report["milliseconds"]["seed"])
    with contextlib.closing(start(Sizes(processes=places))) as pidmap:
        if not pidmap.complete():
            raise RuntimeError(f"the map does not hold every process: {pidmap.counters()}")
        keys = [record.levels[-1] for record in pidmap.dump().values() if len(record.levels) == 2]
        random.shuffle(keys)
        # Made anew, one behind the other: it is the map's memory that is to be cold, not this list's.
        chosen = itertools.cycle([(int(str(pidns)), int(str(ns_pid))) for pidns, ns_pid in keys[:10_000]])
        each = _each(lambda: pidmap.lookup(*next(chosen)), 90_000)
        memory = sum(int(_memlock(fd)) for fd in pidmap._loaded.maps.values())
    return statistics.median(seeds), each, memory / 2**20, places


def _memlock(fd: int) -> str:
    lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("memlock:"))


# -- the whole node ----------------------------------------------------------------------------------------------


def _seeding() -> list[RowValues]:
    seeds, ready, compile_ms, count = [], [], [], 0
    for _ in range(3):
        began = time.perf_counter()
        with loaded() as pidmap:
            ready.append(time.perf_counter() - began)
            seeds.append(pidmap.report["milliseconds"]["seed"])
            compile_ms.append(pidmap.report["milliseconds"]["compile"])
            count = pidmap.report["seeded"]

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
    with loaded() as pidmap:
        reconcile = medians({"reconcile": pidmap.reconcile, "dump": pidmap.dump}, turns=5)
    return [
        (f"seeding {count} processes", seed, "ms", 15.0, ""),
        ("  over our own scan", seed / beside["scan"], "times", 1 / 8, f"scan {beside['scan']:.0f} ms"),
        ("  over psutil", seed / beside["psutil"], "times", 1 / 15, f"psutil {beside['psutil']:.0f} ms"),
        ("  over ps -e -o pid,pidns", seed / beside["ps"], "times", 1 / 40, f"ps {beside['ps']:.0f} ms"),
        (
            "ready after",
            statistics.median(ready),
            "s",
            1.5,
            f"compiling {statistics.median(compile_ms):.0f} ms",
        ),
        ("  with the program that an earlier start kept", statistics.median(kept), "s", 0.5, "no LLVM"),
        ("reconciling all of them", reconcile["reconcile"] * 1e3, "ms", None, ""),
        ("listing all of them", reconcile["dump"] * 1e3, "ms", None, ""),
    ]


def _look_ups(count: int = 20_000) -> list[RowValues]:
    procfs = Procfs()
    with loaded() as pidmap:
        record = next(record for record in pidmap.dump().values() if len(record.levels) == 2)
        host_pid, own = record.host_pid, record.levels[-1]

        def verified() -> None:
            found = pidmap.lookup(*own)
            if found is None or procfs.process(found.host_pid) != (host_pid, found.start_time, found.ns_pids):
                raise RuntimeError(f"the map says {found}, and /proc does not")

        steps: list[tuple[str, Callable[[], object], float | None, int]] = [
            ("look-up by namespace and PID", lambda: pidmap.lookup(*own), 3.0, count),
            ("look-up by host PID", lambda: pidmap.by_host(host_pid), 3.0, count),
            ("  verified against /proc", verified, 60.0, count // 10),
            (f"every process with that PID, in {len(pidmap.namespaces())} namespaces",
             lambda: pidmap.candidates(own[1]), None, count // 50),
            ("tombstone", lambda: pidmap.tombstone(host_pid), None, count // 10),
        ]  # fmt: skip
        return [(name, _each(step, times), "us", bound, "") for name, step, bound, times in steps]


def _each(step: Callable[[], object], times: int) -> float:
    """Microseconds for one, as the median of nine runs."""
    found = []
    for _ in range(9):
        began = time.perf_counter()
        for _ in range(times // 9):
            step()
        found.append((time.perf_counter() - began) / (times // 9) * 1e6)
    return statistics.median(found)
