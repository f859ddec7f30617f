"""All slots of a region as read, packed because tenants can fill 1,024 per file."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from resolver.hami.layout import Layout

_MOST = (1 << 64) - 1
_HALF_COLUMNS = 3  # the leading columns of half words: pid, hostpid, status


class SlotRecord(NamedTuple):
    """One proc_slot as read. ``pid`` is of the tenant's PID namespace.

    ``sm_util`` is in per cent per used device; empty in ``v0-no-util``.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, of no use on a slot
    pid: int
    hostpid: int
    status: int
    sm_util: tuple[int, ...]


class Columns:
    """Offsets of relevant words in a layout's slots, by kind."""

    __slots__ = ("_halves", "_words")

    def __init__(self, layout: Layout, device_num: int) -> None:
        halves, words = layout.slot_size // 4, layout.slot_size // 8
        self._halves = [slice(at // 4, None, halves) for at in (0, 4, layout.status)]
        offsets = (layout.sm_util_offset(0, device) for device in range(device_num))
        columns = [offset - layout.procs for offset in offsets if offset is not None]
        self._words = [slice(at // 8, None, words) for at in columns]

    def of(self, data: bytes) -> tuple[bytes, ...]:
        """Extract the columns of whole consecutive slots."""
        view = memoryview(data)
        halves, words = view.cast("i"), view.cast("Q")
        # No comprehensions: each is a call, and every read of a region comes here.
        columns = []
        for where in self._halves:
            columns.append(halves[where].tobytes())  # noqa: PERF401
        for where in self._words:
            columns.append(words[where].tobytes())  # noqa: PERF401
        return tuple(columns)


def without_idle(columns: tuple[bytes, ...], proc_num: int) -> tuple[int, tuple[bytes, ...]]:
    """Return the count and columns of slots up to the last below ``proc_num`` or with a load."""
    words = columns[_HALF_COLUMNS:]
    end = max([proc_num, *((len(column.rstrip(b"\0")) + 7) // 8 for column in words)])
    halves = [column[: end * 4] for column in columns[:_HALF_COLUMNS]]
    return end, (*halves, *[column[: end * 8] for column in words])


class PackedSlots:
    """Slots of one region: 12 bytes each, and 8 per device; `SlotRecord` on request.

    Slots from ``proc_num`` on are copies left by moves.
    """

    __slots__ = ("_crowded", "_hostpids", "_pids", "_sm_util", "_statuses", "columns", "proc_num")

    def __init__(self, columns: tuple[bytes, ...], proc_num: int | None = None) -> None:
        """Take `Columns`: pid, hostpid, status, then each device's ``sm_util``."""
        self.columns = columns
        self.proc_num = len(columns[0]) // 4 if proc_num is None else proc_num
        self._pids, self._hostpids, self._statuses, *self._sm_util = (
            memoryview(column).cast("i" if number < _HALF_COLUMNS else "Q")
            for number, column in enumerate(columns)
        )
        self._crowded: frozenset[int] | None = None

    def __len__(self) -> int:
        return len(self._pids)

    def __getitem__(self, index: int) -> SlotRecord:
        util = tuple([column[index] for column in self._sm_util])
        return SlotRecord(index, self._pids[index], self._hostpids[index], self._statuses[index], util)

    def __iter__(self) -> Iterator[SlotRecord]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedSlots):
            return NotImplemented
        return (self.columns, self.proc_num) == (other.columns, other.proc_num)

    def __hash__(self) -> int:
        return hash(self.columns)

    def in_use(self) -> Iterator[tuple[int, int]]:
        """Yield index and PID of used slots."""
        below = zip(self._pids[: self.proc_num], self._statuses, strict=False)
        return ((index, pid) for index, (pid, status) in enumerate(below) if status)

    def loaded(self) -> list[int]:
        """Return indexes of slots with any load."""
        devices: set[int] = set()
        for column, packed in zip(self._sm_util, self.columns[_HALF_COLUMNS:], strict=True):
            if packed.count(0) != len(packed):
                devices.update(index for index, value in enumerate(column) if value)
        return sorted(devices)

    def left_behind(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return sums of unused slots' utilization by device, in per cent: below ``proc_num``, and above."""
        below, above = [0] * len(self._sm_util), [0] * len(self._sm_util)
        for index in self.loaded():
            sums = above if index >= self.proc_num else below
            if sums is above or not self._statuses[index]:
                for device, column in enumerate(self._sm_util):
                    sums[device] = min(sums[device] + column[index], _MOST)
        return tuple(below) if any(below) else (), tuple(above) if any(above) else ()

    def vacant(self, index: int) -> bool:
        """Check that the slot was given back, or is the copy of a moved slot."""
        return index >= self.proc_num or not self._pids[index]

    def crowded(self, hostpid: int) -> bool:
        """Check if several used slots have this ``hostpid``."""
        if self._crowded is None:
            holders = Counter(
                hostpid
                for hostpid, status in zip(self._hostpids[: self.proc_num], self._statuses, strict=False)
                if status
            )
            self._crowded = frozenset(hostpid for hostpid, count in holders.items() if count > 1)
        return hostpid in self._crowded
