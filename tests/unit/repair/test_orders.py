"""Orders on their way to the slot writer."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from contextlib import ExitStack

import pytest

from resolver.base.journal import Journal
from resolver.repair.orders import Writing
from resolver.workers import slot_writer
from tests.fakes.planned import Bench


@pytest.mark.parametrize("gone", ["region", "owner", "nothing"])
def test_orders_that_wait_for_the_writer_are_not_given_for_what_has_gone(gone: str) -> None:
    """A descriptor that was closed meanwhile may be another file's."""
    sent: list[int] = []

    async def request(_message: bytes, descriptors: list[int]) -> bytes:
        sent.append(descriptors[0])
        await asyncio.sleep(0)
        return slot_writer.RESULT.pack(slot_writer.DONE, 0)

    async def carry_out(benches: list[Bench]) -> None:
        writing = Writing(Counter(), Journal())
        writing.worker.request = request  # type: ignore[method-assign,assignment]
        tasks = [asyncio.create_task(writing.carry_out(each.repairs, each.plan())) for each in benches]
        await asyncio.sleep(0)
        if gone == "region":
            benches[1].repairs.close()
        elif gone == "owner":
            benches[1].state(7).owner_ended()
        await asyncio.gather(*tasks)

    with ExitStack() as stack:
        benches = [Bench(stack), Bench(stack)]
        for number, bench in enumerate(benches):
            bench.repairs.region.fd = os.dup(0)
            stack.callback(bench.repairs.close)
            bench.see((7, 0))
            bench.own(7, 4711 + number)
        descriptors = [bench.repairs.region.fd for bench in benches]
        asyncio.run(carry_out(benches))
    assert sent == descriptors[: 2 if gone == "nothing" else 1]
