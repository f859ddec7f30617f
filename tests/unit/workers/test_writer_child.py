"""Held values: compared only when a watcher's tick is possible, not each millisecond."""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from resolver.hami.layout import LAYOUTS
from resolver.workers import slot_writer, writer_child
from resolver.workers.writer_child import HeldWords
from tests.fakes import cachefiles
from tests.fakes.clock import Clock

V1_2 = LAYOUTS["v1.2"]
AT = V1_2.sm_util_offset(0, 0) or 0


@contextmanager
def holding(tmp_path: Path, handles: int = 0) -> Iterator[tuple[HeldWords, int, int]]:
    """Hold one word; yield the held words, and the descriptors of the file and the note."""
    data = bytearray(cachefiles.recorded("v1.2"))
    struct.pack_into("<ii", data, V1_2.procs, 7, 4711)
    struct.pack_into("<Q", data, V1_2.owner_pid, 0)
    fd = os.open(cachefiles.write(tmp_path / "a.cache", bytes(data)), os.O_RDWR)
    note = os.memfd_create("note")
    os.ftruncate(note, 4096)
    message = slot_writer.HEAD.pack(V1_2.file_bytes, slot_writer.HOLDS | 1) + slot_writer.HOLD.pack(1, 1000)
    message += slot_writer.ORDER.pack(-1, 0, V1_2.procs, 4711 << 32 | 7, AT, 0, 40)
    message += slot_writer.SLOTS.pack(V1_2.procs, V1_2.slot_size, V1_2.owner_pid, V1_2.proc_num)
    slot_writer.Words.load_functions()
    held = HeldWords()
    held.replace(message, [fd, note, *[fd] * handles])
    yield held, fd, note
    held.files[1].close()
    os.close(fd)
    os.close(note)


@pytest.mark.parametrize("watchers", [1, 2, 4])
def test_held_word_is_compared_when_a_tick_can_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watchers: int
) -> None:
    """Each wrong value is corrected by the next comparison; the first second isn't counted."""
    clock = Clock()
    monkeypatch.setattr(writer_child, "time", clock)
    with holding(tmp_path) as (held, fd, note):
        ticks = [clock.now + 0.0283 * first for first in range(watchers)]
        comparisons, wrong, end, since = 0, 0.0, clock.now + 2.0, 0.0
        while clock.now < end:
            counted, pause = end - clock.now < 1.0, held.tick()
            assert not any(os.pread(note, 8, 0)), "the file would be blamed for any end of the writer"
            comparisons += counted
            if since and int.from_bytes(os.pread(fd, 8, AT), "little") == 40:
                wrong, since = wrong + (clock.now - since) * counted, 0.0
            clock.now += pause
            for number, tick in enumerate(ticks):
                if tick <= clock.now:
                    os.pwrite(fd, bytes(8), AT)
                    since, ticks[number] = since or tick, tick + 0.1203
    assert comparisons < 40 + 20 * watchers
    assert wrong < 0.01 * watchers


def test_many_watchers_that_fell_silent_cost_no_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(writer_child, "time", clock)
    with holding(tmp_path, handles=4) as (held, fd, _):
        held.tick()
        clock.now += 1.0
        os.pwrite(fd, bytes(8), AT)
        held.tick()
        assert int.from_bytes(os.pread(fd, 8, AT), "little") == 40
        clock.now += 1.0
        held.tick()
        assert held.tick() > 0.01
