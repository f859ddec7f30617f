"""Shared region, opened for reading and read repeatedly.

Read only with ``pread``: a truncated file gives a short read, where a mapped page would kill this process. The loop
reads cached pages (RWF_NOWAIT) of files without blocks to free; a lane reads the rest, because tenants can lock files.
No lock is taken, so a slot may be in mid-move: recheck its ``(pid, hostpid)`` word atomically before acting.
"""

from __future__ import annotations

import binascii
import errno
import fcntl
import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from resolver.base.errors import RegionRejected, ResolverError
from resolver.base.reasons import RegionReason
from resolver.hami import layout as layouts
from resolver.hami.packed_slots import Columns, PackedSlots, SlotRecord, without_idle
from resolver.linux.procfs import Procfs
from resolver.linux.safe_open import cached, check_plain, closing, let_go, open_offered, open_plain, translate

if TYPE_CHECKING:  # lanes and commands must not import asyncio
    from resolver.workers.lanes import TenantReader

#: Slots per read, some 60 KiB: the allocator would keep larger buffers.
_CHUNK = 32
#: Errors of a read that would have to wait, or that the file system doesn't support (overlay, tmpfs).
_WOULD_WAIT = frozenset({errno.EAGAIN, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_buffer = memoryview(bytearray(1 << 17))  # shared by all reads that must not wait
#: Bytes that a file system may allocate beyond a file's end by itself (XFS). A tenant that frees more makes even
#: RWF_NOWAIT wait, because readahead takes the lock (Linux 5.15).
_SPARE_BYTES = 1 << 16


class RegionView(NamedTuple):
    """Content of a region; lists cover the first ``device_num`` devices.

    ``slots`` has those below ``proc_num``, then those up to the last with a utilization.
    """

    device_num: int
    uuids: tuple[str, ...]
    sm_limit: tuple[int, ...]
    limit: tuple[int, ...]  # bytes of device memory; 0 means no limit
    proc_num: int
    utilization_switch: int
    slots: PackedSlots


class SharedRegion:
    """An open ``.cache`` file."""

    def __init__(self, fd: int, info: os.stat_result, layout: layouts.Layout, path: str) -> None:
        self.fd = fd
        self.identity = info.st_dev, info.st_ino  # stays when the file is renamed
        self.layout = layout
        self.path = path
        #: Time of the last write by a system call or through a fresh mapping: an attaching process changes it.
        self.mtime_ns = info.st_mtime_ns
        self._numbers = 0, 0  # proc_num and utilization_switch
        #: Number of slots to read unless more are in use; at first all of them.
        self._end = layouts.MAX_SLOTS if layout.device_util is not None else 0
        self._data = b""  # the header's bytes at the last read
        self._header = layouts.Header(0, (), ())
        self._columns = Columns(layout, 0)
        self.view: RegionView | None = None  # of the last read
        self._nowait = False

    @property
    def link(self) -> str:
        """Return the path by which a lane opens the daemon's file."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def read(self) -> RegionView:
        """Return the view; the same object if nothing changed.

        Takes five system calls for 32 slots, and keeps relevant words only. Raises `RegionRejected`; the caller must
        close it: ``gone``, ``hard_link``, ``truncated``, ``unknown_size``, ``bad_header``, ``not_initialized``,
        ``unknown_version``, ``io_error``.
        """
        layout, fd = self.layout, self.fd
        try:
            info = os.fstat(fd)
            check_plain(info)
            if info.st_size < layout.file_bytes:
                why = f"it was truncated from {layout.file_bytes} to {info.st_size} bytes"
                raise RegionRejected(RegionReason.TRUNCATED, why)
            if info.st_size > layout.file_bytes:
                raise RegionRejected(RegionReason.UNKNOWN_SIZE, f"it grew to {info.st_size} bytes")
            self._check_blocks(info)
            self.mtime_ns = info.st_mtime_ns
            was = self._numbers[0]
            self._numbers = layouts.parse_tail_start(self._pread(layouts.TAIL_START_BYTES, layout.proc_num))
            self._end = max(self._end, was, self._numbers[0])  # a move leaves its slot behind, above proc_num
            data = self._bytes(0, layout.procs + min(_CHUNK, self._end) * layout.slot_size)
            self._parse_header(data[: layout.procs])
            columns = self._read_slots(data[layout.procs :])
            if self._end > self._numbers[0]:
                self._end, columns = without_idle(columns, self._numbers[0])
        except BlockingIOError:
            raise
        except OSError as error:
            raise translate(error) from None
        return self._see(self._header, self._numbers, columns)

    def read_at_once(self) -> RegionView | None:
        """Return `read`'s result without blocking, if possible."""
        self._nowait = True
        try:
            return self.read()
        except BlockingIOError:
            return None
        finally:
            self._nowait = False

    async def read_by(self, reader: TenantReader, payer: str) -> RegionView:
        """Read by a lane at ``payer``'s expense. Raises as `read` does, `TooSlow` and `WorkerFailed`."""
        try:
            answer = await reader.ask(payer, payer, read_open, self.link, self.path, self._end)
        except OSError as error:
            raise translate(error) from None
        return self.take(*answer[1:])

    def take(self, mtime_ns: int, header: Any, numbers: Sequence[int], columns: list[str]) -> RegionView:
        """Take a view from `read_open`."""
        self.mtime_ns = mtime_ns
        self._data = b""  # the header was not parsed from these bytes
        device_num, *lists = header
        packed = tuple(map(binascii.a2b_base64, columns))
        self._end = len(packed[0]) // 4
        return self._see(layouts.Header(device_num, *map(tuple, lists)), numbers, packed)

    def _see(self, header: layouts.Header, numbers: Sequence[int], columns: tuple[bytes, ...]) -> RegionView:
        before, (proc_num, utilization_switch) = self.view, numbers
        if before is not None and (columns, proc_num) == (before.slots.columns, before.proc_num):
            slots = before.slots
        else:
            slots = PackedSlots(columns, proc_num)
        view = RegionView(*header, proc_num, utilization_switch, slots)
        if before is None or view != before:
            self.view = before = view
        return before

    def _bytes(self, start: int, length: int) -> bytes:
        data = self._pread(length, start)
        if len(data) != length:
            raise RegionRejected(RegionReason.TRUNCATED, "it was truncated while it was read")
        return data

    def _check_blocks(self, info: os.stat_result) -> None:
        """Raise BlockingIOError if the reader must not wait, and the tenant could delay it by freeing blocks."""
        if self._nowait and info.st_blocks * 512 > self.layout.file_bytes + _SPARE_BYTES:
            raise BlockingIOError(errno.EAGAIN, "it has blocks beyond its end")

    def _pread(self, length: int, start: int) -> bytes:
        """Read bytes of the file. Raises BlockingIOError if that must not wait, but would."""
        if not self._nowait:
            return os.pread(self.fd, length, start)
        if not cached(self.fd, start, length):
            raise BlockingIOError(errno.EAGAIN, "not in the page cache")
        room = _buffer[:length] if length <= len(_buffer) else memoryview(bytearray(length))
        try:
            count = os.preadv(self.fd, [room], start, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno in _WOULD_WAIT:
                raise BlockingIOError(error.errno, "not in the page cache") from None
            raise
        if count < length:  # the rest is uncached or missing: a read that may wait shows which
            raise BlockingIOError(errno.EAGAIN, "not in the page cache")
        return room.tobytes()

    def start_with(self, end: int = layouts.MAX_SLOTS) -> None:
        """Read at least the first ``end`` slots next time: moves may have left copies above ``proc_num``."""
        self._end = end

    def _parse_header(self, data: bytes) -> None:
        if data == self._data:
            return
        layout = self.layout
        if layouts.identify(layout.file_bytes, data) is not layout:
            raise RegionRejected(RegionReason.UNKNOWN_VERSION, "it changed its version while it was open")
        self._header, self._data = layouts.parse_header(layout, data), data
        self._columns = Columns(layout, self._header.device_num)

    def _read_slots(self, first: bytes) -> tuple[bytes, ...]:
        """Return columns of the first ``_end`` slots; ``first`` are those of the first chunk."""
        layout, parts = self.layout, [self._columns.of(first)]
        for start in range(_CHUNK, self._end, _CHUNK):
            count = min(_CHUNK, self._end - start)
            parts.append(self._columns.of(self._bytes(layout.slot_offset(start), count * layout.slot_size)))
        return tuple(map(b"".join, zip(*parts, strict=True)))

    async def pieces(
        self, reader: TenantReader, payer: str, places: Sequence[tuple[int, int]]
    ) -> dict[int, bytes]:
        """Return the readable bytes of these ``(offset, length)`` places, by offset."""
        self._nowait = True
        try:
            self._check_blocks(os.fstat(self.fd))
            pieces = [self._pread(length, start) for start, length in places]
        except BlockingIOError:
            try:
                read = await reader.ask(payer, payer, pieces_of_open, self.link, places)
            except (ResolverError, OSError):
                return {}
            pieces = list(map(binascii.a2b_base64, read))
        except OSError:
            return {}
        finally:
            self._nowait = False
        whole = zip(places, pieces, strict=True)
        return {start: piece for (start, length), piece in whole if len(piece) == length}

    async def counts(
        self, reader: TenantReader, payer: str, slots: Sequence[SlotRecord], device_num: int
    ) -> tuple[list[tuple[int, ...]], int]:
        """Return sums of HAMi-core's counts of these slots by device, none if a slot changed; last kernel's time."""
        layout, devices = self.layout, range(device_num)
        places = [
            (layout.slot_offset(slot.index), layout.used + device_num * layout.used_size)
            for slot in slots
            if devices
        ]
        if layout.last_kernel_time is not None:
            places.append((layout.last_kernel_time, 8))
        pieces = await self.pieces(reader, payer, places)
        last_kernel = int.from_bytes(pieces.get(layout.last_kernel_time or 0, b""), "little")
        sums: list[tuple[int, ...]] = [(0, 0, 0, 0) for _ in devices]
        for slot in slots if devices else ():
            data = pieces.get(layout.slot_offset(slot.index), b"")
            if int.from_bytes(data[:4], "little", signed=True) != slot.pid:
                return [], last_kernel
            used = layouts.parse_used(layout, data, device_num)
            sums = [(*map(sum, zip(*both, strict=True)),) for both in zip(sums, used, strict=True)]
        return sums, last_kernel

    def dump(self) -> dict[str, Any]:
        """Return everything for display, see `layout.parse_region`. Raises as `read` does."""
        layout = self.layout
        try:
            header = os.pread(self.fd, layout.procs, 0)
            tail = os.pread(self.fd, layout.size - layout.proc_num, layout.proc_num)
            proc_num = layouts.parse_tail_start(tail)[0]
            slots = os.pread(self.fd, proc_num * layout.slot_size, layout.procs)
        except OSError as error:
            raise translate(error) from None
        return {"path": self.path, **layouts.parse_region(layout, header, slots, tail)}

    def close(self) -> None:
        if self.fd >= 0:
            let_go(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_region(dir_fd: int, file_name: str, path: str) -> SharedRegion:
    """Open ``file_name`` in an open directory, shown as ``path``.

    Raises `RegionRejected`, see `safe_open.open_plain` and `layout.identify`.
    """
    return adopt_region(open_plain(dir_fd, file_name)[0], path)


def adopt_region(fd: int, path: str) -> SharedRegion:
    """Adopt ``fd``; close it on an error. Raises as `open_region` does."""
    try:
        info = os.fstat(fd)
        # The size comes first: nothing is read of a file that cannot be a region.
        start = os.pread(fd, layouts.IDENTIFY_BYTES, 0) if info.st_size in layouts.FILE_SIZES else b""
        return SharedRegion(fd, info, layouts.identify(info.st_size, start), path)
    except OSError as error:
        os.close(fd)
        raise translate(error) from None
    except RegionRejected:
        os.close(fd)
        raise


async def adopt_by(reader: TenantReader, payer: str, fd: int, path: str) -> SharedRegion:
    """Adopt ``fd``, whose content a lane reads; close it on an error.

    Raises as `open_region` and `SharedRegion.read` do, `TooSlow` and `WorkerFailed`.
    """
    try:
        info = os.fstat(fd)
        check_plain(info)
        if info.st_size not in layouts.FILE_SIZES:
            layouts.identify(info.st_size, b"")
        where = f"/proc/{os.getpid()}/fd/{fd}"
        layout, *content = await reader.ask(payer, payer, read_open, where, path, layouts.MAX_SLOTS)
        region = SharedRegion(fd, info, layouts.LAYOUTS[layout], path)
        region.take(*content)
    except BaseException:
        let_go(fd)
        raise
    return region


def read_open(_procfs: Procfs, where: str, path: str, end: int) -> Any:
    """Return layout, file time, header, numbers and columns of a region open in the daemon.

    ``end`` is as in `SharedRegion.start_with`.
    """
    with adopt_region(open_offered(where), path) as region:
        region.start_with(end)
        view = region.read()
        header = view.device_num, view.uuids, view.sm_limit, view.limit
        numbers = view.proc_num, view.utilization_switch
        columns = [_text(column) for column in view.slots.columns]
        return region.layout.name, region.mtime_ns, header, numbers, columns


def pieces_of_open(_procfs: Procfs, where: str, places: list[tuple[int, int]]) -> list[str]:
    """Read bytes of a file open in the daemon, by ``(offset, length)``."""
    with closing(open_offered(where)) as fd:
        return [_text(os.pread(fd, length, start)) for start, length in places]


def unwritten(_procfs: Procfs, where: str) -> bool:
    """Check that no process on this node has the regular file open for writing; False in doubt.

    Requires CAP_LEASE or ownership of the file. An open between the two calls blocks until the second.
    """
    fd = open_offered(where)
    try:
        # SIGURG is ignored; SIGIO, the default, would end this process.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    finally:
        let_go(fd)
    return True


def _text(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")
