"""Samples: each answer is a value, idle or unknown, for any time stamps and any clock of the driver."""

import random
import time
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from resolver.workers import nvml_samples
from resolver.workers.nvml_samples import SECOND, Samples

PERIOD = 139_000
PLACES = 72
MINUTE = 60.0


class NotFound(Exception):
    value = 6


class Driver:
    """NVML over a ring as the driver's headers describe it. ``now`` is the monotonic clock, in microseconds."""

    NVML_GPU_UTILIZATION_SAMPLES, NVML_SUCCESS, NVML_ERROR_NOT_FOUND = 1, 0, 6
    NVMLError = NVMLError_NotFound = NotFound
    NVMLError_NotSupported = NVMLError_FunctionNotFound = NVMLError_InsufficientSize = type(
        "Refused", (Exception,), {}
    )

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ahead: float = 0.0) -> None:
        self.now = self._ended = 5_000 * SECOND
        self.wall = int(time.time()) * SECOND  # the machine's clock minus the monotonic clock
        self.ahead = int(ahead * SECOND)  # the driver's clock minus the machine's clock
        self.busy: list[tuple[int, int]] = []  # PID and per cent; the processes take turns
        self.ring: list[tuple[int, int, int]] = [(0, 0, 0)] * PLACES  # stamp, PID, per cent
        self._periods = 0
        self.nvmlDeviceGetProcessesUtilizationInfo = self.nvmlDeviceGetProcessUtilization
        self._samples = Samples(self, ())
        clock = SimpleNamespace(
            time_ns=lambda: (self.now + self.wall) * 1000, monotonic_ns=lambda: self.now * 1000
        )
        monkeypatch.setattr(nvml_samples, "time", clock)
        self.run(12.0)

    def run(self, seconds: float, *, asleep: bool = False) -> None:
        end = self.now + int(seconds * SECOND)
        while self._ended + PERIOD <= end:
            self._ended += PERIOD
            if not asleep:
                pid, load = self.busy[self._periods % len(self.busy)] if self.busy else (0, 0)
                stamp = self._ended + self.wall + self.ahead
                self.ring[self._periods % PLACES] = stamp, pid, load
                self._periods += 1
        self.now = end

    def nvmlDeviceGetSamples(self, _handle: object, _kind: int, since: int) -> tuple[int, list[Any]]:  # noqa: N802
        return 1, [
            pynvml.c_nvmlSample_t(timeStamp=stamp, sampleValue=pynvml.c_nvmlValue_t(uiVal=load))
            for stamp, _, load in self.ring
            if stamp > since
        ]

    def nvmlDeviceGetProcessUtilization(self, _handle: object, since: int) -> list[Any]:  # noqa: N802
        active = [(pid, load) for stamp, pid, load in self.ring if stamp > since and pid]
        if not active:
            raise NotFound
        sums = {pid: sum(load for other, load in active if other == pid) for pid, _ in active}
        return [SimpleNamespace(pid=pid, smUtil=sums[pid] // len(active)) for pid in sums]

    def ask(self) -> dict[str, Any]:
        return self._samples.read("GPU-1", None)

    def load(self) -> dict[int, int] | None:
        """One answer's values; None if they are unknown."""
        newest: dict[int, int] | None = self.ask().get("newest")
        return newest


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


@pytest.mark.parametrize("interval", [0.1, 0.5, 1.0, 3.0])
def test_idle_process_leaves_the_answer_after_a_second(driver: Driver, interval: float) -> None:
    driver.busy = [(7, 30)]
    driver.run(5.0)
    driver.ask()
    driver.busy = []
    seen = []
    for _ in range(20):
        driver.run(interval)
        seen.append(driver.load())
    for turn, load in enumerate(seen, 1):
        if turn * interval > 1.0 + PERIOD / SECOND:
            assert load == {}
        elif turn * interval < 0.9:
            assert load == {7: 30}


def test_two_processes_in_turn_have_their_halves(driver: Driver) -> None:
    driver.busy = [(7, 90), (8, 90)]
    values: dict[int, list[int]] = {7: [], 8: []}
    for _ in range(14):
        driver.run(1.0)
        for pid, sm in (driver.load() or {}).items():
            values[pid].append(sm)
    assert [len(each) for each in values.values()] == [14, 14]
    assert all(44 <= sum(each) / 14 <= 46 for each in values.values())  # truncated to whole per cents


def test_periods_are_complete_and_each_is_given_once(driver: Driver) -> None:
    driver.ask()
    driver.busy = [(7, 80)]
    stamps, ends = [], []
    for interval in (0.3, 1.0, 4.0, 1.0):
        driver.run(interval)
        answer = driver.ask()
        assert answer["periods"][0][0] > answer["start"] > answer["periods"][0][0] - 1.01 * PERIOD
        stamps += [stamp for stamp, load in answer["periods"] if load == 80]
        ends.append(answer["periods"][-1][0])
        assert answer["shares"] == {7: 80}
    assert stamps == [stamps[0] + PERIOD * i for i in range(len(stamps))]
    assert len(stamps) == int(6.3 * SECOND) // PERIOD
    assert ends == sorted(set(ends))


def test_idle_device_is_idle_by_its_own_samples(driver: Driver) -> None:
    assert driver.ask()["idle"]
    driver.busy = [(7, 1)]
    driver.run(0.2)
    assert not driver.ask()["idle"]
    driver.busy = []
    driver.run(1.2)
    assert driver.ask()["idle"]
    driver.run(20.0, asleep=True)
    assert not driver.ask()["idle"]  # no sample shows that the device is idle


@pytest.mark.parametrize("ahead", [0.2, -0.2, 3.0, -3.0, 50.0, -50.0])
def test_clock_off_by_seconds_is_read_from_the_periods(monkeypatch: pytest.MonkeyPatch, ahead: float) -> None:
    driver = Driver(monkeypatch, ahead)
    driver.busy = [(7, 30)]
    driver.run(3.0)
    first = driver.load()
    assert first == {7: 30} or (first is None and ahead < -1)
    for _ in range(3):
        driver.run(1.0)
        assert driver.load() == {7: 30}
    driver.busy = []
    driver.run(1.5)
    assert driver.load() == {}


@pytest.mark.parametrize("ahead", [3600.0, -3600.0, 61.0, -61.0])
def test_clock_off_by_more_than_a_minute_is_unknown(monkeypatch: pytest.MonkeyPatch, ahead: float) -> None:
    driver = Driver(monkeypatch, ahead)
    driver.busy = [(7, 30)]
    driver.run(3.0)
    answer = driver.ask()
    assert answer["status"] == "failed"
    assert f"{ahead:+.0f} s from this machine's clock" in answer["why"]


def test_clock_that_drifts_for_months_stays_in_step(driver: Driver) -> None:
    driver.busy = [(7, 30)]
    for _ in range(200):
        driver.run(1.0)
        assert driver.load() == {7: 30}
        driver.ahead += SECOND // 2


@pytest.mark.parametrize("stamp", [1, 49_936, 1_000_000 * SECOND])
def test_absurd_stamp_does_not_move_the_clock(driver: Driver, stamp: int) -> None:
    driver.busy = [(7, 30)]
    driver.run(1.0)
    driver.ring[0] = stamp, 8, 99
    for _ in range(3):
        assert driver.load() == {7: 30}
        driver.run(0.2)


@pytest.mark.parametrize("step", [3600.0, -3600.0, 1.5, -1.5, 0.4, -0.4])
@pytest.mark.parametrize("interval", [0.25, 1.0, 5.0])
def test_clock_that_is_set_is_soon_in_step_again(driver: Driver, step: float, interval: float) -> None:
    driver.busy = [(7, 30)]
    driver.run(3.0)
    assert driver.load() == {7: 30}
    driver.wall += int(step * SECOND)  # both the machine's clock and the driver's step
    seen = []
    for _ in range(int(14 / interval)):
        driver.run(interval)
        seen.append(driver.load())
    assert all(load in ({7: 30}, None) for load in seen)
    assert seen[-1] == {7: 30}
    if step > 0:
        assert None not in seen


def test_sleeping_device_is_idle_from_its_second_answer(driver: Driver) -> None:
    driver.run(15.0, asleep=True)
    assert driver.load() is None
    driver.run(1.0, asleep=True)
    assert driver.load() == {}
    driver.busy = [(7, 30)]
    driver.run(0.5)
    assert driver.load() == {7: 30}


@pytest.mark.parametrize("seed", range(20))
def test_busy_process_is_never_idle_whatever_the_clocks_do(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    dice = random.Random(seed)
    driver = Driver(monkeypatch, dice.choice((0.0, 0.0, 40.0, -40.0, dice.uniform(-3, 3))))
    interval = dice.choice((0.25, 1.0, 1.0, 2.0))
    began = driver.now
    answers = 0
    for _ in range(200):
        if dice.random() < 0.1:
            driver.busy, began = ([] if driver.busy else [(7, 30)]), driver.now
        if dice.random() < 0.02:
            driver.wall += int(dice.choice((3600, -3600, 0.5, -0.5, dice.uniform(-5, 5))) * SECOND)
        driver.run(interval)
        load, lasts = driver.load(), (driver.now - began) / SECOND
        answers += load is not None
        if driver.busy and lasts > 0.3:
            assert load in (None, {7: 30})
        elif not driver.busy and lasts > 1.5 + interval:
            assert load in (None, {})
    assert answers > 60
