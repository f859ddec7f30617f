"""The layouts, tested on recorded files, against a C compiler, and on random bytes."""

import json
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from resolver.base.errors import RegionRejected
from resolver.base.reasons import RegionReason
from resolver.hami.layout import (
    FILE_SIZES,
    LAYOUTS,
    MAGIC,
    Layout,
    identify,
    parse_header,
    parse_region,
    parse_tail_start,
)
from resolver.hami.packed_slots import Columns, PackedSlots, SlotRecord
from tests.fakes.cachefiles import NAMES, recorded
from tests.fakes.layouts import TABLE, compiled
from tests.fakes.releases import BY_LAYOUT

layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def test_each_layout_has_a_recorded_file_and_a_release() -> None:
    assert set(NAMES) == set(LAYOUTS) == set(BY_LAYOUT)


@layouts
def test_a_c_compiler_agrees_on_every_offset(layout: Layout) -> None:
    offsets = compiled(layout.name)
    assert json.loads(TABLE.read_text())[layout.name] == offsets, "run: make tables"

    minor = layout.version[1] if layout.version else None
    assert offsets.pop("minor_version", None) == minor
    for field in ("sem", "sem_postinit", "sm_init_flag"):  # never written by us
        offsets.pop(field, None)
    sm_util = offsets.pop("sm_util", None)
    ours = {
        k: v
        for k, v in layout._asdict().items()
        if k not in ("name", "released", "version") and v is not None
    }
    if layout.device_util is None:
        assert sm_util is None
        assert ours.pop("device_util_size") == 0
        assert layout.sm_util_offset(3, 1) is None
    else:
        assert sm_util is not None
        util = offsets["procs"] + 3 * offsets["slot_size"] + offsets["device_util"]
        assert layout.sm_util_offset(3, 1) == util + offsets["device_util_size"] + sm_util
    assert ours == offsets


@layouts
def test_every_word_that_is_ever_written_is_aligned(layout: Layout) -> None:
    for index in (0, 1, 7, 1023):
        assert layout.slot_offset(index) % 8 == 0
        assert (layout.sm_util_offset(index, 15) or 0) % 8 == 0
    assert layout.slot_offset(1024) == layout.proc_num


@pytest.mark.parametrize(
    ("size", "start", "reason"),
    [
        (0, b"", RegionReason.UNKNOWN_SIZE),
        (1 << 40, b"", RegionReason.UNKNOWN_SIZE),
        (2008952, struct.pack("<iII", MAGIC, 1, 2), RegionReason.UNKNOWN_SIZE),
        (2008954, struct.pack("<iII", MAGIC, 1, 2), RegionReason.UNKNOWN_SIZE),
        (2008953, struct.pack("<iII", 0, 1, 2), RegionReason.NOT_INITIALIZED),
        (2008953, struct.pack("<iII", MAGIC + 1, 1, 2), RegionReason.NOT_INITIALIZED),
        (2008953, struct.pack("<iII", MAGIC, 1, 3), RegionReason.UNKNOWN_VERSION),
        (2008953, struct.pack("<iII", MAGIC, 0, 1), RegionReason.UNKNOWN_VERSION),
        (2008953, struct.pack("<iII", MAGIC, 2, 1), RegionReason.UNKNOWN_VERSION),
        (2008985, struct.pack("<iII", MAGIC, 1, 2), RegionReason.UNKNOWN_VERSION),
        (2008953, struct.pack("<iI", MAGIC, 1), RegionReason.TRUNCATED),
    ],
)
def test_inexact_layout_is_skipped(size: int, start: bytes, reason: RegionReason) -> None:
    with pytest.raises(RegionRejected) as caught:
        identify(size, start)
    assert caught.value.reason is reason


