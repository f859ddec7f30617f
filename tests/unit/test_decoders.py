"""Decoders of foreign bytes accept any bytes: netlink's messages, BTF, and the answers of children."""

import asyncio
import contextlib
import json
import socket
import struct
from collections import Counter
from itertools import zip_longest
from typing import Any, Final

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resolver.base import journal as log
from resolver.base.counters import CounterByReason
from resolver.base.reasons import RepairReason
from resolver.gpu.sampler import Sampler
from resolver.pids.proc_events import EventStream
from resolver.repair.orders import Writing
from resolver.workers import slot_writer
from tests.fakes.planned import Bench

PATIENT: Final = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
WORD: Final = st.integers(0, 2**32 - 1)
FORK, EXEC, EXIT = 1, 2, 0x80000000


def drained(messages: list[bytes]) -> EventStream:
    ours, kernels = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, kernels:
        stream = EventStream(ours)
        for start in range(0, len(messages), 8):  # a socket holds ten
            for message in messages[start : start + 8]:
                kernels.send(message)
            stream.drain()
        assert stream.events == len(messages)
        return stream


def event(sequence: int, what: int, *words: int) -> bytes:
    return struct.pack("=16x IIII4x II8x IIII 8x", 1, 1, sequence, 0, what, 0, *words)


@PATIENT
@given(st.lists(st.binary(max_size=300), max_size=12))
def test_any_datagram_is_an_event_or_causes_a_scan(messages: list[bytes]) -> None:
    stream = drained(messages)
    assert stream.incomplete or all(len(message) >= 76 for message in messages)


@PATIENT
@given(st.lists(st.tuples(st.sampled_from([FORK, EXEC, EXIT, 0, 4]), WORD, WORD, WORD, WORD), max_size=12))
def test_event_names_its_process(events: list[tuple[int, ...]]) -> None:
    stream = drained([event(number, *each) for number, each in enumerate(events)])
    assert stream.touched == {words[2] for what, *words in events if what == FORK and words[2] == words[3]}
    assert stream.ended <= {words[0] for what, *words in events if what == EXIT and words[0] == words[1]}
    assert not stream.incomplete


JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
DEVICES: Final = st.fixed_dictionaries({"driver_version": JSON, "devices": JSON})


@PATIENT
@given(
    st.lists(
        st.binary(max_size=40) | (JSON | DEVICES).map(lambda each: json.dumps(each).encode()), min_size=1
    )
)
def test_any_nvml_answer_gives_an_inventory_or_an_error(answers: list[bytes]) -> None:
    sampler = Sampler()
    left = iter(answers * 50)

    async def request(message: bytes, *_: Any, **__: Any) -> bytes:
        return next(left)

    sampler.worker.request = request  # type: ignore[method-assign]
    collection = asyncio.run(sampler.collect(60))
    assert collection.error or collection.inventory is not None
    sampler.stop()


OUTCOMES: Final = st.lists(st.tuples(st.integers(0, 255), st.integers(0, 2**64 - 1)), max_size=4)


@PATIENT
@given(
    st.binary(max_size=80)
    | OUTCOMES.map(lambda each: b"".join(slot_writer.RESULT.pack(*result) for result in each))
)
def test_only_confirmed_writes_are_called_repaired(answer: bytes) -> None:
    """An answer without exactly one result per order is the writer's failure, and counts no repair."""
    counters = Counter[str]()
    writing = Writing(counters, log.Journal())

    async def request(*_: Any, **__: Any) -> bytes:
        return answer

    writing.worker.request = request  # type: ignore[method-assign]
    with contextlib.ExitStack() as stack:
        bench = Bench(stack)
        bench.repairs.region.fd = 0  # any number: orders need an open file
        bench.see((7, 0), (9, 815))
        for ns_pid in (7, 9):
            bench.own(ns_pid, 4000 + ns_pid)
        orders = bench.plan()
        assert len(orders) == 2
        answered = asyncio.run(writing.carry_out(bench.repairs, orders))
        assert answered == (len(answer) == 2 * slot_writer.RESULT.size)
        outcomes = [outcome for outcome, _ in slot_writer.RESULT.iter_unpack(answer)] if answered else []
        written = [bench.state(ns_pid).written for ns_pid in (7, 9)]
        assert written == [
            4000 + ns_pid if outcome == slot_writer.DONE else None
            for ns_pid, outcome in zip_longest((7, 9), outcomes)
        ]
        repaired = sum(CounterByReason.REPAIRS.counts(counters, RepairReason).values())
        assert repaired == outcomes.count(slot_writer.DONE)
    writing.worker.stop()
