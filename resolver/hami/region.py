"""One shared region, opened for reading and read again and again.

Read by ``pread`` only: a truncated file comes back short, where a mapped page would kill this process. No
lock is taken and no seqlock is waited for, so a view may show a slot in the middle of a move; a caller that acts
on it compares the slot's ``(pid, hostpid)`` word again, atomically.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self

from resolver.errors import RegionRejected
from resolver.hami import layout as layouts
from resolver.hami.packed_slots import Columns, PackedSlots
from resolver.linux.safe_open import check_plain, open_plain, translate
from resolver.reasons import RegionReason

if TYPE_CHECKING:
    from resolver.hami.packed_slots import SlotRecord

#: Slots that are read in one go, some 60 KiB: what a thousand of them need at once isn't kept by the allocator.
_CHUNK = 32


class RegionView(NamedTuple):
    """A region as it was read; lists cover the first ``device_num`` devices, slots 0 to ``proc_num - 1``."""

    device_num: int
    uuids: tuple[str, ...]
    sm_limit: tuple[int, ...]
    proc_num: int
    utilization_switch: int
    slots: PackedSlots
    limit: tuple[int, ...] = ()  # bytes of device memory; 0 means no limit


class SharedRegion:
    """An open ``.cache`` file."""

    __slots__ = (
        "_columns",
        "_file_bytes",
        "_header",
        "_length",
        "_numbers",
        "_rest",
        "_start",
        "_tail",
        "_tail_at",
        "_view",
        "fd",
        "inode",
        "layout",
        "mtime_ns",
        "path",
        "st_dev",
    )

    def __init__(self, fd: int, info: os.stat_result, layout: layouts.Layout, path: str) -> None:
        self.fd = fd
        self.st_dev = info.st_dev
        self.inode = info.st_ino
        self.layout = layout
        self.path = path
        #: When the file was last written through a fresh mapping (or by write); a new process in it shows here.
        self.mtime_ns = info.st_mtime_ns
        self._file_bytes, self._tail_at = layout.file_bytes, layout.proc_num
        self._tail: bytes | None = None  # as it was read
        self._numbers = 0, 0  # what it says: proc_num and utilization_switch
        self._length = 0  # of what is read at once: the header and the first slots
        self._start = self._rest = b""  # of the header, as it was read
        self._header = layouts.Header(0, (), ())
        self._columns = Columns(layout, 0, layout.procs)
        self._view: RegionView | None = None

    @property
    def identity(self) -> tuple[int, int]:
        """``(st_dev, inode)``: the file, under whatever name."""
        return self.st_dev, self.inode

    def read(self) -> RegionView:
        """What the region says now; the very same object as last time if nothing in it changed.

        Three system calls, more for more than 32 slots. The ``fstat`` costs under a microsecond and is what
        distinguishes a deleted file (nobody looks there any more), a second name and a changed size; a file cut after
        it shows by a short read. Only the words that count are kept between reads, packed, and compared as bytes.

        Raises `RegionRejected`: ``gone``, ``hard_link``, ``truncated``, ``unknown_size``, ``bad_header``,
        ``not_initialized``, ``unknown_version``, ``io_error``. It is to be closed then.
        """
        layout, fd = self.layout, self.fd
        try:
            info = os.fstat(fd)
            if info.st_nlink != 1 or info.st_size != self._file_bytes:
                self._refuse(info)
            self.mtime_ns = info.st_mtime_ns
            tail = os.pread(fd, layouts.TAIL_START_BYTES, self._tail_at)
            if tail != self._tail:
                self._take_tail(tail)
            data = os.pread(fd, self._length, 0)
            if len(data) != self._length:
                self._cut()
            if not (
                self._view is not None
                and data.startswith(self._start)
                and data.startswith(self._rest, layout.device_num)
            ):
                self._take_header(data)
            columns = self._columns.of(data)
            proc_num, utilization_switch = self._numbers
            if proc_num > _CHUNK:
                columns = self._further(columns, proc_num)
        except OSError as error:
            raise translate(error) from None
        view = self._view
        if view is not None and columns == view.slots.columns:
            if view.utilization_switch == utilization_switch:
                return view
            slots = view.slots
        else:
            slots = PackedSlots(columns)
        header = self._header
        self._view = RegionView(
            device_num=header.device_num,
            uuids=header.uuids,
            sm_limit=header.sm_limit,
            proc_num=proc_num,
            utilization_switch=utilization_switch,
            slots=slots,
            limit=header.limit,
        )
        return self._view

    def _bytes(self, start: int, length: int) -> bytes:
        data = os.pread(self.fd, length, start)
        if len(data) != length:
            self._cut()
        return data

    def _cut(self) -> NoReturn:
        raise RegionRejected(RegionReason.TRUNCATED, "it was truncated while it was read")

    def _take_tail(self, tail: bytes) -> None:
        layout = self.layout
        self._numbers = layouts.parse_tail_start(tail)
        self._length = layout.procs + min(self._numbers[0], _CHUNK) * layout.slot_size
        self._tail = tail

    def _take_header(self, data: bytes) -> None:
        layout, self._view = self.layout, None
        if layouts.identify(layout.file_bytes, data) is not layout:
            raise RegionRejected(RegionReason.UNKNOWN_VERSION, "it changed its version while it was open")
        self._header = layouts.parse_header(layout, data)
        # The words that processes change all the time (owner_pid, the semaphore) lie between the two.
        self._start, self._rest = data[: layout.owner_pid], data[layout.device_num : layout.procs]
        self._columns = Columns(layout, self._header.device_num, layout.procs)

    def _further(self, first: tuple[bytes, ...], proc_num: int) -> tuple[bytes, ...]:
        """The columns of all slots, where the first ones are read already."""
        layout, parts = self.layout, [first]
        further = Columns(layout, self._header.device_num)
        for start in range(_CHUNK, proc_num, _CHUNK):
            count = min(_CHUNK, proc_num - start)
            data = self._bytes(layout.slot_offset(start), count * layout.slot_size)
            parts.append(further.of(data))
        return tuple([b"".join(column) for column in zip(*parts, strict=True)])

    def word(self, offset: int) -> int | None:
        """The 8-byte word there as it is now; None if it cannot be read."""
        try:
            data = os.pread(self.fd, 8, offset)
        except OSError:
            return None
        return int.from_bytes(data, "little") if len(data) == 8 else None

    def used(self, slot: SlotRecord, device_num: int) -> tuple[tuple[int, int, int, int], ...] | None:
        """What HAMi-core has counted for the slot's process, see `layout.parse_used`.

        None if it cannot be read, or if the slot is another process's by now.
        """
        layout = self.layout
        length = layout.used + device_num * layout.used_size
        try:
            data = os.pread(self.fd, length, layout.slot_offset(slot.index))
        except OSError:
            return None
        if len(data) != length or int.from_bytes(data[:4], "little", signed=True) != slot.pid:
            return None
        return layouts.parse_used(layout, data, device_num)

    def dump(self) -> dict[str, Any]:
        """Everything in the region under the upstream C names, see `layout.parse_region`, and ``path``.

        For people; the daemon uses `read`. Raises `RegionRejected` as `read` does.
        """
        layout = self.layout
        try:
            header = os.pread(self.fd, layout.procs, 0)
            tail = os.pread(self.fd, layout.size - layout.proc_num, layout.proc_num)
            proc_num = layouts.parse_tail_start(tail)[0]
            slots = os.pread(self.fd, proc_num * layout.slot_size, layout.procs)
        except OSError as error:
            raise translate(error) from None
        return {"path": self.path, **layouts.parse_region(layout, header, slots, tail)}

    def _refuse(self, info: os.stat_result) -> None:
        check_plain(info)
        if info.st_size < self.layout.file_bytes:
            raise RegionRejected(
                RegionReason.TRUNCATED,
                f"it was truncated from {self.layout.file_bytes} to {info.st_size} bytes",
            )
        raise RegionRejected(RegionReason.UNKNOWN_SIZE, f"it grew to {info.st_size} bytes")

    def close(self) -> None:
        """Give the descriptor back; may be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_region(dir_fd: int, file_name: str, path: str) -> SharedRegion:
    """Open ``file_name`` in an open directory as a shared region; ``path`` is where that is, for people.

    Raises `RegionRejected`: see `openat.open_plain` and `layout.identify`. What is inside the header is
    checked by `SharedRegion.read`.
    """
    fd, _ = open_plain(dir_fd, file_name)
    return adopt_region(fd, path)


def adopt_region(fd: int, path: str) -> SharedRegion:
    """The shared region that is open as ``fd``, which is closed if it is none. Raises as `open_region` does."""
    try:
        info = os.fstat(fd)
        # By size first, so that nothing is read of a file that cannot be a region.
        start = os.pread(fd, layouts.IDENTIFY_BYTES, 0) if info.st_size in layouts.FILE_SIZES else b""
        return SharedRegion(fd, info, layouts.identify(info.st_size, start), path)
    except OSError as error:
        os.close(fd)
        raise translate(error) from None
    except RegionRejected:
        os.close(fd)
        raise
