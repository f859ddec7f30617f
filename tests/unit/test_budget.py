"""What one container costs, no other one pays: budgets, slices, turns."""

from __future__ import annotations

import asyncio
import time

import pytest

from resolver.budget import BURST_SECONDS, SHARE, Budgets, Rests, Slices


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def burn(seconds: float) -> None:
    """Use so much CPU time of this thread."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_container_may_save_up_a_burst_and_no_more() -> None:
    clock = Clock()
    budgets = Budgets(clock)
    assert budgets.left("a") == BURST_SECONDS
    budgets.spend("a", BURST_SECONDS + 0.1)
    assert budgets.over("a")
    assert not budgets.over("b")
    clock.now += 0.5 * 0.1 / SHARE
    assert budgets.over("a")  # it is in debt
    clock.now += 0.6 * 0.1 / SHARE
    assert not budgets.over("a")
    clock.now += 1000
    assert budgets.left("a") == BURST_SECONDS


def test_what_is_charged_is_cpu_time() -> None:
    budgets = Budgets()
    with budgets.charge("idle"):
        time.sleep(0.1)
    with budgets.charge("busy"):
        burn(0.05)
    assert budgets.left("idle") > BURST_SECONDS - 0.02
    assert budgets.left("busy") < BURST_SECONDS - 0.03


def test_only_those_that_owe_something_are_remembered() -> None:
    clock = Clock()
    budgets = Budgets(clock)
    for name in ("a", "b"):
        budgets.spend(name, 0.1)
    budgets.forget_full()
    assert sorted(budgets._left) == ["a", "b"]
    clock.now += 0.2 / SHARE
    budgets.forget_full()
    assert not budgets._left


def test_who_has_spent_something_is_known_until_it_is_paid_back() -> None:
    clock = Clock()
    budgets = Budgets(clock)
    spenders = budgets.spenders
    budgets.spend("a", 0.1)
    assert list(spenders) == ["a"]
    clock.now += 10.0
    budgets.forget_full()
    assert not spenders
    budgets.spend("b", 0.1)
    assert list(spenders) == ["b"]


def test_what_comes_rarely_is_not_waited_for_and_a_flood_takes_a_fifth_of_the_time() -> None:
    rests, now = Rests(), 100.0
    assert rests.after(0.01, now) == 0.01, "as long as there is something saved up"
    worked, began = 0.0, now
    while now < began + 100.0:
        now += 0.01 + rests.after(0.01, now)
        worked += 0.01
    assert worked / (now - began) == pytest.approx(0.2, rel=0.02)
    now += 10.0
    assert rests.after(0.01, now) == 0.01, "and once there is again"
    assert rests.after(1.0, now) == pytest.approx(4.0)


def test_a_long_work_lets_others_go_on() -> None:
    async def scene() -> None:
        longest = 0.0
        ended = False

        async def other() -> None:
            nonlocal longest
            last = time.thread_time()
            while not ended:
                await asyncio.sleep(0)
                longest, last = max(longest, time.thread_time() - last), time.thread_time()

        watching = asyncio.create_task(other())
        await asyncio.sleep(0)
        slices = Slices()
        for _ in range(100):
            burn(0.001)
            await slices.breathe()
        ended = True
        await watching
        assert longest < 0.06  # of 0.1 in all

    asyncio.run(scene())
