"""What reads bytes that others write takes any bytes: netlink's messages, BTF, and the answers of children."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable
from itertools import zip_longest
from types import ModuleType
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resolver.counters import CounterByReason
from resolver.errors import RegionRejected
from resolver.gpu.sampler import Sampler
from resolver.hami.mapping_finder import MappingFinder
from resolver.linux.procfs import Procfs
from resolver.log import journal as log
from resolver.pids.bpf_load import bpf_directory
from resolver.pids.proc_events import EventStream
from resolver.reasons import RegionReason, RepairReason
from resolver.repair.orders import Writing
from resolver.workers import slot_writer
from tests.unit.test_btf import Blob, blob
from tests.unit.test_plan import Bench

__all__ = ["blob"]

PATIENT: Final = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
WORD: Final = st.integers(0, 2**32 - 1)
FORK, EXEC, EXIT = 1, 2, 0x80000000


# ---- netlink --------------------------------------------------------------------------------------------------------


def drained(messages: list[bytes]) -> EventStream:
    """A stream that has taken in these datagrams."""
    ours, kernels = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, kernels:
        stream = EventStream(ours)
        for start in range(0, len(messages), 8):  # a socket holds ten
            for message in messages[start : start + 8]:
                kernels.send(message)
            stream.drain()
        assert stream.events == len(messages)
        return stream


def event(what: int, cpu: int, sequence: int, *words: int) -> bytes:
    return struct.pack("=16x IIII4x II8x IIII 8x", 1, 1, sequence, 0, what, cpu, *words)


@PATIENT
@given(st.lists(st.binary(max_size=300), max_size=12))
def test_any_datagram_is_an_event_or_malformed(messages: list[bytes]) -> None:
    stream = drained(messages)
    short = sum(len(message) < 76 for message in messages)
    assert stream.malformed >= short
    assert stream.incomplete or not stream.malformed


@PATIENT
@given(
    st.lists(
        st.tuples(st.sampled_from([FORK, EXEC, EXIT, 0, 4]), st.integers(0, 3), WORD, WORD, WORD, WORD, WORD),
        max_size=12,
    )
)
def test_an_event_names_who_it_is_about_and_a_gap_is_counted(events: list[tuple[int, ...]]) -> None:
    stream = drained([event(what, cpu, sequence, *words) for what, cpu, sequence, *words in events])
    assert stream.malformed == 0
    assert stream.touched == {
        words[2] for what, _, _, *words in events if what == FORK and words[2] == words[3]
    }
    assert stream.ended <= {
        words[0] for what, _, _, *words in events if what == EXIT and words[0] == words[1]
    }
    following: dict[int, int] = {}
    gap = False
    for _, cpu, sequence, *_ in events:
        gap |= following.get(cpu, sequence) != sequence
        following[cpu] = (sequence + 1) % 2**32
    assert stream.incomplete == gap
    assert all(count >= 0 for count in stream.lost.values())


# ---- BTF ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def btf() -> ModuleType:
    sys.path.insert(0, bpf_directory())
    try:
        return importlib.import_module("btf")
    finally:
        sys.path.pop(0)


def number_or_refusal(btf: ModuleType, ask: Callable[[], int]) -> None:
    """An offset or a size, or `BtfError`: nothing else comes out."""
    with contextlib.suppress(btf.BtfError):
        assert ask() >= 0


@PATIENT
@given(data=st.data())
def test_a_description_with_any_words_in_it_is_read_or_refused(
    btf: ModuleType, blob: Blob, data: st.DataObject
) -> None:
    text = bytearray(blob.bytes())
    for at, word in data.draw(st.lists(st.tuples(st.integers(0, len(text) // 4 - 1), WORD), max_size=6)):
        struct.pack_into("<I", text, 4 * at, word)
    cut = data.draw(st.integers(0, len(text)) | st.just(len(text)))
    number_or_refusal(btf, lambda: btf.Btf(bytes(text[:cut])).offset("task", "ns", "inum"))
    number_or_refusal(btf, lambda: btf.Btf(bytes(text[:cut])).offset("task", "deep"))
    number_or_refusal(btf, lambda: btf.Btf(bytes(text[:cut])).size("bits"))


@PATIENT
@given(types=st.lists(WORD, max_size=40), strings=st.binary(max_size=40))
def test_any_types_are_read_or_refused(btf: ModuleType, types: list[int], strings: bytes) -> None:
    size = 4 * len(types)
    header = struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, size, size, len(strings) + 6)
    read = header + struct.pack(f"<{len(types)}I", *types) + b"\0task\0" + strings
    number_or_refusal(btf, lambda: btf.Btf(read).offset("task", "task"))


# ---- children -------------------------------------------------------------------------------------------------------

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
def test_whatever_the_nvml_worker_answers_a_collection_says_what_is_known(answers: list[bytes]) -> None:
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
def test_only_what_the_slot_writer_says_that_it_wrote_is_called_repaired(answer: bytes) -> None:
    """Two orders; what is not one result for each is a failure of the writer, and nothing is noted of either."""
    counters = Counter[str]()
    writing = Writing(counters, log.Journal())

    async def request(*_: Any, **__: Any) -> bytes:
        return answer

    writing.worker.request = request  # type: ignore[method-assign]
    with contextlib.ExitStack() as stack:
        bench = Bench(stack)
        bench.see((7, 0), (9, 815))
        for ns_pid in (7, 9):
            bench.own(ns_pid, 4000 + ns_pid)
        orders = bench.plan()
        assert len(orders) == 2
        answered = asyncio.run(writing.carry_out(bench.repairs, orders))
        assert answered == (len(answer) == 2 * slot_writer.RESULT.size)
        outcomes = [outcome for outcome, _ in slot_writer.RESULT.iter_unpack(answer)] if answered else []
        written = [order.state.written for order in orders]
        assert written == [
            4000 + order.state.slot.pid if outcome == slot_writer.DONE else None
            for order, outcome in zip_longest(orders, outcomes)
        ]
        repaired = sum(CounterByReason.REPAIRS.counts(counters, RepairReason).values())
        assert repaired == outcomes.count(slot_writer.DONE)
    writing.worker.stop()


REFUSAL: Final = st.fixed_dictionaries(
    {"reason": JSON | st.sampled_from(["", *RegionReason]), "detail": JSON}
)


@PATIENT
@given(
    st.binary(max_size=40) | (JSON | REFUSAL).map(lambda each: json.dumps(each).encode()), st.integers(0, 2)
)
def test_whatever_the_path_walker_answers_a_file_is_open_or_refused(answer: bytes, files: int) -> None:
    """No descriptor that came with an answer stays open, but the one that is taken."""
    finder = MappingFinder(Procfs(), list, lambda host_pid: host_pid, lambda _: False)
    came: list[int] = []

    async def request(*_: Any, received: list[int], **__: Any) -> bytes:
        came.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(files))
        received.extend(came)
        return answer

    finder.worker.request = request  # type: ignore[assignment]
    taken = -1
    with contextlib.suppress(RegionRejected):
        taken = asyncio.run(finder._open(1, "/tmp/x.cache", "c"))  # noqa: S108
        assert taken in came
    for fd in came:
        with contextlib.nullcontext() if fd == taken else pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)
    if taken >= 0:
        os.close(taken)
    finder.close()