@layouts
@pytest.mark.parametrize("short", [0, 1, 2], ids=["header", "slots", "tail"])
def test_a_part_that_is_too_short_is_refused(layout: Layout, short: int) -> None:
    data = recorded(layout.name)
    parts = [data[: layout.procs], data[layout.procs : layout.proc_num], data[layout.proc_num : layout.size]]
    count = parse_tail_start(parts[2])[0]
    parts[1] = parts[1][: count * layout.slot_size]
    parts[short] = parts[short][:-1]
    with pytest.raises(RegionRejected, match="shorter than its header says"):
        parse_region(layout, *parts)


@layouts
@pytest.mark.parametrize("uuid", [b"\x1b[2J", b"GPU\n", b"\xff" * 8, "GPU-ü".encode(), b"G" * 96])
def test_a_uuid_that_is_not_text_is_refused(layout: Layout, uuid: bytes) -> None:
    header = bytearray(recorded(layout.name)[: layout.procs])
    header[layout.uuids + 96 : layout.uuids + 192] = uuid.ljust(96, b"\0")
    with pytest.raises(RegionRejected, match=r"uuids\[1\]") as caught:
        parse_header(layout, bytes(header))
    assert caught.value.reason is RegionReason.BAD_HEADER


@given(
    size=st.one_of(st.integers(0, 1 << 50), st.sampled_from(sorted(FILE_SIZES))), start=st.binary(max_size=64)
)
@example(size=2008953, start=struct.pack("<iII", MAGIC, 1, 2))
def test_any_size_and_start_is_a_layout_or_refused(size: int, start: bytes) -> None:
    try:
        layout = identify(size, start)
    except RegionRejected:
        return
    assert size == layout.file_bytes
    assert start[:4] == struct.pack("<i", MAGIC)


def repeated(noise: bytes, length: int) -> bytes:
    """Return ``length`` bytes of the repeated noise; none if ``length`` is negative."""
    return (noise * (max(length, 0) // len(noise) + 1))[: max(length, 0)]


@given(
    layout=st.sampled_from(sorted(LAYOUTS.values())),
    device_num=st.one_of(st.integers(0, 20), st.integers(0, 2**64 - 1)),
    noise=st.binary(min_size=1, max_size=300),
    proc_num=st.one_of(st.integers(-1, 6), st.integers(-(2**31), 2**31 - 1)),
    slots=st.integers(0, 6),
    cut=st.integers(0, 40),
)
def test_any_bytes_are_a_region_or_refused(
    layout: Layout, device_num: int, noise: bytes, proc_num: int, slots: int, cut: int
) -> None:
    header = bytearray(repeated(noise, layout.procs))
    struct.pack_into("<Q", header, layout.device_num, device_num)
    tail = struct.pack("<i", proc_num) + repeated(noise, layout.size - layout.proc_num - 4 - cut)
    try:
        parsed = parse_region(layout, bytes(header), noise * (slots * layout.slot_size), tail)
    except RegionRejected:
        return
    assert len(parsed["uuids"]) == device_num <= 16
    assert len(parsed["slots"]) == proc_num
    assert all("".join(uuid).isprintable() for uuid in parsed["uuids"])


@given(
    layout=st.sampled_from(sorted(LAYOUTS.values())),
    device_num=st.integers(0, 16),
    noise=st.binary(min_size=64, max_size=512),
)
def test_quick_reader_equals_whole_reader(layout: Layout, device_num: int, noise: bytes) -> None:
    header = bytearray(layout.procs)
    struct.pack_into("<Q", header, layout.device_num, device_num)
    slots = (noise * 100)[: 3 * layout.slot_size].ljust(3 * layout.slot_size, b"\1")
    tail = struct.pack("<i", 3).ljust(layout.size - layout.proc_num, b"\0")
    parsed = parse_region(layout, bytes(header), slots, tail)["slots"]
    columns = Columns(layout, device_num).of(slots)
    quick = PackedSlots(columns)
    assert len(quick) == len(parsed)
    for slot, seen in zip(parsed, quick, strict=True):
        utils = tuple(util["sm_util"] for util in slot.get("device_util", []))
        assert seen == SlotRecord(slot["index"], slot["pid"], slot["hostpid"], slot["status"], utils)
