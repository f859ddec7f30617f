"""Budgets, slices and turns: no container pays for another's cost."""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from resolver.base.budget import BURST_SECONDS, SHARE, SLICE_SECONDS, Bucket, Budgets, Metered, Rounds
from tests.fakes.clock import Clock, burn


def test_empty_limiter_waits_and_takes_nothing() -> None:
    bucket = Bucket(2.0, 10.0, now=0.0)
    assert bucket.take(8.0, 0.0) == 0.0
    assert bucket.take(6.0, 0.0) == 2.0
    assert bucket.left(0.0) == 2.0
    assert bucket.take(6.0, 2.0) == 0.0
    assert bucket.left(100.0) == 10.0  # never more than its capacity
    assert bucket.full(100.0)
    assert (bucket.take(1000.0, 100.0), bucket.left(100.0)) == (0.0, 0.0)  # a larger cost empties it


def test_a_debt_is_paid_back_first() -> None:
    bucket = Bucket(0.5, 1.0, now=0.0)
    assert [bucket.charge(1.0, 0.0) for _ in range(2)] == [0.0, 2.0]
    assert not bucket.full(2.0)
    assert bucket.take(0.5, 2.0) == 1.0
    assert bucket.take(0.5, 3.0) == 0.0


def test_a_container_may_save_up_a_burst_and_no_more() -> None:
    clock = Clock()
    budgets = Budgets(clock)
    assert budgets.left("a") == BURST_SECONDS
    budgets.spend("a", BURST_SECONDS + 0.1)
    assert budgets.over("a")
    assert not budgets.over("b")
    clock.now += 0.5 * 0.1 / SHARE
    assert budgets.over("a")  # the account is in debt
    clock.now += 0.6 * 0.1 / SHARE
    assert not budgets.over("a")
    budgets.tidy()
    assert list(budgets.overdrawn) == ["a"]
    clock.now += 1000
    assert budgets.left("a") == BURST_SECONDS
    budgets.tidy()
    assert budgets.overdrawn == {}


async def test_a_stopped_daemon_charges_no_container() -> None:
    """Six seconds of SIGSTOP in a step, or without a CPU, once cost that container a minute of budget."""
    spent: list[float] = []

    async def work() -> None:
        time.sleep(0.3)  # noqa: ASYNC251 - simulates the stop
        burn(0.1)

    await Metered(work(), spent.append)
    assert 0.1 <= sum(spent) < 0.3


async def test_steps_are_charged_and_waiting_is_not() -> None:
    spent: list[float] = []

    async def work() -> int:
        burn(0.02)
        await asyncio.sleep(0.3)
        burn(0.02)
        return 7

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    assert await Metered(work(), spent.append) == 7
    assert len(spent) == 2
    assert min(spent) >= 0.02
    with pytest.raises(ZeroDivisionError):
        await Metered(fails(), spent.append)
    waiting = asyncio.create_task(_metered(asyncio.sleep(600), spent.append))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def _metered(
    work: Coroutine[Any, Any, object], spend: Callable[[float], None], rounds: Rounds | None = None
) -> None:
    await Metered(work, spend, rounds)


async def test_coroutines_share_one_slice_per_round() -> None:
    rounds, steps, never = Rounds(), list[str](), asyncio.Event()

    async def busy(name: str) -> None:
        for _ in range(10):
            steps.append(name)
            burn(SLICE_SECONDS)
            await asyncio.sleep(0)

    waiting = asyncio.create_task(_metered(never.wait(), lambda _: None, rounds))
    await asyncio.sleep(0)
    tasks = [asyncio.create_task(_metered(busy(name), lambda _: None, rounds)) for name in "abcdef"]
    seen = [0]
    while len(steps) < 60:
        await asyncio.sleep(0)
        seen.append(len(steps))
    assert max(later - before for before, later in itertools.pairwise(seen)) <= 2  # of six
    assert {"".join(sorted(each)) for each in zip(*[iter(steps)] * 6, strict=True)} == {"abcdef"}
    waiting.cancel()
    await asyncio.gather(*tasks)


async def test_coroutine_cancelled_in_others_round_cleans_up() -> None:
    rounds, ended = Rounds(), list[str]()

    async def work() -> None:
        try:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        finally:
            ended.append("cancelled")

    waiting = asyncio.create_task(_metered(work(), lambda _: None, rounds))
    await asyncio.sleep(0)
    rounds.spend(SLICE_SECONDS)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended
