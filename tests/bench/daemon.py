"""The whole daemon: from a slot's appearance to its right ``hostpid``, and what it weighs."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.bench.timing import Progress, RowValues
from tests.bench.usage import children, cpu, rss
from tests.fakes.container import Container
from tests.fakes.node import Node
from tests.fakes.process import Tenant

_SLOTS = 200


def measure(scratch: Path, progress: Progress) -> list[RowValues]:
    """Start it with its defaults on a node in miniature and let slots appear at random times."""
    scratch.joinpath("node").mkdir()
    with Node(scratch / "node", "535.183.01") as node:
        containers = [node.container(name=f"c{number}") for number in range(4)]
        for container in containers:
            container.tenant(load=10, guess="none")
        arguments = [sys.executable, "-m", "resolver", "run", "--containers-dir", str(node.containers_dir)]
        arguments += ["--run-dir", str(scratch / "run"), "--log-level", "error"]
        daemon = subprocess.Popen(arguments, env=node.environment())
        try:
            progress(f"{_SLOTS} slots appear, one after the other")
            times = [_until_repaired(random.choice(containers)) for _ in range(_SLOTS)]
            first, again = (sorted(each * 1e3 for each in column) for column in zip(*times, strict=True))
            progress("what the daemon weighs after that")
            own, children, cpu = _weight(daemon.pid)
        finally:
            daemon.terminate()
            daemon.wait()
    return [
        *_spread("a slot's appearance to its right hostpid", first),
        *_spread("a process's own guess to its right hostpid", again),
        ("resident memory of the daemon", own, "MiB", 45.0, ""),
        ("  of all its children", children, "MiB", 30.0, "slot writer and NVML worker"),
        ("CPU of all of them", cpu, "% core", None, "4 containers, default intervals"),
    ]


def _spread(name: str, milliseconds: list[float]) -> list[RowValues]:
    p99 = milliseconds[int(len(milliseconds) * 0.99)]
    return [
        (f"{name}, median", statistics.median(milliseconds), "ms", None, ""),
        ("  99 % of them", p99, "ms", 350.0, f"longest {milliseconds[-1]:.0f} ms"),
    ]


def _until_repaired(container: Container) -> tuple[float, float]:
    """Seconds until the file has a new process's true host PID: since it took its slot, and since its own wrong guess.

    As upstream it guesses after CUDA's start, which takes until it was repaired and a random time more.
    """
    time.sleep(random.random() * 0.25)
    tenant = container.tenant(init_waits=True)
    try:
        first = _until_right(container, tenant)
        time.sleep(random.random() * 0.25)
        tenant.init()
        return first, _until_right(container, tenant)
    finally:
        tenant.stop()


def _until_right(container: Container, tenant: Tenant) -> float:
    began = time.perf_counter()
    while _hostpid(container, tenant) != tenant.host_pid:
        if time.perf_counter() - began > 5:
            raise RuntimeError(f"the slot of {tenant.host_pid} was not repaired within 5 s")
        time.sleep(0.001)
    return time.perf_counter() - began


def _hostpid(container: Container, tenant: Tenant) -> int | None:
    slots = container.region().slots
    return next((slot.hostpid for slot in slots if slot.pid == tenant.ns_pid and slot.status), None)


def _weight(daemon: int) -> tuple[float, float, float]:
    """MiB of the daemon, MiB of its children, and per cent of a core of all of them while nothing happens."""
    began, before = time.monotonic(), cpu(daemon)
    time.sleep(5)
    used = cpu(daemon).per_cent(before, time.monotonic() - began)
    return rss(daemon), sum(map(rss, children(daemon))), sum(used)
