"""CPU and memory of the daemon: 64 containers on 8 GPUs, idle or with starting processes, and 256 under load."""

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.bench.timing import RowValues, progress
from tests.bench.usage import Cpu, children, cpu, memory
from tests.fakes.daemon import BOUND, Daemon, free_port
from tests.fakes.gpu import DEFAULT_DEVICES, Device
from tests.fakes.node import Node
from tests.fakes.process import Tenant

_CONTAINERS, _GPUS, _SECONDS = 64, 8, 30.0
_SETTLE_SECONDS = 75.0  # files are read often during the first minute
_AIM = 0.35  # per cent of a core
_STARTS = 1, 3  # processes a second, for the resource requests in the chart's README
_LIVING = 12  # most started processes that run at a time
#: Of 256 containers, under load; the stand-in for the driver knows 256 processes.
_BUSY = 224


class Idle(NamedTuple):
    """CPU in per cent of a core, and voluntary context switches a second."""

    cpu: Cpu
    wakes: float


def measure(scratch: Path) -> list[RowValues]:
    return [*_quiet(scratch), *_busy(scratch)]


def _busy(scratch: Path) -> list[RowValues]:
    """Measure 256 containers, most with a busy process, whose watchers write its utilization."""
    with Node(scratch / "busy", "535.183.01") as node:
        progress(f"256 containers, {_BUSY} with a busy process")
        for number in range(256):
            container = node.container(name=f"c{number}")
            if number < _BUSY:
                container.tenant(load=20, guess="none")
        options = ["--source", "auto", "--metrics-addr", f"127.0.0.1:{free_port()}", "--log-level", "error"]
        with Daemon(node, scratch / "busy-run", *options, wrapper=BOUND) as daemon:
            time.sleep(_SETTLE_SECONDS)
            progress(f"{_SECONDS:.0f} s of ticks")
            busy, mib = _watch(daemon.process.pid), memory(daemon.process.pid)
    beside = f"daemon {busy.cpu.own:.2f}, children {busy.cpu.children:.2f}"
    return [
        ("CPU with 256 containers whose watchers tick", sum(busy.cpu), "% core", None, beside),
        ("  memory of all of it", mib, "MiB", None, "PSS, children included"),
    ]


def _quiet(scratch: Path) -> list[RowValues]:
    """Measure an idle process in each container, then starts beside them, then no process."""
    devices = [
        *DEFAULT_DEVICES[:1],
        *(Device(f"GPU-{number:08x}-0000-4000-8000-000000000000") for number in range(1, _GPUS)),
    ]
    with Node(scratch / "idle", "535.183.01", devices) as node:
        progress(f"{_CONTAINERS} containers, each with a process that does nothing, {_GPUS} GPUs")
        for number in range(_CONTAINERS):
            device = devices[number % _GPUS]
            node.container(name=f"c{number}", devices=[device]).tenant(guess="none")
        options = ["--source", "auto", "--metrics-addr", f"127.0.0.1:{free_port()}", "--log-level", "error"]
        with Daemon(node, scratch / "idle-run", *options, wrapper=BOUND) as daemon:
            time.sleep(_SETTLE_SECONDS)
            progress(f"{_SECONDS:.0f} s of nothing")
            with_slots = _watch(daemon.process.pid)
            starting = {}
            for rate in _STARTS:
                progress(f"{rate} starts a second")
                starting[rate] = _watch(daemon.process.pid, lambda rate=rate: _start(node, rate))  # type: ignore[misc]
            for container in node.containers:
                container.stop()
            time.sleep(_SETTLE_SECONDS)
            progress(f"and {_SECONDS:.0f} s without a container")
            without = _watch(daemon.process.pid)
    return [
        *_rows(f"CPU of a quiet node, {_CONTAINERS} idle processes with a slot, {_GPUS} GPUs", with_slots),
        *(
            (f"  with {rate} starts a second", sum(idle.cpu), "% core", None, "")
            for rate, idle in starting.items()
        ),
        *_rows(f"CPU with {_CONTAINERS} cache files and no process", without, None),
    ]


def _rows(name: str, idle: Idle, aim: float | None = _AIM) -> list[RowValues]:
    return [
        (name, sum(idle.cpu), "% core", aim, f"daemon {idle.cpu.own:.3f}, children {idle.cpu.children:.3f}"),
        ("  wake-ups", idle.wakes, "/s", None, ""),
    ]


def _start(node: Node, rate: int) -> None:
    """Start a busy tenant in each container in turn; above `_LIVING`, end the oldest."""
    living, began = deque[Tenant](), time.monotonic()
    for number in range(round(_SECONDS * rate)):
        living.append(node.containers[number % _CONTAINERS].tenant(load=20, guess="wrong"))
        if len(living) > _LIVING:
            living.popleft().kill()
        time.sleep(max(0.0, began + (number + 1) / rate - time.monotonic()))


def _watch(daemon: int, meanwhile: Callable[[], None] = lambda: time.sleep(_SECONDS)) -> Idle:
    began, before, woken = time.monotonic(), cpu(daemon), _wakes(daemon)
    meanwhile()
    seconds = time.monotonic() - began
    return Idle(cpu(daemon).per_cent(before, seconds), (_wakes(daemon) - woken) / seconds)


def _wakes(daemon: int) -> int:
    total = 0
    for host_pid in (daemon, *children(daemon)):
        for task in Path(f"/proc/{host_pid}/task").iterdir():
            status = (task / "status").read_text()
            total += int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return total
