"""Samples by a driver's clock that is not ours: a value, idle or unknown, but never one for another."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from resolver.gpu import sample_history
from resolver.gpu.sample_history import SAMPLE_SECONDS, SampleHistory

HOUR = 3600.0
TICK = 1 / 6  # a driver's


class Node:
    """A driver that samples busy processes, and a daemon that asks it. ``now`` is the monotonic clock."""

    def __init__(self, ahead: float = 0.0) -> None:
        self.now = time.monotonic()
        self.clock = SimpleNamespace(time=time.time, monotonic=lambda: self.now)
        self.wall = time.time() - self.now + ahead  # what the driver's clock is ahead of that one
        self.busy: dict[int, int] = {}  # PID -> per cent
        self.buffer: list[tuple[int, int, int]] = []
        with patch.object(sample_history, "time", self.clock):
            self.history = SampleHistory()
        self.ticks_at = self.now

    def run(self, seconds: float) -> None:
        """Time passes; the driver takes its samples, and keeps those of the last 12 s, as drivers do."""
        end = self.now + seconds
        while self.ticks_at <= end:
            stamp = int((self.ticks_at + self.wall) * 1e6)
            self.buffer += [(pid, stamp, sm) for pid, sm in self.busy.items()]
            self.buffer = self.buffer[-72:]
            self.ticks_at += TICK
        self.now = end

    def ask(self) -> dict[int, int | None]:
        """One collection: {PID: per cent, or None for unknown}; what is not in it idles."""
        with patch.object(sample_history, "time", self.clock):
            return self._ask()

    def _ask(self) -> dict[int, int | None]:
        since = self.history.since()
        newest = {pid: [pid, stamp, sm] for pid, stamp, sm in self.buffer if stamp > since}
        whole = {pid: [pid, stamp, sm] for pid, stamp, sm in self.buffer}
        answer = {"samples": list(newest.values()), "buffer": list(whole.values()), "mps": []}
        self.now += 0.001
        self.history.take(answer)
        known = {pid: sm for pid, (sm, _) in self.history.newest.items()}
        return {**known, **dict.fromkeys(self.history.unknown())}


@pytest.mark.parametrize("ahead", [0.0, 0.1, -0.1, HOUR, -HOUR, 1e8, -1e8])
def test_a_driver_whose_clock_is_off_has_values_after_a_second(ahead: float) -> None:
    node = Node(ahead)
    node.busy[7] = 30
    node.run(3.0)
    seen = []
    for _ in range(5):
        seen.append(node.ask())
        node.run(1.0)
    assert seen[2:] == [{7: 30}] * 3
    assert all(each == {7: None} for each in seen[:2] if each != {7: 30})  # and idle never
    assert abs(ahead) > 1 or seen[0] == {7: 30}
    assert node.ask() == {7: 30}
    node.busy.clear()
    node.run(1.0)
    assert node.ask() == {}


@pytest.mark.parametrize("step", [HOUR, -HOUR, 1.5, -1.5, 0.4, -0.4, 3e8])
@pytest.mark.parametrize("interval", [0.25, 1.0, 5.0])
def test_a_driver_whose_clock_is_set_is_unknown_for_an_answer_at_most(step: float, interval: float) -> None:
    node = Node()
    node.busy[7] = 30
    node.run(3.0)
    for _ in range(3):
        assert node.ask() == {7: 30}
        node.run(interval)
    node.wall += step
    seen = []
    for _ in range(12):
        node.run(interval)
        seen.append(node.ask())
    assert all(each in ({7: 30}, {7: None}) for each in seen)
    assert seen.count({7: None}) <= max(1, 1 / interval)
    assert seen[-6:] == [{7: 30}] * 6


@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_a_wall_clock_that_is_set_without_the_drivers_changes_nothing(
    step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node()
    node.busy[7] = 30
    node.run(1.0)
    assert node.ask() == {7: 30}
    wall = time.time() + step
    monkeypatch.setattr(node.clock, "time", lambda: wall)
    for _ in range(3):
        node.run(1.0)
        assert node.ask() == {7: 30}
    node.busy.clear()
    node.run(1.1)
    assert node.ask() == {}


def test_who_was_idle_at_the_first_answer_may_have_a_sample_by_another_clock() -> None:
    node = Node()
    node.busy[7] = 30
    node.run(3.0)
    node.busy.clear()
    node.run(2.0)
    assert node.ask() == {7: None}
    node.run(SAMPLE_SECONDS)
    assert node.ask() == {}
    node.busy[7] = 40
    node.run(1.0)
    assert node.ask() == {7: None}  # it is not known yet that its clock was right
    node.run(1.0)
    assert node.ask() == {7: 40}


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_clocks_do_who_works_is_not_idle_and_who_idles_has_no_value(seed: int) -> None:
    dice = random.Random(seed)
    node = Node(dice.choice((0.0, 0.0, HOUR, -HOUR, dice.uniform(-3, 3))))
    interval = dice.choice((0.25, 1.0, 1.0, 2.0))
    since: dict[int, float] = dict.fromkeys(range(1, 4), node.now)  # when each began what it does
    for _ in range(300):
        for pid in since:
            if dice.random() < 0.1:
                since[pid] = node.now
                if node.busy.pop(pid, None) is None:
                    node.busy[pid] = pid
        if dice.random() < 0.03:
            node.wall += dice.choice((HOUR, -HOUR, 0.5, -0.5, dice.uniform(-5, 5)))
        node.run(interval)
        seen = node.ask()
        for pid, began in since.items():
            lasts = node.now - began
            if pid in node.busy and lasts > 2 * TICK:
                assert seen.get(pid, 0) in (None, pid)
            elif pid not in node.busy and lasts > SAMPLE_SECONDS + interval:
                assert seen.get(pid) is None
