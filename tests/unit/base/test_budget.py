"""What one container costs, no other one pays: budgets, slices, turns."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from resolver.base.budget import BURST_SECONDS, SHARE, Budgets, Metered
from tests.fakes.clock import Clock, burn


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


def test_what_is_charged_is_time_by_the_wall() -> None:
    budgets = Budgets()
    with budgets.charge("waits"):
        time.sleep(0.1)
    assert budgets.left("waits") <= BURST_SECONDS - 0.1 + SHARE * 1.0


def test_the_steps_of_a_coroutine_are_charged_and_not_what_it_waits_for() -> None:
    spent: list[float] = []

    async def work() -> int:
        burn(0.02)
        await asyncio.sleep(0.3)
        burn(0.02)
        return 7

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    async def main() -> None:
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

    asyncio.run(main())


async def _metered(
    work: Coroutine[Any, Any, None], spend: Callable[[float], None], gate: asyncio.Lock | None = None
) -> None:
    await Metered(work, spend, gate)


async def test_one_step_of_many_is_made_in_each_round_of_the_loop_and_waiting_holds_nobody_up() -> None:
    gate, steps, waits = asyncio.Lock(), list[str](), asyncio.Event()

    async def busy(name: str) -> None:
        for _ in range(10):
            steps.append(name)
            await asyncio.sleep(0)

    waiting = asyncio.create_task(_metered(_wait(waits), lambda _: None, gate))
    await asyncio.sleep(0)
    tasks = [asyncio.create_task(_metered(busy(name), lambda _: None, gate)) for name in "abc"]
    seen = [0]
    while len(steps) < 30:
        await asyncio.sleep(0)
        seen.append(len(steps))
    assert {later - before for before, later in itertools.pairwise(seen)} <= {0, 1}
    assert {"".join(sorted(each)) for each in zip(*[iter(steps)] * 3, strict=True)} == {"abc"}
    await asyncio.gather(*tasks)
    waits.set()
    await waiting


async def test_who_is_cancelled_at_the_gate_is_so_within_and_leaves_it_to_the_others() -> None:
    gate, ended = asyncio.Lock(), list[str]()

    async def work() -> None:
        try:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        finally:
            ended.append("cancelled")

    await gate.acquire()
    waiting = asyncio.create_task(_metered(work(), lambda _: None, gate))
    other = asyncio.create_task(_metered(asyncio.sleep(0), lambda _: None, gate))
    gate.release()
    await asyncio.sleep(0)
    await gate.acquire()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended
    gate.release()
    await other


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
