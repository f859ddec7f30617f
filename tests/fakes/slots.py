"""Slots in the packed form of a region that was read."""

import struct
from collections.abc import Iterable

from resolver.hami.packed_slots import PackedSlots, SlotRecord


def packed(slots: Iterable[SlotRecord], proc_num: int | None = None) -> PackedSlots:
    listed = list(slots)
    halves = (struct.pack(f"={len(listed)}i", *(each[field] for each in listed)) for field in (1, 2, 3))
    words = zip(*(each.sm_util for each in listed), strict=True)
    return PackedSlots((*halves, *(struct.pack(f"={len(word)}Q", *word) for word in words)), proc_num)
