"""GPU use as `resolver usage` shows it, beside the integral of what the stand-in's processes really did.

The driver samples as real ones do. A restart of the daemon and 30 s without NVML are in it.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from resolver.client import get_json
from tests.bench.timing import Progress, RowValues
from tests.fakes.daemon import BOUND, Daemon
from tests.fakes.gpu import Device
from tests.fakes.node import Node
from tests.fakes.process import Tenant
from tests.fakes.state import Answer
from tests.patience import until

GPUS: Final = tuple(Device(f"GPU-000000{i:02}-aaaa-4bbb-8ccc-0123456789ab", minor=i) for i in range(15))
TICK_S: Final = 0.01
SILENT_S, KEPT_S = 30.0, 9.9  # without NVML; and as much of it as the driver still has
MOST, MOST_SHORT = 3.0, 5.0  # per cent
Pattern = Callable[[float], int]


def bursts(load: int, busy: float, every: float) -> Pattern:
    return lambda at: load if at % every < busy else 0


class Case(NamedTuple):
    """A container on GPUs from the ``first`` on, with the load of each of its processes, and its state."""

    name: str
    first: int
    patterns: tuple[Pattern, ...]
    state: str = "in_force"
    gpus: int = 1
    limit: int = 50
    environment: Mapping[str, str] = MappingProxyType({})


CASES: Final = (
    Case("80 % for 0.5 of 1.5 s", 0, (bursts(80, 0.5, 1.5),)),
    Case("80 % for 0.2 of 1 s", 1, (bursts(80, 0.2, 1.0),)),
    Case("80 % for 1 of 4 s", 2, (bursts(80, 1.0, 4.0),)),
    Case("80 % for 5 of 10 s", 3, (bursts(80, 5.0, 10.0),)),
    Case("steady 30 %", 4, (bursts(30, 1.0, 1.0),)),
    Case("a limiter's bursts, 100 % for 0.12 of 0.3 s", 5, (bursts(100, 0.12, 0.3),)),
    Case("95 % above the limit", 6, (bursts(95, 1.0, 1.0),), "exceeded"),
    Case(
        "policy disable",
        7,
        (bursts(99, 1.0, 1.0),),
        "disabled",
        environment={"GPU_CORE_UTILIZATION_POLICY": "disable"},
    ),
    Case("idle", 8, (bursts(0, 1.0, 1.0),)),
    Case("two processes", 9, (bursts(60, 0.5, 1.5), bursts(60, 0.4, 2.3)), "no_limit", limit=0),
    Case("four GPUs", 10, (bursts(80, 0.5, 1.5),), gpus=4),
)
STEADY_CASE: Final = 4
STEADY: Final = "c4", GPUS[STEADY_CASE].uuid
SETTLED_S, OVER_S = 2.5, 140.0
SHORT: Final = 14  # the GPU of processes that live three seconds


class Work(threading.Thread):
    """Sets every process's load unless `paused`, and keeps what all have done, by time."""

    def __init__(self, node: Node, tenants: list[tuple[Tenant, Pattern]]) -> None:
        super().__init__(daemon=True)
        self.paused, self._ended = threading.Event(), threading.Event()
        self._node, self._tenants = node, tenants
        self._at: list[float] = []
        self._used: list[dict[tuple[int, int], float]] = []

    def run(self) -> None:
        began, loads = time.monotonic(), [0] * len(self._tenants)
        while not self._ended.wait(TICK_S):
            for index, (tenant, pattern) in enumerate(self._tenants):
                load = 0 if self.paused.is_set() else pattern(time.monotonic() - began)
                if load != loads[index]:
                    loads[index] = load
                    tenant.set_load(load)
            self._used.append(dict(self._node.gpu.used))
            self._at.append(time.time())

    def end(self) -> None:
        self._ended.set()
        self.join()

    def used(self, host_pids: set[int], device: int, since: float, to: float) -> float:
        """GPU-seconds of these processes between two times."""
        began, ended = (
            sum(
                self._used[max(0, bisect(self._at, at) - 1)].get((host_pid, device), 0.0)
                for host_pid in host_pids
            )
            for at in (since, to)
        )
        return ended - began

    def rest(self) -> None:
        """Let the GPUs idle until the daemon has heard of everything."""
        self.paused.set()
        time.sleep(SETTLED_S)


