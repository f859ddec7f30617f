"""The error of `resolver usage`: its GPU time beside the actual one of the stand-in's processes.

The stand-in samples as real drivers do. All cases run at the same time, with a daemon's restart and 30 s without NVML.
"""

import sys
import threading
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from resolver.client import get_json
from tests.bench.timing import RowValues, progress
from tests.fakes.cachefiles import poke
from tests.fakes.container import Container
from tests.fakes.daemon import BOUND, Daemon
from tests.fakes.gpu import Device
from tests.fakes.node import Node
from tests.fakes.process import Process, Tenant
from tests.fakes.regions import LAYOUTS
from tests.fakes.rm.fetch import library
from tests.fakes.state import Answer
from tests.patience import until

TICK_S: Final = 0.01
SILENT_S, KEPT_S = 30.0, 9.9  # seconds without NVML, and the part that the driver's samples cover
SETTLED_S, OVER_S, ENDED_S, WITHOUT_S = 2.5, 140.0, 125.0, 35.0
MOST, MOST_SHORT, MOST_WRONG = 3.0, 5.0, 5.0  # per cent
NEAR: Final = 3  # points
USE: Final = "use, "  # start of a row's name; the daemon, or the release of NVIDIA's library, follows
FORKING: Final = 200  # processes
Pattern = Callable[[float], int]


def bursts(load: int, busy: float, every: float) -> Pattern:
    return lambda at: load if at % every < busy else 0


class Case(NamedTuple):
    """A container that has its GPUs alone: load of each process, and expected state of its limit."""

    name: str
    patterns: tuple[Pattern, ...]
    state: str = "in_force"
    gpus: int = 1
    limit: int = 50
    policy: str = ""
    switch: int = 1


CASES: Final = (
    Case("steady 30 %", (bursts(30, 1.0, 1.0),)),
    Case("80 % for 0.5 of 1.5 s", (bursts(80, 0.5, 1.5),)),
    Case("80 % for 0.2 of 1 s", (bursts(80, 0.2, 1.0),)),
    Case("80 % for 1 of 4 s", (bursts(80, 1.0, 4.0),)),
    Case("80 % for 5 of 10 s", (bursts(80, 5.0, 10.0),)),
    Case("60 % for 0.05 of 0.1 s", (bursts(60, 0.05, 0.1),)),
    Case("70 % for 10 of 20 s", (bursts(70, 10.0, 20.0),)),
    Case("a limiter's bursts, 100 % for 0.12 of 0.3 s", (bursts(100, 0.12, 0.3),)),
    Case("95 % above the limit", (bursts(95, 1.0, 1.0),), "exceeded"),
    Case("policy disable", (bursts(99, 1.0, 1.0),), "disabled", policy="disable"),
    Case("policy force, switched off", (bursts(99, 1.0, 1.0),), "exceeded", policy="force", switch=0),
    Case("switched off", (bursts(99, 1.0, 1.0),), "switched_off", switch=0),
    Case("idle", (bursts(0, 1.0, 1.0),)),
    Case("two processes", (bursts(60, 0.5, 1.5), bursts(60, 0.4, 2.3)), "no_limit", limit=0),
    Case("four GPUs", (bursts(80, 0.5, 1.5),), gpus=4),
)
STEADY, IDLE = 0, next(number for number, case in enumerate(CASES) if case.name == "idle")
PLACES: Final = tuple(sum(case.gpus for case in CASES[:number]) for number in range(len(CASES) + 1))
SHORT: Final = PLACES[-1]  # the GPU of processes that live three seconds
#: GPUs of a container with CUDA_VISIBLE_DEVICES=2,3, whose watcher has PR 330; other containers use the first two.
REORDERED, VISIBLE, VISIBLE_LOADS = (0, 1, SHORT + 1, SHORT + 2), "2,3", (17, 24)
GPUS: Final = tuple(
    Device(f"GPU-000000{number:02}-aaaa-4bbb-8ccc-0123456789ab", minor=number) for number in range(SHORT + 3)
)
#: Processes on a GPU without HAMi's library that fork each second: driver's socket, GPU, number of processes.
CLIENTS: Final = """
import os, socket, sys, time
for _ in range(int(sys.argv[3])):
    if not os.fork():
        channel = socket.socket(socket.AF_UNIX)
        channel.connect(sys.argv[1])
        channel.sendall(f"context {sys.argv[2]} 1048576\\n".encode())
        channel.recv(64)
        while True:
            if not os.fork():
                os._exit(0)
            os.wait()
            time.sleep(1)
print("ready", flush=True)
sys.stdin.read()
"""


