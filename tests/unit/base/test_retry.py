"""Pauses that double, and work in threads that no caller waits for."""

import asyncio
import threading

import pytest

from resolver.base.retry import doubled, in_a_thread, longer


def test_a_pause_doubles_up_to_the_longest() -> None:
    assert [doubled(0.5, 3.0, times) for times in range(4)] == [0.5, 1.0, 2.0, 3.0]
    assert doubled(0.5, 300.0, 10**9) == 300.0
    assert [longer(pause, 0.5, 3.0) for pause in (0.0, 0.5, 1.0, 2.0, 3.0)] == [0.5, 1.0, 2.0, 3.0, 3.0]


async def test_result_of_the_thread_is_awaited() -> None:
    assert await in_a_thread(lambda: 7, name="seven") == 7
    with pytest.raises(ZeroDivisionError):
        await in_a_thread(lambda: 1 // 0, name="breaks")


async def test_abandoned_result_is_released() -> None:
    go, back, ended = threading.Event(), asyncio.Event(), []
    given: list[int] = []

    def work() -> int:
        go.wait()
        return 7

    def unwanted(result: int) -> None:
        given.append(result)
        back.set()

    waiting = in_a_thread(work, name="late", ended=lambda: ended.append(1), unwanted=unwanted)
    waiting.cancel()
    go.set()
    await back.wait()
    assert (given, ended) == ([7], [1])


def test_a_loop_that_is_closed_is_not_called() -> None:
    go, threads = threading.Event(), threading.active_count()

    async def main() -> None:
        in_a_thread(go.wait, name="outlives the loop").cancel()

    asyncio.run(main())
    go.set()
    for thread in threading.enumerate():
        if thread.name == "outlives the loop":
            thread.join(10)
    assert threading.active_count() <= threads
