"""Slots as columns of words keep every field; a query over all slots equals queries of single slots."""

import pytest

from resolver.hami.packed_slots import PackedSlots, SlotRecord, without_idle
from tests.fakes.slots import packed

SLOTS = (
    SlotRecord(0, 10, 4000, 1, (0, 5)),
    SlotRecord(1, 11, 4001, 0, (0, 0)),
    SlotRecord(2, 0, 4000, 1, (7, 0)),
    SlotRecord(3, 12, 4000, 2, (0, 0)),
    SlotRecord(4, 13, 4001, 1, (0, 0)),
)


def test_packed_slots_equal_read_slots() -> None:
    slots = packed(SLOTS)
    assert (tuple(slots), len(slots), slots.proc_num) == (SLOTS, 5, 5)
    with pytest.raises(IndexError):
        slots[5]
    with pytest.raises(ValueError, match="shorter"):
        packed([SLOTS[0], SLOTS[1]._replace(sm_util=(1,))])


def test_queries_cover_all_slots() -> None:
    slots = packed(SLOTS, 4)
    assert list(slots.in_use()) == [(0, 10), (2, 0), (3, 12)]
    assert slots.loaded() == [0, 2]
    assert [slots.vacant(index) for index in range(5)] == [False, False, True, False, True]
    assert (slots.crowded(4000), slots.crowded(4001)) == (True, False), "in use, and below proc_num"
    assert packed(()).loaded() == []
    assert packed([SLOTS[0], SLOTS[2]]).crowded(4000)
    assert not packed([SLOTS[0], SLOTS[4]]).crowded(4000)


def test_equal_slots_are_one_key() -> None:
    assert len({packed(SLOTS), packed(SLOTS), packed(SLOTS[:4])}) == 2
    assert packed(SLOTS) != packed(SLOTS, 4)
    assert packed(SLOTS) != SLOTS


def test_leftovers_of_ended_processes_are_summed_by_device() -> None:
    unused, copies = SlotRecord(5, 9, 1, 0, (3, 0)), [SlotRecord(n, 9, 1, 1, (2, n)) for n in (6, 7)]
    assert packed([*SLOTS, unused, *copies], 6).left_behind() == ((3, 0), (4, 13))
    assert packed(SLOTS).left_behind() == ((), ())
    most = (1 << 64) - 1
    assert packed([unused._replace(sm_util=(most, 0))] * 2).left_behind() == ((most, 0), ())


@pytest.mark.parametrize(("proc_num", "end"), [(0, 3), (2, 3), (3, 3), (4, 4), (5, 5)])
def test_idle_slots_behind_the_last_one_are_left_out(proc_num: int, end: int) -> None:
    kept, columns = without_idle(packed(SLOTS).columns, proc_num)
    assert kept == end
    assert PackedSlots(columns) == packed(SLOTS[:end])


def test_slot_with_a_load_in_any_byte_is_kept() -> None:
    for load in (1, 1 << 40, 1 << 63):
        slots = [*SLOTS[:4], SLOTS[4]._replace(sm_util=(0, load))]
        assert without_idle(packed(slots).columns, 0)[0] == 5
