"""Accounts of containers' use, compared with the exact integral of a driver with a ring as NVIDIA's."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from resolver.base.reasons import SampleReason, UnresolvedReason
from resolver.gpu.attribution import NOTHING, Used
from resolver.gpu.sampler import FAILED, OK, UNSUPPORTED, DeviceSamples
from resolver.state import Container, ContainerUse, LimitState, Process, RegionReport, SlotReport, SlotReports
from resolver.usage import accounts

GPU = "GPU-a"
KNOWN = NOTHING._replace(error="", asked=frozenset({GPU}))
CONTAINER = Container("c1", "uid", "main", "ns", "pod", None, 1, 1, ("/a.cache",), 0.0)
PROCESS = Process(100, 2, GPU, "c1", "uid", "main", "ns", "pod", "python", 50, 1 << 30, None)
OTHER = replace(PROCESS, host_pid=101, container_id="c2", pod_uid="u2", pod="zz")
ENDED = replace(
    PROCESS, container_id="c1", pod_uid=None, container_name=None, no_slot=SampleReason.PROCESS_ENDED
)
SLOT = SlotReport(2, 0, 100, 100, False, None, None, (50,), (50,), core_policy="")
UNOWNED = replace(SLOT, slot=1, host_pid=None, unresolved=UnresolvedReason.NOT_MAPPED)
REGION = RegionReport(
    "/a.cache", "uid", "main", "v1.2", (GPU,), "c1", slots=SlotReports((SLOT,)), sm_limit=(40,)
)
Load = Callable[[float], float]
PERIOD = 0.139
KEPT = 71  # periods that a library hands out


def steady(load: float) -> Load:
    return lambda _: load


def bursts(load: float, busy: float, every: float) -> Load:
    return lambda at: load if at % every < busy else 0.0


class Node:
    """A GPU with its driver, a clock that the test sets, and the daemon's accounts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ahead = 1000.0, 7.3
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "time", lambda: self.now + 1e9)
        self.accounts = accounts.Accounts()
        self.loads: dict[int, Load] = {}
        self.used: dict[int, float] = {}  # the integral, GPU-seconds
        self._began, self._load, self._turn = self.now, 0.0, 0
        self._ring: list[tuple[int, int, int]] = []  # stamp, per cent, PID
        self.asked = 0

    def run(self, seconds: float, step: float = 0.005) -> None:
        """Run the GPU; each period counts for one process that is active at its end."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now += step
            loads = {pid: load(self.now) for pid, load in self.loads.items()}
            scale = min(1.0, 1 / (sum(loads.values()) or 1))
            for pid, load in loads.items():
                self.used[pid] = self.used.get(pid, 0.0) + load * scale * step
            self._load += sum(loads.values()) * scale * step
            if self.now - self._began >= PERIOD:
                active = sorted(pid for pid, load in loads.items() if load)
                self._turn += 1
                pid = active[self._turn % len(active)] if active else 0
                per_cent = round(100 * self._load / (self.now - self._began))
                self._ring = [*self._ring, (int((self.now + self.ahead) * 1e6), per_cent, pid)][-KEPT:]
                self._began, self._load = self.now, 0.0

    def answer(self, **more: Any) -> DeviceSamples:
        start, self.asked = self.asked, self._ring[-1][0]
        new = [each for each in self._ring if each[0] > start > 0]
        active = [each for each in new if each[2]]
        shares = {
            pid: sum(load for _, load, its in active if its == pid) // len(active) for _, _, pid in active
        }
        periods = tuple((stamp, load) for stamp, load, _ in new)
        return DeviceSamples(OK, "", memory={1: 1}, start=start, periods=periods, shares=shares, **more)

    def collect(
        self, *processes: Process, device: DeviceSamples | None = None, at: float = 0.0, **more: Any
    ) -> None:
        device = device or self.answer(**more)
        used = tuple(
            Used(
                each.host_pid,
                GPU,
                "",
                each.sm_util,
                each.memory,
                each.no_slot,
                device.shares.get(each.host_pid, 0),
            )
            for each in processes
        )
        self.accounts.note(processes, KNOWN._replace(used=used, at=at), {GPU: device})

    def work(self, *processes: Process, seconds: float, every: float = 1.0, **more: Any) -> None:
        """Run the GPU for ``seconds``; the daemon collects every ``every`` seconds."""
        for _ in range(round(seconds / every)):
            self.run(every)
            self.collect(*processes, **more)

    def begin(self, *processes: Process, **loads: Load) -> None:
        """Give the daemon its first answer, which has no periods; then start the integral."""
        self.run(PERIOD * 2)
        self.collect(*processes)
        self.loads = {int(pid[1:]): load for pid, load in loads.items()}
        self.used.clear()

    def use(self, region: RegionReport = REGION, pod: str = "pod") -> ContainerUse:
        (use,) = (each for each in self.accounts.uses([region], [CONTAINER]) if each.pod == pod)
        return use


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(monkeypatch)


@pytest.mark.parametrize(
    "load",
    [
        bursts(0.8, 0.5, 1.5),
        bursts(0.8, 0.2, 1.0),
        bursts(0.9, 1.0, 4.0),
        bursts(0.8, 5.0, 10.0),
        bursts(1.0, 0.05, 0.1),
        bursts(0.7, 10.0, 20.0),
        bursts(1.0, 0.06, 0.5),  # bursts often end before their period, and then count with the next answer
        steady(0.3),
    ],
)
@pytest.mark.parametrize("every", [0.25, 1.0, 3.0])
def test_gpu_seconds_are_the_integral_of_bursts(node: Node, load: Load, every: float) -> None:
    node.begin(PROCESS, p100=load)
    node.work(PROCESS, seconds=120, every=every)
    assert node.use().gpu_seconds == pytest.approx(node.used[100], rel=0.03)
    assert node.use().error == 0.03


def test_two_processes_share_the_devices_use(node: Node) -> None:
    node.begin(PROCESS, OTHER, p100=bursts(0.6, 0.5, 1.5), p101=bursts(0.6, 0.3, 2.0))
    node.work(PROCESS, OTHER, seconds=120)
    first, second = node.use(), node.use(pod="zz")
    assert first.gpu_seconds + second.gpu_seconds == pytest.approx(sum(node.used.values()), rel=0.03)
    assert first.gpu_seconds == pytest.approx(node.used[100], rel=0.15)  # a period counts for one process
    assert first.error is not None
    assert first.error > 0.5  # no bound holds for a shared period


def test_short_processes_count_after_their_end(node: Node) -> None:
    node.begin()
    expected = 0.0
    for _ in range(10):
        node.loads, began = {100: steady(0.8)}, node.used.get(100, 0.0)
        for seconds in (0.7, 1.0, 1.0):
            node.run(seconds)
            node.collect(PROCESS)
        node.run(0.3)
        node.loads = {}
        expected += node.used[100] - began
        node.run(0.7)
        node.collect(ENDED)  # the ended process has no names left
        node.work(seconds=3)
    assert node.use().gpu_seconds == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("silent", "unknown"), [(3, 0), (30, 20)])
def test_silence_of_nvml_is_unknown_only_beyond_the_ring(node: Node, silent: int, unknown: int) -> None:
    node.begin(PROCESS, p100=bursts(0.8, 0.5, 1.5))
    node.work(PROCESS, seconds=80)
    node.run(silent)
    before = node.use()
    node.accounts.note((), KNOWN._replace(error="it hangs"), {})
    node.collect(PROCESS, device=DeviceSamples(FAILED, "it fails"))
    node.collect(PROCESS)
    use = node.use()
    assert use.unknown_seconds == pytest.approx(unknown, abs=0.5)
    assert use.unknown_seconds >= before.unknown_seconds
    assert use.error == pytest.approx(0.03 + unknown / use.gpu_seconds, abs=0.03)
    missing = unknown / (80 + silent) * node.used[100]
    assert use.gpu_seconds == pytest.approx(node.used[100] - missing, rel=0.03)
    assert (before.used_1m is None) == (silent > 5)


def test_account_begins_with_the_first_time_that_counts(node: Node) -> None:
    node.begin(p100=steady(0.5))
    began = time.time()
    node.run(1.0)
    answered, device = time.time(), node.answer()
    node.now += 0.9
    node.collect(PROCESS, device=device, at=answered)
    assert node.use().gpu_seconds == pytest.approx(0.5, abs=0.1)
    assert node.use().since == pytest.approx(began, abs=0.01)


def test_a_new_worker_begins_after_a_gap(node: Node) -> None:
    node.begin(PROCESS, p100=steady(0.5))
    node.work(PROCESS, seconds=60)
    node.run(8)
    node.asked = 0  # a new worker knows no earlier answer
    node.collect(PROCESS)
    node.work(PROCESS, seconds=60)
    use = node.use()
    assert use.unknown_seconds == pytest.approx(8, abs=0.2)
    assert use.gpu_seconds == pytest.approx(60, rel=0.03)


def test_periods_without_a_value_are_unknown(node: Node) -> None:
    node.begin(PROCESS, p100=steady(0.5))
    node.run(10)
    answer = node.answer()
    unread = tuple((at, None) for at, _ in answer.periods[:36])
    node.collect(PROCESS, device=replace(answer, periods=unread + answer.periods[36:]))
    use = node.use()
    assert use.unknown_seconds == pytest.approx(5, abs=0.3)
    assert use.gpu_seconds == pytest.approx(2.5, abs=0.2)


def test_unknown_values_of_one_container_affect_no_other(node: Node) -> None:
    node.begin(PROCESS, OTHER, p100=steady(0.5))
    node.work(PROCESS, replace(OTHER, sm_util=None), seconds=20, power=100.0)
    assert node.use().unknown_seconds == 0
    assert node.use(pod="zz").unknown_seconds == pytest.approx(20, abs=0.2)
    assert node.use().energy == pytest.approx(2000, rel=0.03)
    assert node.use(pod="zz").energy is None


def test_mig_mode_is_unknown(node: Node) -> None:
    for _ in range(10):
        node.now += 1
        node.collect(replace(PROCESS, sm_util=None), device=DeviceSamples(UNSUPPORTED, "MIG"))
    assert (node.use().gpu_seconds, node.use().unknown_seconds) == (0, 9)


def test_limit_is_exceeded_after_two_minutes_above_it(node: Node) -> None:
    node.begin(PROCESS, p100=steady(0.95))
    node.work(PROCESS, seconds=100)
    use = node.use()
    assert (use.core_limit, use.limit_state) == (40, LimitState.IN_FORCE)
    assert use.used_1m == pytest.approx(0.95, rel=0.03)
    assert use.used_5m is None
    node.work(PROCESS, seconds=40)
    assert node.use().limit_state is LimitState.EXCEEDED
    node.loads[100] = bursts(1.0, 0.045, 0.1)  # the limiter is not exact
    node.work(PROCESS, seconds=70)
    assert node.use().limit_state is LimitState.IN_FORCE
    assert node.use().used_1m == pytest.approx(0.45, rel=0.03)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"limiting": False}, LimitState.SWITCHED_OFF),
        ({"sm_limit": (100,)}, LimitState.NO_LIMIT),
        ({"limits": (LimitState.NO_EFFECT,)}, LimitState.NO_EFFECT),
        ({"limits": (LimitState.NO_EFFECT,), "limiting": False}, LimitState.SWITCHED_OFF),
        ({"slots": SlotReports((UNOWNED,))}, LimitState.WAITING),
        ({"slots": SlotReports((SLOT, UNOWNED))}, LimitState.EXCEEDED),
        ({"slots": SlotReports((replace(SLOT, core_policy=None),))}, LimitState.UNKNOWN),
        ({"slots": SlotReports((SLOT, replace(SLOT, core_policy="disable")))}, LimitState.DISABLED),
        (
            {"slots": SlotReports((replace(SLOT, core_policy="force"),)), "limiting": False},
            LimitState.EXCEEDED,
        ),
    ],
)
def test_a_limit_that_does_not_hold_has_a_reason(
    node: Node, changes: Mapping[str, Any], state: LimitState
) -> None:
    node.begin(PROCESS, p100=steady(0.95))
    node.work(PROCESS, seconds=140)
    assert node.use(replace(REGION, **changes)).limit_state is state


@pytest.mark.parametrize(
    ("policy", "switch", "state"),
    [
        ("force", True, LimitState.IN_FORCE),
        ("FORCE", False, LimitState.IN_FORCE),
        ("disable", True, LimitState.DISABLED),
        ("DISABLE", False, LimitState.DISABLED),
        ("", True, LimitState.IN_FORCE),
        ("Force", False, LimitState.SWITCHED_OFF),
        (None, True, LimitState.UNKNOWN),
    ],
)
def test_process_policy_wins_over_the_switch(policy: str | None, *, switch: bool, state: LimitState) -> None:
    assert LimitState.of(policy, switch=switch) is state


def test_the_idle_clock_stands_still_while_nvml_is_silent(node: Node) -> None:
    def idle() -> float:
        since = node.use().idle_since
        assert since is not None
        return node.now + 1e9 - since

    node.begin(PROCESS, p100=steady(0.5))
    node.work(PROCESS, seconds=5)
    assert node.use().idle_since is None
    node.loads = {}
    node.run(2)
    node.collect(PROCESS)
    node.work(PROCESS, seconds=20)
    assert idle() == pytest.approx(20, abs=0.2)
    node.run(40)
    assert idle() == pytest.approx(20, abs=0.2)
    node.collect(PROCESS)
    assert idle() == pytest.approx(30, abs=0.5)  # the driver kept ten of the idle seconds
    node.loads = {100: steady(0.5)}
    node.work(PROCESS, seconds=1)
    assert node.use().idle_since is None
    node.loads = {}
    node.work(seconds=2)
    assert node.use().idle_since is None  # no process of the container is on the GPU


def test_energy_is_shared_by_use_and_the_unused_stands_apart(node: Node) -> None:
    host = replace(OTHER, container_id=None, pod_uid=None, container_name=None)
    host = replace(host, no_slot=SampleReason.NOT_IN_CONTAINER)
    node.begin(PROCESS, p100=steady(0.4), p101=steady(0.4))
    assert node.use().energy is None
    node.work(PROCESS, host, seconds=10, power=400.0)
    assert node.use().energy == pytest.approx(10 * 400 / 2, rel=0.03)
    node.loads = {}
    node.run(2 * PERIOD)
    node.collect(PROCESS, power=60.0)
    node.work(PROCESS, seconds=10, power=60.0)
    assert node.accounts.unused_joules[GPU] == pytest.approx(10 * 60, rel=0.03)


def test_errors_of_a_gpu_count_for_all_that_are_on_it(node: Node) -> None:
    node.begin(PROCESS)
    node.accounts.count_xids(GPU, 2)
    node.work(seconds=1)
    node.accounts.count_xids(GPU, 5)
    assert node.use().xids == 2


def test_a_restarted_container_goes_on_with_its_account(node: Node) -> None:
    node.begin(PROCESS, p100=steady(0.5))
    node.work(PROCESS, seconds=10)
    node.loads = {}
    node.work(seconds=60)
    node.loads = {100: steady(0.5)}
    node.work(replace(PROCESS, container_id="c2"), seconds=10)
    assert node.use().gpu_seconds == pytest.approx(10, rel=0.03)


def test_accounts_of_ended_containers_go_without_a_reader(node: Node) -> None:
    node.begin()
    for number in range(400):
        names = {"host_pid": number, "container_id": f"c{number}", "pod_uid": f"u{number}"}
        node.run(1.0, step=0.1)
        node.collect(replace(PROCESS, **names))
    assert len(node.accounts.entries) <= 122
