"""What a user would run instead, in the same run and in turns: to follow processes, and to translate a PID.

Each tool alone, one after the other, again and again, so that a busy moment hits all of them: medians, and from the
lowest to the highest. What others publish of tools that can't be had here stands at the end, as published.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.bench.bpf import STATS
from tests.bench.load import build_storm
from tests.bench.rivals import Rival, rivals
from tests.bench.scan import in_container
from tests.bench.timing import Progress, RowValues, command, runs
from tests.bench.usage import children, cpu, rss

_RATE, _SECONDS, _TURNS = 2000, 4.0, 3
_SETTLE = 2.0
_LOOKUP_TURNS = 15
_START_SECONDS = 30.0

#: What one writes with psutil: the process in that cgroup with that number in its own PID namespace.
_PSUTIL = """
import psutil, sys
container, wanted = sys.argv[1:]
for process in psutil.process_iter():
    try:
        if container in open(f"/proc/{process.pid}/cgroup").read():
            status = open(f"/proc/{process.pid}/status").read()
            if status.split("NSpid:")[1].split("\\n")[0].split()[-1] == wanted:
                print(process.pid)
    except (OSError, psutil.Error):
        pass
"""
#: What one types: the processes of the container by ps, then their NSpid lines.
_PS = (
    "ps -e -ww -o pid=,cgroup= | grep -F {container} | while read -r pid rest; do "
    "awk -v pid=$pid '/^NSpid:/ && $NF == {ns_pid} {{ print pid }}' /proc/$pid/status; done"
)

#: Read in public reports, not measured here; what runs on a node decides.
_PUBLISHED: list[RowValues] = [
    (
        "dcgm-exporter, memory, as published",
        484.0,
        "MiB",
        None,
        "median of 12 nodes with 8 GPUs, 417 to 511: github.com/pytorch/ci-infra/issues/1011 (2026-08)",
    ),
    (
        "cAdvisor, memory, as published",
        83.0,
        "MiB",
        None,
        "median of 5 nodes, 53 to 106; 0.11 to 0.2 of a core: github.com/cybozu-go/neco-apps/pull/2423 (2022-03)",
    ),
]


class Cost(NamedTuple):
    """Of one tool in one storm: per cent of a core in user space, microseconds of its BPF programs a process, MiB."""

    cpu: float
    kernel: float
    memory: float


def measure(scratch: Path, progress: Progress) -> list[RowValues]:
    """To be called while a crowd is there, as look-ups have to find one process among many."""
    scratch = scratch / "peers"
    scratch.mkdir()
    return [*_following(scratch, progress), *_looking_up(scratch, progress), *_PUBLISHED]


# ---- following processes --------------------------------------------------------------------------------------


def _following(scratch: Path, progress: Progress) -> list[RowValues]:
    program = build_storm(scratch)
    costs: dict[str, list[Cost]] = {}
    why_not: dict[str, str] = {}
    before = STATS.read_text()
    STATS.write_text("1")
    try:
        for turn in range(1, _TURNS + 1):
            progress(
                f"turn {turn} of {_TURNS}: {_RATE} processes a second, under resolver, bpftrace, execsnoop"
            )
            with _daemon(scratch / f"daemon-{turn}") as (_, host_pid):
                costs.setdefault("resolver", []).append(_under(host_pid, program))
            place = scratch / f"rivals-{turn}"
            place.mkdir()
            for rival in rivals(place):
                cost = _rival(rival, program)
                if cost is None:
                    why_not[rival.name] = rival.why_not
                else:
                    costs.setdefault(rival.name, []).append(cost)
    finally:
        STATS.write_text(before)
    rows: list[RowValues] = []
    for what, unit, field in (
        ("CPU in user space", "% core", "cpu"),
        ("in the kernel, each process", "us", "kernel"),
        ("resident memory", "MiB", "memory"),
    ):
        ours = statistics.median(getattr(cost, field) for cost in costs["resolver"])
        for name, found in costs.items():
            values = [getattr(cost, field) for cost in found]
            beside = f"{min(values):.2f} to {max(values):.2f}"
            if name != "resolver":
                beside += f"; resolver's is {_share(ours, statistics.median(values))}"
            rows.append(
                (f"following processes, {name}: {what}", statistics.median(values), unit, None, beside)
            )
    rows += [
        (f"following processes, {name}", None, "", None, f"not measured: {why}")
        for name, why in why_not.items()
    ]
    return rows


def _share(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f} times as much" if theirs else "not to be compared with 0"


def _rival(rival: Rival, program: Path) -> Cost | None:
    with rival:
        rival.wait_until_ready()
        if rival.host_pid is None:
            return None
        return _under(rival.host_pid, program)


def _under(host_pid: int, program: Path) -> Cost:
    """One storm, and what the tool and its children paid for it."""
    time.sleep(_SETTLE)
    began, used, ran = time.monotonic(), cpu(host_pid), _programs_seconds(host_pid)
    storm = subprocess.run([program, str(_RATE), str(_SECONDS)], capture_output=True, text=True, check=True)
    took = time.monotonic() - began
    forks = int(storm.stdout.split()[0])
    return Cost(
        sum(cpu(host_pid).per_cent(used, took)),
        (_programs_seconds(host_pid) - ran) / forks * 1e6,
        rss(host_pid) + sum(map(rss, children(host_pid))),
    )


def _programs_seconds(host_pid: int) -> float:
    """Seconds that the BPF programs have run which a process holds, by the kernel's statistics."""
    nanoseconds = 0
    for entry in Path(f"/proc/{host_pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):
            for line in entry.read_text().splitlines():
                if line.startswith("run_time_ns:"):
                    nanoseconds += int(line.split()[1])
    return nanoseconds / 1e9


@contextlib.contextmanager
def _daemon(run_dir: Path) -> Iterator[tuple[str, int]]:
    """A daemon that follows processes and answers; its socket and host PID."""
    argv = [sys.executable, "-m", "resolver", "run", "--dry-run", "--source", "bpf", "--log-level", "error"]
    daemon = subprocess.Popen([*argv, "--run-dir", str(run_dir)], stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not (run_dir / "resolver.sock").exists():
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the daemon with --source bpf did not start: its message is above")
            time.sleep(0.01)
        yield str(run_dir / "resolver.sock"), daemon.pid
    finally:
        daemon.terminate()
        daemon.wait()


# ---- look-ups ---------------------------------------------------------------------------------------------------


def _looking_up(scratch: Path, progress: Progress) -> list[RowValues]:
    progress("a container's PID to the host's: resolver, psutil, ps and grep; and back: resolver, nsenter")
    python, resolver = sys.executable, str(Path(sys.executable).with_name("resolver"))
    with in_container() as (container_id, host_pid), _daemon(scratch / "lookup") as (socket_path, _):
        there: dict[str, list[str] | str] = {
            "resolver lookup, through the daemon": [
                resolver,
                "lookup",
                "--socket",
                socket_path,
                container_id,
                "1",
            ],
            "resolver lookup, no daemon": [resolver, "lookup", "--socket", "/nonexistent", container_id, "1"],
            "psutil": [python, "-c", _PSUTIL, container_id, "1"],
            "ps and awk": _PS.format(container=container_id, ns_pid=1),
        }
        back: dict[str, list[str] | str] = {
            "resolver reverse": [resolver, "reverse", "--socket", socket_path, str(host_pid)],
            "nsenter and ps": f"nsenter -t {host_pid} -p unshare -m sh -c "
            "'mount -t proc proc /proc && ps -e -o pid,comm'",
        }
        for name, words in there.items():
            said = subprocess.run(
                words, shell=isinstance(words, str), capture_output=True, text=True, check=True
            ).stdout.strip()
            if said != str(host_pid):
                raise RuntimeError(f"{name} says {said!r}, the host PID is {host_pid}")
        return [
            *_compared("container's PID to host PID", there),
            *_compared("host PID to container's PID", back),
        ]


def _compared(question: str, ways: dict[str, list[str] | str]) -> list[RowValues]:
    """Milliseconds of each way; the first is what the others are compared with."""
    steps: dict[str, Callable[[], object]] = {name: command(words) for name, words in ways.items()}
    found = runs(steps, _LOOKUP_TURNS)
    first = statistics.median(next(iter(found.values())))
    rows: list[RowValues] = []
    for name, seconds in found.items():
        middle = statistics.median(seconds)
        spread = f"{min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f}"
        beside = spread if middle == first else f"{spread}; {middle / first:.1f} times the first"
        rows.append((f"{question}: {name}", middle * 1e3, "ms", None, beside))
    return rows
