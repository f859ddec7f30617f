"""What reads bytes that others write takes any bytes: netlink's messages, BTF, and the answers of children."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import socket
import struct
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resolver.gpu.sampler import Sampler
from resolver.pids.bpf_load import bpf_directory
from resolver.pids.proc_events import EventStream
from resolver.workers import slot_writer
from tests.unit.test_btf import Blob, blob

__all__ = ["blob"]

PATIENT: Final = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@PATIENT
@given(st.binary(max_size=200))
def test_an_answer_of_the_slot_writer_is_a_result_for_each_order_or_none_at_all(answer: bytes) -> None:
    """As `Writing.carry_out` reads it: by its length, and nothing in it can be malformed."""
    if len(answer) % slot_writer.RESULT.size == 0:
        results = list(slot_writer.RESULT.iter_unpack(answer))
        assert len(results) == len(answer) // slot_writer.RESULT.size
        assert all(isinstance(number, int) for result in results for number in result)
