"""When a look is taken, from where, and what counts: no tenant's trick with numbers becomes a measurement."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from resolver.base.errors import ProcessGone, WorkerFailed
from resolver.base.journal import Journal
from resolver.config import HostpidNamespace
from resolver.daemon import driver_measurement
from resolver.daemon.driver_measurement import DriverMeasurement
from resolver.gpu.sampler import FAILED, OK, Collection, DeviceSamples
from resolver.linux.procfs import ProcessIdentity

GPU = "GPU-1"
HOST, CONTAINER = HostpidNamespace.HOST, HostpidNamespace.CONTAINER
HERE, ELSEWHERE = os.stat("/proc/self/ns/pid").st_ino, 1
NOW = 1_700_000_000.0


class Handle:
    """Held: its descriptor is a real one, so that one that is not given back shows."""

    def __init__(self, process: ProcessIdentity) -> None:
        self.process, self.fd, self.lives = process, os.open("/dev/null", os.O_RDONLY), True

    def alive(self) -> bool:
        return self.lives

    def close(self) -> None:
        os.close(self.fd)


class Node:
    """What the daemon knows: the owners, their namespaces, the map. Stands in for Owners, Procfs and PidMap."""

    root = "/proc"

    def __init__(self) -> None:
        self.owners: dict[int, ProcessIdentity] = {}
        self.namespaces: dict[int, int] = {}
        self.numbered: dict[int, list[int]] = {}
        self.handles: list[Handle] = []

    def add(self, host_pid: int, *ns_pids: int, pidns: int = HERE) -> None:
        self.owners[host_pid] = ProcessIdentity(host_pid, 1, (host_pid, *ns_pids))
        self.namespaces[host_pid] = pidns

    def process(self, host_pid: int) -> ProcessIdentity | None:
        return self.owners.get(host_pid)

    def pidns(self, host_pid: int) -> int:
        if host_pid not in self.namespaces:
            raise ProcessGone("it ended")
        return self.namespaces[host_pid]

    @property
    def source(self) -> Any:
        return self

    def candidates(self, ns_pid: int, pidns: int) -> list[int]:
        assert pidns in self.namespaces.values()
        return self.numbered.get(ns_pid, [])

    def open_handle(self, host_pid: int) -> Any:
        self.handles.append(Handle(self.owners[host_pid]))
        return self.handles[-1]


class Child:
    """The worker: answers what it is told to, and keeps what it was asked."""

    name = "driver probe"

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answer: Any = {"seen": {}}
        self.during: Callable[[], object] = int  # happens while it looks
        self.stopped = 0

    async def request(self, message: bytes, descriptors: list[int]) -> bytes:
        self.asked.append(json.loads(message))
        assert [os.fstat(fd).st_ino for fd in descriptors] == [HERE]
        self.during()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer if isinstance(self.answer, bytes) else json.dumps(self.answer).encode()

    def malformed(self, what: str) -> WorkerFailed:
        return WorkerFailed(f"the {self.name} {what}")

    def stop(self) -> None:
        self.stopped += 1


class Bench:
    """A `DriverMeasurement` with nothing real around it but descriptors and time."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node, self.child, self.counters = Node(), Child(), Counter[str]()
        self.now, self.version = 0.0, "535.183.01"
        node: Any = self.node
        self.truth = DriverMeasurement(str(run_dir), node, node, node, self.counters, Journal())
        self.truth.worker = self.child  # type: ignore[assignment]
        self.truth._enabled = True
        monkeypatch.setattr(driver_measurement, "time", self)
        monkeypatch.setattr(driver_measurement, "HOST_PIDNS", ELSEWHERE)  # that of this test is a container's
        # A process of this test lends its namespace: the path is /proc/<host_pid>/ns/pid.
        self.own = os.getpid()
        self.node.add(self.own, 7)

    def monotonic(self) -> float:
        return self.now

    def collection(self, *newest: int, **changes: Any) -> Collection:
        device = {
            "status": OK,
            "why": "",
            "newest": {pid: (int(NOW * 1e6) - 1000, 40) for pid in newest},
            "dropped": frozenset[int](),
            "memory": None,
        } | changes
        return Collection(NOW, "", self.version, {GPU: DeviceSamples(**device)})

    def consider(self, before: Collection, after: Callable[[], Collection] | None = None) -> None:
        """One collection, the look that it starts, and the next one."""

        async def both() -> None:
            self.truth.consider(before)
            if self.truth._task is not None:
                await asyncio.wait([self.truth._task])
            self.truth._enabled = False  # only the conclusion of this look, and no new one
            self.truth.consider(after() if after else before)
            self.truth._enabled = True

        asyncio.run(both())

    def sees(self, *pids: int) -> None:
        self.child.answer = {"seen": {GPU: list(pids)}, "nobody": True}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(tmp_path, monkeypatch)
    descriptors = held()
    yield bench
    assert held() == descriptors