class Work(threading.Thread):
    """Sets each process's load unless `paused`, and records the GPU time of all, by time.

    While `comparing` is set, it checks the reported values of the container with CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, node: Node, tenants: list[tuple[Tenant, Pattern]], reordered: Container) -> None:
        super().__init__(daemon=True)
        self.paused, self.comparing, self._ended = threading.Event(), threading.Event(), threading.Event()
        self.compared, self.wrong = 0, Counter[str]()
        self._node, self._tenants, self._reordered = node, tenants, reordered
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
            if self.comparing.is_set():
                self._compare()

    def _compare(self) -> None:
        self.compared += len(REORDERED)
        actual = dict(zip((GPUS[place].uuid for place in REORDERED), (0, 0, *VISIBLE_LOADS), strict=True))
        for rule, seen in self._reordered.monitor_views(8).items():
            self.wrong[rule] += sum(
                abs(seen[uuid] - load) > NEAR * (load > 0) for uuid, load in actual.items()
            )

    def end(self) -> None:
        self._ended.set()
        self.join()

    def used(self, host_pids: set[int], device: int, since: float, to: float) -> float:
        """Return the GPU-seconds of these processes between two times."""
        began, ended = (
            sum(
                self._used[max(0, bisect(self._at, at) - 1)].get((host_pid, device), 0.0)
                for host_pid in host_pids
            )
            for at in (since, to)
        )
        return ended - began

    def rest(self) -> None:
        """Let the GPUs idle until the daemon has read all samples."""
        self.comparing.clear()
        self.paused.set()
        time.sleep(SETTLED_S)


class Usage:
    def __init__(self, node: Node) -> None:
        node.gpu.turns = True
        self.node = node
        self.pids: list[set[int]] = []
        tenants: list[tuple[Tenant, Pattern]] = []
        for number, case in enumerate(CASES):
            devices = GPUS[PLACES[number] : PLACES[number + 1]]
            container = node.container(name=f"c{number}", sm_limit=case.limit, devices=devices)
            environment = {"GPU_CORE_UTILIZATION_POLICY": case.policy} if case.policy else {}
            own_tenants = [container.tenant(environment=environment) for _ in case.patterns]
            poke(container.cache, LAYOUTS[container.layout].proc_num + 4, "i", case.switch)
            self.pids.append({tenant.host_pid for tenant in own_tenants})
            tenants += zip(own_tenants, case.patterns, strict=True)
        self.short = node.container(name="short", sm_limit=0, devices=[GPUS[SHORT]])
        self.short_pids = set[int]()
        devices = tuple(GPUS[place] for place in REORDERED)
        self.reordered = node.container(name="reordered", release="PR 330", sm_limit=0, devices=devices)
        self.reordered.tenant(visible=VISIBLE).set_load(*VISIBLE_LOADS)
        self._without_hami("forking", FORKING)
        self._without_hami("uncontrolled", 1, "CUDA_DISABLE_CONTROL=true")
        self.work = Work(node, tenants, self.reordered)
        self.ended = 0  # containers

    def _without_hami(self, name: str, processes: int, *environment: str) -> Process:
        where = str(self.node.driver_socket), GPUS[STEADY].uuid
        container = self.node.container(name=name, devices=GPUS[:1])
        process = container.spawn(
            ["/usr/bin/env", *environment, sys.executable, "-S", "-c", CLIENTS, *where, str(processes)]
        )
        process.read_line()
        return process

    def live(self, seconds: float) -> None:
        """Start processes of three seconds one after the other, and containers that come and go."""
        self.short_pids.clear()  # those under the previous daemon
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            tenant = self.short.tenant(load=80)
            self.short_pids.add(tenant.host_pid)
            brief = self.node.container(name=f"brief{self.ended}", sm_limit=0, devices=GPUS[:1])
            brief.tenant()
            time.sleep(3.0)
            tenant.kill()
            brief.stop()
            self.node.containers.remove(brief)
            self.ended += 1
            time.sleep(1.0)
            self.work.comparing.set()

    def rows(self, run: str, daemon: Daemon, seconds: float) -> Iterator[RowValues]:
        uses, now = uses_of(daemon), time.time()
        for number, case in enumerate(CASES):
            rows = []
            for place in range(PLACES[number], PLACES[number + 1]):
                use = uses[f"c{number}", GPUS[place].uuid]
                actual = self.work.used(self.pids[number], place, use["since"], now)
                shown = use["gpu_seconds"]
                if number == IDLE:
                    actual, shown = now - use["since"], now - use["idle_since"]
                expected = case.state if case.state != "exceeded" or seconds > OVER_S else "in_force"
                rows.append(_row(f"{run}: {case.name}", actual, shown, use["limit_state"], expected, MOST))
            yield max(rows, key=lambda row: row[1] or 0.0)
        use = uses["short", GPUS[SHORT].uuid]
        actual = self.work.used(self.short_pids, SHORT, 0.0, now)
        state = use["limit_state"]
        yield _row(f"{run}: processes of 3 s", actual, use["gpu_seconds"], state, "no_limit", MOST_SHORT)
        unknown = uses["c0", GPUS[0].uuid]["unknown_seconds"]
        beside = f"of {seconds:.0f} s, beside {FORKING} processes without a slot that fork each second"
        yield f"{run}: unknown time of a good container", 100 * unknown / seconds, "%", 1.0, beside
        kept = sum(name.startswith("brief") for name, _ in uses)
        most = ENDED_S / 4.0 + 2
        beside = f"of {self.ended} that ended on a node without a scrape"
        yield f"{run}: accounts of ended containers", kept, "", most, beside
        if seconds > WITHOUT_S:
            causes = {
                record["process"]["container_name"]: record["causes"]
                for record in get_json("/v1/usage", str(daemon.socket))["without_slot"]
            }
            wrong = causes.get("uncontrolled") != ["control_disabled"]
            beside = f"causes: {causes.get('uncontrolled')}"
            yield f"{run}: CUDA_DISABLE_CONTROL not named as the cause", float(wrong), "", 0.0, beside

    def reordering(self, run: str, daemon: Daemon) -> Iterator[RowValues]:
        """Yield the share of wrong values in monitors under CUDA_VISIBLE_DEVICES, and if the cause is named."""
        rule, wrong = self.work.wrong.most_common(1)[0] if self.work.wrong else ("", 0)
        beside = f"of {self.work.compared} values, worst monitor's rule: {rule}; loads 0, 0, 17, 24"
        share = 100 * wrong / (self.work.compared or 1)
        yield f"{run}: wrong values under CUDA_VISIBLE_DEVICES=2,3", share, "%", MOST_WRONG, beside
        reasons = {line["why"] for line in daemon.said("slot_stuck") if "_reordered" in line["container"]}
        cause = "its CUDA_VISIBLE_DEVICES gives its GPUs another order"
        unnamed = float(not any(why.startswith(cause) for why in reasons))
        beside = "; ".join(reasons)[:160]
        yield f"{run}: CUDA_VISIBLE_DEVICES not named as the cause", unnamed, "", 0.0, beside

    def silence(self, run: str, daemon: Daemon) -> Iterator[RowValues]:
        before, began = uses_of(daemon), time.time()
        self.work.paused.clear()
        time.sleep(3)  # the load has begun before NVML fails
        self.node.gpu.set_errors({Answer.UTILIZATION: 999, Answer.PERIODS: 999})
        time.sleep(SILENT_S)
        self.node.gpu.set_errors()
        time.sleep(5)
        self.work.rest()
        after, now = uses_of(daemon), time.time()
        steady, idle = (f"c{STEADY}", GPUS[STEADY].uuid), (f"c{IDLE}", GPUS[PLACES[IDLE]].uuid)
        unknown = after[steady]["unknown_seconds"] - before[steady]["unknown_seconds"]
        beside = f"of {SILENT_S:.0f} s without NVML, of which the driver has kept {KEPT_S} s"
        yield f"{run}: unknown time after a silence", unknown, "s", SILENT_S - KEPT_S + 2, beside
        actual = self.work.used(self.pids[STEADY], STEADY, began, now) - 0.3 * unknown
        shown = after[steady]["gpu_seconds"] - before[steady]["gpu_seconds"]
        yield _row(
            f"{run}: steady 30 % across the silence",
            actual,
            shown,
            after[steady]["limit_state"],
            "in_force",
            MOST,
        )
        actual, shown = (
            now - after[idle]["since"] - after[idle]["unknown_seconds"],
            now - after[idle]["idle_since"],
        )
        yield _row(
            f"{run}: idle across the silence", actual, shown, after[idle]["limit_state"], "in_force", MOST
        )


def measure(scratch: Path, seconds: float, release: str = "", *, restart: bool = True) -> Iterator[RowValues]:
    """Measure for half of the time, restart the daemon, measure for the other half, then without NVML.

    NVIDIA's own library of a ``release`` can't be made to fail: with it, one daemon is measured all the time.
    """
    runs = ("first", "restarted") if restart and not release else ("first",)
    with Node(scratch / "usage", release or "550.54.15", GPUS, library(release) if release else None) as node:
        usage = Usage(node)
        usage.work.paused.set()
        usage.work.start()
        try:
            for run in runs:
                duration, name = seconds / len(runs), f"{USE}{release or run}"
                progress(f"{run} daemon, {duration:.0f} s")
                options = ("--source", "auto", "--log-level", "warning")
                with Daemon(node, scratch / f"run-{run}", *options, wrapper=BOUND) as daemon:
                    until(daemon.socket.exists, "the daemon")
                    if run == "first":  # the restarted one begins under load
                        until(lambda daemon=daemon: len(uses_of(daemon)) > PLACES[-1], "its accounts")  # type: ignore[misc]
                        time.sleep(1)
                    usage.work.paused.clear()
                    usage.live(duration)
                    usage.work.rest()
                    yield from usage.rows(name, daemon, duration)
                    if run == "first":
                        usage.work.paused.clear()
                    if run == "restarted":
                        progress(f"{SILENT_S:.0f} s without NVML")
                        yield from usage.silence(name, daemon)
                    if run == runs[-1]:
                        yield from usage.reordering(name, daemon)
        finally:
            usage.work.end()


def _row(name: str, actual: float, shown: float, state: str, expected: str, most: float) -> RowValues:
    """Return a row with the error in per cent; a wrong state counts as 100 %."""
    error = 100 * (shown / actual - 1) if actual else 0.0
    beside = f"measured {actual:.1f} s, shown {shown:.1f} s, {error:+.1f} %, {state}"
    if state != expected:
        return name, 100.0, "%", most, f"{beside} instead of {expected}"
    return name, abs(error), "%", most, beside


def uses_of(daemon: Daemon) -> dict[tuple[str, str], dict[str, Any]]:
    answer = get_json("/v1/usage", str(daemon.socket))
    return {(use["container_name"], use["device_uuid"]): use for use in answer["containers"]}
