"""Time until ``hostpid`` is right, from a new slot and from its process's own guess, with real processes."""

import os
import random
import statistics
import time
from datetime import datetime
from pathlib import Path

from resolver.repair.schedule import STARTED
from tests.bench.timing import RowValues, progress
from tests.fakes.container import Container
from tests.fakes.daemon import BOUND, Daemon
from tests.fakes.node import Node
from tests.fakes.process import Tenant

_SLOTS = 200
_FEW, _MANY = 4, 256
_PROCESSES = 224  # at the start, in as many containers: the stand-in for the driver has room for 256
_NEW = 25
#: Most milliseconds for 99 % of the repairs of a new slot.
_SLOT_AIM = 20.0


def measure(scratch: Path) -> list[RowValues]:
    """Run a daemon with default settings on a miniature node, where slots appear at random times."""
    few = _on_a_node(scratch / "few", _FEW)
    many = _on_a_node(scratch / "many", _MANY)
    return [*few, *many]


def _on_a_node(scratch: Path, count: int) -> list[RowValues]:
    few = count == _FEW
    with Node(scratch / "node", "535.183.01") as node:
        progress(f"{count} containers, {min(count, _PROCESSES)} with a process")
        containers = [node.container(name=f"c{number}", watcher=few) for number in range(count)]
        first_tenants = [
            container.tenant(load=10 if few else 0, guess="none") for container in containers[:_PROCESSES]
        ]
        with Daemon(node, scratch / "run", "--source", "auto", wrapper=BOUND) as daemon:
            for tenant in first_tenants:
                _wait(tenant, 30.0)
            if not few:
                progress("waiting a minute: files of recently started processes are read more often")
                time.sleep(STARTED)
            progress(f"{_SLOTS} slots appear, one after the other")
            times = [_until_repaired(random.choice(containers)) for _ in range(_SLOTS)]
            first, again = (sorted(1e3 * value for value in column) for column in zip(*times, strict=True))
            progress(f"{_NEW} new containers")
            listed, right = (sorted(column) for column in zip(*_new_containers(node, daemon), strict=True))
    where = "" if few else f", {count} containers"
    return [
        *_spread(f"a slot's appearance to its right hostpid{where}", first, None if where else _SLOT_AIM),
        *_spread(f"a process's own guess to its right hostpid{where}", again, None),
        *_spread(f"a new container's cache file to its discovery{where}", listed, None),
        *_spread(f"a new container's first slot to its right hostpid{where}", right, None),
    ]


def _spread(name: str, milliseconds: list[float], aim: float | None) -> list[RowValues]:
    p99 = milliseconds[int(len(milliseconds) * 0.99)]
    return [
        (f"{name}, median", statistics.median(milliseconds), "ms", None, ""),
        ("  99 % of them", p99, "ms", aim, f"longest {milliseconds[-1]:.0f} ms"),
    ]


def _until_repaired(container: Container) -> tuple[float, float]:
    """Return seconds until a new process's ``hostpid`` is right: from its slot, and from its own wrong guess.

    As with HAMi's library, the guess comes after CUDA's start: here after the repair and a random time.
    """
    time.sleep(random.random() * 0.25)
    tenant = container.tenant(guess="wrong", init_waits=True)
    try:
        first = _wait(tenant)
        time.sleep(random.random() * 0.5)
        tenant.init()
        return first, _wait(tenant)
    finally:
        tenant.stop()


def _new_containers(node: Node, daemon: Daemon) -> list[tuple[float, float]]:
    """Return milliseconds until the daemon logs a new file, and from its first slot to the right ``hostpid``."""
    times = []
    for number in range(_NEW):
        time.sleep(random.random() * 0.25)
        container = node.container(name=f"new{number}", watcher=False)
        tenant = container.tenant(guess="none", init_waits=True)
        right = _wait(tenant) * 1e3
        # The file's entry was created at the directory's time, which is at most some milliseconds too early.
        created = os.stat(container.directory).st_mtime
        line = daemon.wait_for("region_found", path=str(container.cache))
        listed = datetime.fromisoformat(line["timestamp"]).timestamp()
        times.append(((listed - created) * 1e3, right))
        container.stop()
    return times


def _wait(tenant: Tenant, most: float = 5.0) -> float:
    began = time.perf_counter()
    while tenant.hostpid != tenant.host_pid:
        if time.perf_counter() - began > most:
            raise RuntimeError(f"the slot of {tenant.host_pid} was not repaired within {most:g} s")
        time.sleep(0.001)
    return time.perf_counter() - began
