"""Every slot of a region as it was read, packed: a tenant can fill 1,024 of them in each of its files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple, Self, overload

if TYPE_CHECKING:
    from resolver.hami.layout import Layout

_WORD, _HALF = Struct("=Q"), Struct("=i")
_HALF_COLUMNS = 3  # the first ones: pid, hostpid, status


class SlotRecord(NamedTuple):
    """One proc_slot as it was read. ``pid`` is a number of the tenant's own PID namespace.

    ``sm_util`` in per cent per used device; empty where the layout has none (``v0-no-util``).
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, of no use on a slot
    pid: int
    hostpid: int
    status: int
    sm_util: tuple[int, ...]


class Columns:
    """Where the words that count are in each slot of a layout, by their kind: made once, used for every read."""

    __slots__ = ("_halves", "_words")

    def __init__(self, layout: Layout, device_num: int, start: int = 0) -> None:
        """Of slots that begin so many bytes after the start of what is read."""
        halves, words = layout.slot_size // 4, layout.slot_size // 8
        self._halves = [slice((start + at) // 4, None, halves) for at in (0, 4, layout.status)]
        offsets = (layout.sm_util_offset(0, device) for device in range(device_num))
        found = [offset - layout.procs for offset in offsets if offset is not None]
        self._words = [slice((start + at) // 8, None, words) for at in found]

    def of(self, data: bytes) -> tuple[bytes, ...]:
        """The columns of whole slots, one after the other, to the end of what was read."""
        view = memoryview(data)
        halves, words = view.cast("i"), view.cast("Q")
        # Not as comprehensions: those are calls, and this is done with every read.
        columns = []
        for where in self._halves:
            columns.append(halves[where].tobytes())  # noqa: PERF401
        for where in self._words:
            columns.append(words[where].tobytes())  # noqa: PERF401
        return tuple(columns)


class PackedSlots(Sequence[SlotRecord]):
    """The slots of one region: 12 bytes each, and 8 for each device. A `SlotRecord` is made when one is asked for."""

    __slots__ = ("_crowded", "_hostpids", "_pids", "_sm_util", "_statuses", "columns")

    def __init__(self, columns: tuple[bytes, ...]) -> None:
        """``columns`` are those of `Columns`: pid, hostpid, status, then ``sm_util`` of each device."""
        self.columns = columns
        self._pids, self._hostpids, self._statuses, *self._sm_util = (
            _words(number, column) for number, column in enumerate(columns)
        )
        self._crowded: frozenset[int] | None = None

    @classmethod
    def packed(cls, slots: Iterable[SlotRecord]) -> Self:
        """Of slots that are there already."""
        listed = list(slots)
        halves = ([each[field] for each in listed] for field in (1, 2, 3))
        words = zip(*(each.sm_util for each in listed), strict=True)
        return cls(
            (
                *(b"".join(map(_HALF.pack, column)) for column in halves),
                *(b"".join(map(_WORD.pack, column)) for column in words),
            )
        )

    def __len__(self) -> int:
        return len(self._pids)

    @overload
    def __getitem__(self, index: int) -> SlotRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[SlotRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> SlotRecord | tuple[SlotRecord, ...]:
        if isinstance(index, slice):
            return tuple(self[each] for each in range(*index.indices(len(self))))
        if index < 0:
            index += len(self)
        util = tuple([column[index] for column in self._sm_util])
        return SlotRecord(
            index=index,
            pid=self._pids[index],
            hostpid=self._hostpids[index],
            status=self._statuses[index],
            sm_util=util,
        )

    def __iter__(self) -> Iterator[SlotRecord]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedSlots) and self.columns == other.columns

    def __hash__(self) -> int:
        return hash(self.columns)

    def pid(self, index: int) -> int:
        """That of one slot."""
        return self._pids[index]

    def in_use(self) -> Iterator[tuple[int, int]]:
        """Index and PID of the slots that are in use."""
        return (
            (index, pid)
            for index, (pid, status) in enumerate(zip(self._pids, self._statuses, strict=True))
            if status
        )

    def same_pids(self, other: PackedSlots) -> bool:
        """Whether the same PIDs are in the same slots, whatever else is in them."""
        mine, others = self.columns, other.columns
        return len(mine) == len(others) and mine[0] == others[0] and mine[2] == others[2]

    def changed(self, before: PackedSlots) -> set[int]:
        """Indexes of the slots that say something else than before, among as many."""
        found: set[int] = set()
        for number, (now, then) in enumerate(zip(self.columns, before.columns, strict=True)):
            if now != then:
                words = zip(_words(number, now), _words(number, then), strict=True)
                found.update(index for index, (new, old) in enumerate(words) if new != old)
        return found

    def loaded(self) -> Iterator[int]:
        """Indexes of the slots that say of any device that it is busy, some more than once."""
        return chain.from_iterable(
            (index for index, value in enumerate(column) if value)
            for column, packed in zip(self._sm_util, self.columns[_HALF_COLUMNS:], strict=True)
            if packed.count(0) != len(packed)
        )

    def crowded(self, hostpid: int) -> bool:
        """Whether several slots in use hold this ``hostpid``."""
        if self._crowded is None:
            holders = Counter(
                hostpid for hostpid, status in zip(self._hostpids, self._statuses, strict=True) if status
            )
            self._crowded = frozenset(hostpid for hostpid, count in holders.items() if count > 1)
        return hostpid in self._crowded


def _words(number: int, column: bytes) -> memoryview:
    """The words of a column, by its number."""
    view = memoryview(column)
    return view.cast("i") if number < _HALF_COLUMNS else view.cast("Q")
