"""One shared region, opened for reading and read again and again.

Read by ``pread`` only: a truncated file comes back short, where a mapped page would kill this process. No
lock is taken and no seqlock is waited for, so a view may show a slot in the middle of a move; whoever acts
on it compares the slot's ``(pid, hostpid)`` word again, atomically.
"""

from __future__ import annotations

import os
from struct import Struct
from typing import Any, NamedTuple, Self

from resolver.errors import RegionRejected
from resolver.hami import layout as layouts
from resolver.linux.safe_open import check_plain, open_plain, translate
from resolver.reasons import RegionReason

_OWNER_PID = Struct("<Q")


class Slot(NamedTuple):
    """One proc_slot as it was read. ``pid`` is a number of the tenant's own PID namespace.

    ``sm_util`` in per cent per used device; empty where the layout has none (``v0-no-util``).
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, of no use on a slot
    pid: int
    hostpid: int
    status: int
    sm_util: tuple[int, ...]


class RegionView(NamedTuple):
    """A region as it was read; lists cover the first ``device_num`` devices, slots 0 to ``proc_num - 1``."""

    device_num: int
    uuids: tuple[str, ...]
    sm_limit: tuple[int, ...]
    proc_num: int
    owner_pid: int
    utilization_switch: int
    slots: tuple[Slot, ...]
    limit: tuple[int, ...] = ()  # bytes of device memory; 0 means no limit


class SharedRegion:
    """An open ``.cache`` file."""

    __slots__ = (
        "_header",
        "_header_bytes",
        "_raw_slots",
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
        self._header_bytes = b""
        self._header = layouts.Header(0, (), ())
        self._raw_slots: list[tuple[int, ...]] = []
        self._view: RegionView | None = None

    @property
    def identity(self) -> tuple[int, int]:
        """``(st_dev, inode)``: the file, under whatever name."""
        return self.st_dev, self.inode

    def read(self) -> RegionView:
        """What the region says now; the very same object as last time if nothing in it changed.

        Three system calls. The ``fstat`` costs under a microsecond and is what tells a deleted file
        (nobody looks there any more), a second name and a changed size; a file cut after it shows by a
        short read. Only the parsed values are kept between reads, not the bytes: a tenant that claims 1024
        slots costs the copy of 2 MiB, not their keeping.

        Raises `RegionRejected`: ``gone``, ``hard_link``, ``truncated``, ``unknown_size``, ``bad_header``,
        ``not_initialized``, ``unknown_version``, ``io_error``. It is to be closed then.
        """
        layout = self.layout
        try:
            info = os.fstat(self.fd)
            if info.st_nlink != 1 or info.st_size != layout.size + 1:
                self._refuse(info)
            self.mtime_ns = info.st_mtime_ns
            tail = os.pread(self.fd, layouts.TAIL_START_BYTES, layout.proc_num)
            proc_num, utilization_switch = layouts.parse_tail_start(tail)
            length = layout.procs + proc_num * layout.slot_size
            data = os.pread(self.fd, length, 0)
        except OSError as error:
            raise translate(error) from None
        if len(data) != length:
            raise RegionRejected(RegionReason.TRUNCATED, "it was truncated while it was read")
        return self._parse(data, proc_num, utilization_switch)

    def _parse(self, data: bytes, proc_num: int, utilization_switch: int) -> RegionView:
        layout, header, view = self.layout, self._header, self._view
        # The words that processes change all the time (owner_pid, the semaphore) lie before device_num.
        header_bytes = data[: layout.owner_pid] + data[layout.device_num : layout.procs]
        if header_bytes != self._header_bytes:
            if layouts.identify(layout.file_bytes, data) is not layout:
                raise RegionRejected(RegionReason.UNKNOWN_VERSION, "it changed its version while it was open")
            header = self._header = layouts.parse_header(layout, data)
            self._header_bytes, view = header_bytes, None
        slots = memoryview(data)[layout.procs :]
        raw_slots = list(layouts.slot_struct(layout, header.device_num).iter_unpack(slots))
        (owner_pid,) = _OWNER_PID.unpack_from(data, layout.owner_pid)
        if view is not None and raw_slots == self._raw_slots:
            if view.owner_pid == owner_pid and view.utilization_switch == utilization_switch:
                return view
            parsed = view.slots
        else:
            self._raw_slots = raw_slots
            parsed = _slots(raw_slots)
        self._view = RegionView(
            device_num=header.device_num,
            uuids=header.uuids,
            sm_limit=header.sm_limit,
            proc_num=proc_num,
            owner_pid=owner_pid,
            utilization_switch=utilization_switch,
            slots=parsed,
            limit=header.limit,
        )
        return self._view

    def word(self, offset: int) -> int | None:
        """The 8-byte word there as it is now; None if it cannot be read."""
        try:
            data = os.pread(self.fd, 8, offset)
        except OSError:
            return None
        return int.from_bytes(data, "little") if len(data) == 8 else None

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


def _slots(raw_slots: list[tuple[int, ...]]) -> tuple[Slot, ...]:
    """Those with the same utilization share the tuple."""
    shared: dict[tuple[int, ...], tuple[int, ...]] = {}
    return tuple(
        [
            Slot(index, raw[0], raw[1], raw[-1], shared.setdefault(sm_util, sm_util))
            for index, raw in enumerate(raw_slots)
            for sm_util in (raw[2:-1],)
        ]
    )


def open_region(dir_fd: int, file_name: str, path: str) -> SharedRegion:
    """Open ``file_name`` in an open directory as a shared region; ``path`` is where that is, for people.

    Raises `RegionRejected`: see `openat.open_plain` and `layout.identify`. What is inside the header is
    looked at by `SharedRegion.read`.
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
