"""Accounts of containers' use: collections come at known times, and the sums are what was used."""

from __future__ import annotations

import time
from typing import Any

import pytest
from msgspec.structs import replace

from resolver.base.reasons import SampleReason, UnresolvedReason
from resolver.gpu.attribution import NOTHING, Joined
from resolver.gpu.sampler import OK, DeviceSamples
from resolver.state import Container, ContainerUse, LimitState, Process, RegionReport, SlotReport
from resolver.usage import accounts

GPU = "GPU-a"
KNOWN = NOTHING._replace(error="", asked=frozenset({GPU}))
CONTAINER = Container("c1", "uid", "main", "ns", "pod", None, 1, 1, ("/a.cache",), 0.0)
PROCESS = Process(100, 2, GPU, "c1", "uid", "main", "ns", "pod", "python", 50, 1 << 30, None)
SLOT = SlotReport(2, 0, 100, 100, False, None, None, (50,), (50,))
REGION = RegionReport("/a.cache", "uid", "main", "v1.2", (GPU,), "c1", slots=(SLOT,), sm_limit=(40,))


class Clock:
    """Time that the test sets, and the accounts made in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "time", lambda: self.now + 1e9)
        self.accounts = accounts.Accounts()

    def collect(
        self,
        *processes: Process,
        seconds: float = 1.0,
        times: int = 1,
        watts: Any = None,
        joined: Joined = KNOWN,
    ) -> None:
        """The same answer of NVML, so many times."""
        for _ in range(times):
            self.now += seconds
            self.accounts.note(processes, joined, {GPU: DeviceSamples(OK, "", power=watts)})

    def use(self, region: RegionReport = REGION) -> ContainerUse:
        (use,) = self.accounts.uses([region], [CONTAINER])
        return use


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_use_is_added_up_for_as_long_as_it_lasts(clock: Clock) -> None:
    other = replace(PROCESS, host_pid=101, sm_util=30)
    clock.collect(PROCESS, times=10)
    clock.collect(PROCESS, other, times=10)
    clock.collect(times=10)
    use = clock.use()
    assert use.gpu_seconds == pytest.approx(10 * 0.5 + 10 * 0.8)
    assert use.memory_byte_seconds == pytest.approx(30 * (1 << 30))
    assert (use.namespace, use.pod, use.container_name, use.unknown_seconds) == ("ns", "pod", "main", 0)
    assert clock.use().gpu_seconds == use.gpu_seconds  # asking changes nothing


def test_what_is_unknown_is_in_no_sum(clock: Clock) -> None:
    clock.collect(PROCESS, times=10)
    clock.collect(replace(PROCESS, sm_util=None), times=10)
    clock.collect(times=5, joined=KNOWN._replace(error="it hangs"))
    clock.collect(PROCESS, seconds=60.0)  # nothing was heard of it for a minute
    use = clock.use()
    assert use.gpu_seconds == pytest.approx(10 * 0.5)
    assert use.unknown_seconds == pytest.approx(10 + 5 + 60)
    assert use.used_1m is None


def test_more_than_the_limit_is_said_after_a_minute_only(clock: Clock) -> None:
    busy = replace(PROCESS, sm_util=95)
    clock.collect(busy, times=55)
    assert clock.use().limit_state is LimitState.IN_FORCE
    clock.collect(busy, times=10)
    use = clock.use()
    assert (use.core_limit, use.limit_state) == (40, LimitState.EXCEEDED)
    assert use.used_1m == pytest.approx(0.95)
    assert use.used_5m is None
    clock.collect(replace(PROCESS, sm_util=45), times=60)  # the limiter is no knife
    assert clock.use().limit_state is LimitState.IN_FORCE


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"limiting": False}, LimitState.SWITCHED_OFF),
        ({"sm_limit": (100,)}, LimitState.NO_LIMIT),
        ({"slots": (replace(SLOT, unresolved=UnresolvedReason.NOT_MAPPED),)}, LimitState.WAITING),
    ],
)
def test_a_limit_that_does_not_hold_has_a_reason(
    clock: Clock, changes: dict[str, Any], state: LimitState
) -> None:
    clock.collect(replace(PROCESS, sm_util=45), times=90)
    assert clock.use(replace(REGION, **changes)).limit_state is state


def test_a_tenant_cannot_hide_use_above_its_limit_behind_a_slot_without_an_owner(clock: Clock) -> None:
    clock.collect(replace(PROCESS, sm_util=95), times=90)
    false = replace(SLOT, slot=1, host_pid=None, unresolved=UnresolvedReason.NOT_MAPPED)
    assert clock.use(replace(REGION, slots=(SLOT, false))).limit_state is LimitState.EXCEEDED


def test_idle_is_who_holds_memory_and_does_nothing(clock: Clock) -> None:
    clock.collect(PROCESS, times=5)
    assert clock.use().idle_since is None
    clock.collect(replace(PROCESS, sm_util=0), times=20)
    idle = clock.use().idle_since
    assert idle is not None
    assert clock.now + 1e9 - idle == pytest.approx(19)
    clock.collect(PROCESS)
    assert clock.use().idle_since is None
    clock.collect()
    assert clock.use().idle_since is None  # it has no process there


def test_energy_is_shared_by_use_and_what_nobody_used_stands_apart(clock: Clock) -> None:
    other = replace(PROCESS, host_pid=7, container_id=None, pod_uid=None, container_name=None, sm_util=150)
    other = replace(other, no_slot=SampleReason.NOT_IN_CONTAINER)
    clock.collect(PROCESS)
    assert clock.use().energy is None
    clock.collect(PROCESS, other, times=10, watts=400.0)
    clock.collect(replace(PROCESS, sm_util=0), times=10, watts=60.0)
    assert clock.use().energy == pytest.approx(10 * 400 / 4)
    assert clock.accounts.unused_joules == {GPU: pytest.approx(10 * 60)}


def test_errors_of_a_gpu_count_for_all_that_are_on_it(clock: Clock) -> None:
    clock.collect(PROCESS)
    clock.accounts.count_xids(GPU, 2)
    clock.collect()
    clock.accounts.count_xids(GPU, 5)
    assert clock.use().xids == 2


def test_an_ended_container_goes_after_two_minutes_and_a_restarted_one_goes_on(clock: Clock) -> None:
    clock.collect(PROCESS, times=10)
    clock.collect(times=60)
    clock.collect(replace(PROCESS, container_id="c2"), times=10)
    assert clock.use().gpu_seconds == pytest.approx(10)
    clock.collect(times=119)
    clock.use()
    clock.collect(times=3)
    assert clock.accounts.uses([REGION], [CONTAINER]) == ()