class Usage:
    """The node, its containers, and the rows."""

    def __init__(self, node: Node) -> None:
        node.gpu.turns = True
        self.node = node
        self.pids: list[set[int]] = []
        tenants: list[tuple[Tenant, Pattern]] = []
        for number, case in enumerate(CASES):
            devices = GPUS[case.first : case.first + case.gpus]
            container = node.container(name=f"c{number}", sm_limit=case.limit, devices=devices)
            those = [container.tenant(environment=case.environment) for _ in case.patterns]
            self.pids.append({tenant.host_pid for tenant in those})
            tenants += zip(those, case.patterns, strict=True)
        self.short, self.short_pids = (
            node.container(name="short", sm_limit=0, devices=GPUS[SHORT:]),
            set[int](),
        )
        self.work = Work(node, tenants)

    def live(self, seconds: float) -> None:
        """Processes of three seconds, one after the other."""
        self.short_pids.clear()  # of the daemon before
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            tenant = self.short.tenant(load=80)
            self.short_pids.add(tenant.host_pid)
            time.sleep(3.0)
            tenant.kill()
            time.sleep(1.0)

    def rows(self, run: str, daemon: Daemon, seconds: float) -> Iterator[RowValues]:
        """The integral beside the figures, and the states."""
        uses, now = _uses(daemon), time.time()
        for number, case in enumerate(CASES):
            for place in range(case.first, case.first + case.gpus):
                use = uses[f"c{number}", GPUS[place].uuid]
                truth, said = self.work.used(self.pids[number], place, use["since"], now), use["gpu_seconds"]
                if not any(pattern(0.0) for pattern in case.patterns):
                    truth, said = now - use["since"], now - use["idle_since"]
                expected = case.state if case.state != "exceeded" or seconds > OVER_S else "in_force"
                yield _row(f"{run}: {case.name}", truth, said, use["limit_state"], expected, MOST)
        use = uses["short", GPUS[SHORT].uuid]
        truth = self.work.used(self.short_pids, SHORT, 0.0, now)
        yield _row(
            f"{run}: processes of 3 s", truth, use["gpu_seconds"], use["limit_state"], "no_limit", MOST_SHORT
        )

    def silence(self, daemon: Daemon) -> Iterator[RowValues]:
        """NVML fails for a while."""
        before = _uses(daemon)[STEADY]
        began = time.time()
        self.work.paused.clear()
        time.sleep(3)  # all that becomes unknown is of the load
        self.node.gpu.set_errors({Answer.UTILIZATION: 999, Answer.PERIODS: 999})
        time.sleep(SILENT_S)
        self.node.gpu.set_errors()
        time.sleep(5)
        self.work.rest()
        use = _uses(daemon)[STEADY]
        unknown = use["unknown_seconds"] - before["unknown_seconds"]
        beside = f"of {SILENT_S:.0f} s without NVML, of which the driver has kept {KEPT_S} s"
        yield "unknown time after a silence", unknown, "s", SILENT_S - KEPT_S + 2, beside
        truth = self.work.used(self.pids[STEADY_CASE], STEADY_CASE, began, time.time()) - 0.3 * unknown
        yield _row(
            "steady 30 % across it",
            truth,
            use["gpu_seconds"] - before["gpu_seconds"],
            use["limit_state"],
            "in_force",
            MOST,
        )


def measure(
    scratch: Path, seconds: float, progress: Progress, runs: Sequence[str] = ("first", "restarted")
) -> Iterator[RowValues]:
    """Measure twice, before and after a restart of the daemon, half of the time each, then a silence of NVML."""
    scratch.joinpath("usage").mkdir()
    with Node(scratch / "usage", "550.54.15", GPUS) as node:
        usage = Usage(node)
        usage.work.paused.set()
        usage.work.start()
        try:
            for run in runs:
                progress(f"{run} daemon, {seconds / 2:.0f} s")
                options = ("--source", "auto", "--log-level", "error")
                with Daemon(node, scratch / f"run-{run}", *options, wrapper=BOUND) as daemon:
                    until(daemon.socket.exists, "the daemon")
                    if run == "first":  # the restarted one begins under load
                        until(lambda d=daemon: len(_uses(d)) > len(CASES), "its accounts")  # type: ignore[misc]
                        time.sleep(1)
                    usage.work.paused.clear()
                    usage.live(seconds / 2)
                    usage.work.rest()
                    yield from usage.rows(run, daemon, seconds / 2)
                    if run == "first":
                        usage.work.paused.clear()
                    if run == "restarted":
                        progress(f"{SILENT_S:.0f} s without NVML")
                        yield from usage.silence(daemon)
        finally:
            usage.work.end()


def _row(name: str, truth: float, said: float, state: str, expected: str, most: float) -> RowValues:
    """A wrong state is an error of 100 %."""
    error = 100 * (said / truth - 1) if truth else 0.0
    beside = f"measured {truth:.1f} s, shown {said:.1f} s, {error:+.1f} %, {state}"
    if state != expected:
        return name, 100.0, "%", most, f"{beside} instead of {expected}"
    return name, abs(error), "%", most, beside


def _uses(daemon: Daemon) -> dict[tuple[str, str], dict[str, Any]]:
    answer = get_json("/v1/usage", str(daemon.socket))
    return {(use["container_name"], use["device_uuid"]): use for use in answer["containers"]}