def held() -> int:
    """Descriptors of processes and namespaces; earlier tests may still be closing others."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{fd}").startswith(("/dev/null", "pid:"))
    return found


@pytest.mark.parametrize("namespace", [HOST, CONTAINER])
def test_two_looks_that_agree_are_a_measurement(bench: Bench, namespace: HostpidNamespace) -> None:
    own = bench.own
    bench.sees(own if namespace is HOST else 7, 999_999)
    bench.consider(bench.collection(own))
    assert bench.truth.get(bench.version) is None
    assert bench.truth.why == "measured once, and to be confirmed"
    bench.consider(bench.collection(own))
    assert bench.truth.get(bench.version) is namespace
    bench.consider(bench.collection(own))
    assert len(bench.child.asked) == 2  # and no third
    assert bench.counters == {"driver_probes": 2}
    (asked, _) = bench.child.asked
    assert asked["since"] == int(NOW * 1e6) - 1001
    assert (asked["pidns"], asked["uuids"], asked["nobody"]) == (HERE, [GPU], True)


def test_looks_that_contradict_each_other_are_none(bench: Bench) -> None:
    own = bench.own
    for number in (own, 7):
        bench.sees(number)
        bench.consider(bench.collection(own))
    assert bench.truth.why == "two measurements contradicted each other"
    bench.now = 100.0
    bench.consider(bench.collection(own))
    assert bench.truth.get(bench.version) is None


def test_a_driver_that_changes_during_the_look(bench: Bench) -> None:
    own = bench.own
    bench.sees(own)
    before = bench.collection(own)
    bench.version = "570.86.15"
    bench.consider(before, lambda: bench.collection(own))
    bench.version = "535.183.01"
    bench.consider(bench.collection(own))
    assert bench.truth.get(bench.version) is None


STAMP = int(NOW * 1e6)


def other_has_it_in_there(node: Node, own: int) -> None:
    node.numbered[own] = [own, own + 1]
    node.namespaces[own + 1] = HERE


#: What makes one of the numbers doubtful: a change of the node, or of the device's samples.
TRICKS: dict[str, Callable[[Node, int], dict[str, Any] | None]] = {
    "another has it on the host, idle so far": lambda _, own: {"memory": {own: 1, 7: 1}},
    "another was sampled": lambda _, own: {"newest": {own: (STAMP, 40), 7: (STAMP, 1)}},
    "another has it in there": other_has_it_in_there,
    "without samples": lambda *_: {"status": FAILED},
    "another has values that cannot be": lambda *_: {"dropped": frozenset({7})},
    "both are the same": lambda node, own: node.add(own, own),
    "nested": lambda node, own: node.add(own, 20, 7),
    "on the host": lambda node, own: node.add(own, 7, pidns=ELSEWHERE),
    "not in the host's namespace": lambda node, own: node.add(own),
    "no owner": lambda node, _: node.owners.clear(),
    "idle": lambda _, own: {"newest": {own: (STAMP, 0)}},
    "long ago": lambda _, own: {"newest": {own: (STAMP - 1_100_000, 40)}},
    "gone": lambda node, _: node.namespaces.clear(),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_a_number_that_could_mean_another_is_not_looked_for(bench: Bench, trick: str) -> None:
    changes = TRICKS[trick](bench.node, bench.own) or {}
    bench.consider(bench.collection(bench.own, **changes))
    assert bench.child.asked == []
    assert bench.truth.why


@pytest.mark.parametrize("trick", list(TRICKS)[:4])
def test_nor_if_it_came_up_during_the_look(bench: Bench, trick: str) -> None:
    changes: dict[str, Any] = {}
    bench.sees(7)
    bench.child.during = lambda: changes.update(TRICKS[trick](bench.node, bench.own) or {})
    bench.consider(bench.collection(bench.own), lambda: bench.collection(bench.own, **changes))
    assert bench.truth._agreed == []
    assert bench.counters["driver_probes_failed"] == 1


def test_a_process_that_ended_meanwhile_proves_nothing(bench: Bench) -> None:
    """The dead can't be translated: the driver may show the host's number of it, where it shows its own else."""
    own = bench.own
    bench.sees(own)

    bench.child.during = lambda: setattr(bench.node.handles[-1], "lives", False)
    bench.consider(bench.collection(own))
    assert bench.truth.why == "the processes ended meanwhile, or their numbers are others' now"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (WorkerFailed("the driver probe did not answer within 9 s"), "did not answer within 9 s"),
        ({"refused": "it may trace"}, "the container was not entered: it may trace"),
        ({"failed": "ended", "init": False}, "ended"),
        (b"", "answered something malformed"),
        (b"{}", "answered something malformed"),
        (b"[1]", "answered something malformed"),
        (b"nonsense", "answered something malformed"),
        ({"seen": {GPU: ["7"]}}, "answered something malformed"),
        ({"seen": {GPU: [True]}}, "answered something malformed"),
        ({"seen": {GPU: 7}}, "answered something malformed"),
        ({"seen": [GPU]}, "answered something malformed"),
        ({"failed": "ended"}, "answered something malformed"),
        ({"seen": {GPU: None}}, "NVML has no samples there"),
        ({"seen": {}}, "NVML has no samples there"),
        ({"seen": {GPU: []}}, "carry neither number"),
    ],
)
def test_what_is_no_answer_waits_ever_longer(bench: Bench, answer: Any, why: str) -> None:
    own = bench.own
    bench.child.answer = answer
    for expected in (2.0, 4.0, 8.0):
        began = bench.now
        bench.consider(bench.collection(own))
        assert why in bench.truth.why
        assert bench.truth._not_before == began + expected
        bench.consider(bench.collection(own))  # too soon
        bench.now = bench.truth._not_before
    assert len(bench.child.asked) == bench.child.stopped == bench.counters["driver_probes_failed"] == 3


def test_a_driver_that_is_not_open_to_everybody_is_asked_as_root_at_once(bench: Bench) -> None:
    own = bench.own
    bench.child.answer = {"failed": "NVML says there: Insufficient Permissions", "init": True}
    bench.consider(bench.collection(own))
    assert bench.truth._not_before == bench.now
    bench.sees(own)
    bench.consider(bench.collection(own))
    bench.consider(bench.collection(own))
    assert [asked["nobody"] for asked in bench.child.asked] == [True, False, False]
    assert bench.truth.get(bench.version) is HOST


def test_an_error_of_nvml_starts_no_look(bench: Bench) -> None:
    own = bench.own
    bench.consider(bench.collection(own)._replace(error="NVML does not answer"))
    bench.consider(bench.collection(own)._replace(driver_version=None))
    assert bench.child.asked == []


def test_what_is_missing_is_said_before_anything_is_given_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: frozenset[str] = frozenset({"SYS_PTRACE", "SYS_ADMIN", "SETUID", "BPF"})
    monkeypatch.setattr("resolver.linux.capabilities.held", lambda: held)
    bench.truth.enable(wanted=True)
    assert (bench.truth.rights, bench.truth.unable) == (frozenset({"SYS_PTRACE", "SYS_ADMIN", "SETUID"}), "")
    bench.truth.disable("535.183.01")
    assert bench.truth.rights == frozenset()
    assert "after driver 535.183.01 was measured" in bench.truth.unable
    held = frozenset({"SYS_PTRACE"})
    bench.truth.enable(wanted=True)
    assert (bench.truth.rights, bench.truth.unable) == (frozenset(), "that takes CAP_SYS_ADMIN")
    bench.truth.enable(wanted=False)
    assert "hostpid_namespace was not auto" in bench.truth.unable


def test_each_container_has_its_turn(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    own = bench.own
    bench.node.add(own + 1, 8, pidns=HERE + 1)
    tried: list[int] = []

    def opened(_self: DriverMeasurement, _handle: Any, pidns: int, held: ExitStack) -> int:
        tried.append(pidns)
        fd = os.open("/proc/self/ns/pid", os.O_RDONLY)
        held.callback(os.close, fd)
        return fd

    monkeypatch.setattr(DriverMeasurement, "_open_namespace", opened)
    bench.child.answer = {"refused": "no"}
    for _ in range(4):
        bench.consider(bench.collection(own, own + 1))
        bench.now += 1000
    assert sorted(tried[:2]) == sorted(tried[2:]) == [HERE, HERE + 1]
