"""Slot writer: the only program that maps a tenant's memory.

It carries out compare-and-swap orders, one page at a time. If a tenant truncates the file, SIGBUS kills this process. A
seccomp filter allows nothing more. Wire format (SOCK_SEQPACKET, little-endian, one message each way)::

    order   u32 file_bytes   the file's size, or nothing is mapped
            u32 count        then count times ORDER, then SLOTS if the file's processes move slots under a lock
            + descriptors    the file, then a process handle per order that names one: inherited for the first
                             message, by SCM_RIGHTS later
    answer  count times RESULT

An order changes one aligned 8-byte word. For ``hostpid`` that is the slot's ``(pid, hostpid)``: a moved slot isn't hit.
For ``device_util`` a guard, ``(pid, hostpid)`` or ``proc_num``, is checked before and after, and the write undone if it
changed. A move copies words in any order, so ``owner_pid`` must be 0 at both checks: no process holds the lock.

Undoing must not overwrite a later write, so 0 is written by way of `MARK`: while that stands, no process wrote. A move
may copy `MARK`, so after an undo the other slots are searched for it.
"""

from __future__ import annotations

import _socket  # without the module around it, which is a tenth of this process
import ctypes
import mmap
import os
import struct
import sys

from resolver.linux.pidfd import handle_alive
from resolver.workers.child import LACKING, inherited

TYPE_CHECKING = False  # typing itself would be a tenth of this process
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Self

    CompareExchange = Callable[..., bool]

HEAD = struct.Struct("<II")
#: handle index (-1: none), handle is a pidfd, guard offset, guard value, target offset, expected, new
ORDER = struct.Struct("<ibxxxQQQQQ")
#: offset of the first slot, bytes of a slot, offset of ``owner_pid``
SLOTS = struct.Struct("<III")
#: outcome, the word found (after a success: read back)
RESULT = struct.Struct("<BxxxxxxxQ")

MAX_ORDERS = 128
#: A utilization in per cent that no slot says by itself: more than a device can do.
MARK = 101

DONE = 0  # the word was changed and read back
DIFFERENT = 1  # the word, or the guard, is not what was expected: nothing was changed
OWNER_GONE = 2  # the process ended before the change was certain: taken back
MOVED = 3  # the slot moved during a utilization write: taken back
WRONG_SIZE = 4  # the file does not have the layout's size now: not mapped
NOT_WRITABLE = 5  # it cannot be opened, or not be mapped, for writing; the word is the errno
NO_MEANS = 6  # the kernel refused this process a descriptor, or memory; the word is the errno

_ACQ_REL, _ACQUIRE = 4, 2  # __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE


def main() -> int:
    """Serve orders until the socket closes."""
    import array

    from resolver.linux import seccomp

    channel = _socket.socket(fileno=os.dup(0))
    room = _socket.CMSG_SPACE((MAX_ORDERS + 1) * array.array("i").itemsize)
    compare_exchange = atomic()
    received = inherited()
    seccomp.allow_only(seccomp.OF_THE_WRITER)
    while True:
        message, ancillary, _flags, _address = channel.recvmsg(1 << 16, room)
        for level, kind, payload in ancillary:
            if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
                received += array.array("i", payload[: len(payload) // 4 * 4])
        if not message:
            return 0
        try:
            channel.send(serve(compare_exchange, message, received))
        finally:
            for fd in set(received):  # inherited ones may be the same for several orders
                os.close(fd)
            received.clear()


def serve(compare_exchange: CompareExchange, message: bytes, descriptors: list[int]) -> bytes:
    """Carry out orders in the first descriptor's file."""
    file_bytes, count = HEAD.unpack_from(message)
    try:
        # The daemon reads only; the right to write exists in this process alone, for this message.
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        fd = os.open(f"/proc/self/fd/{descriptors[0]}", flags)
    except OSError as error:
        return RESULT.pack(*_refused(error)) * int(count)
    try:
        end = HEAD.size + count * ORDER.size
        slots = SLOTS.unpack_from(message, end) if len(message) >= end + SLOTS.size else None
        answer = b""
        for index in range(count):
            order = ORDER.unpack_from(message, HEAD.size + index * ORDER.size)
            lock_at = slots[2] if slots else None
            try:
                result = WRONG_SIZE, 0
                if os.fstat(fd).st_size == file_bytes:
                    result = carry_out(compare_exchange, fd, file_bytes, descriptors[1:], order, lock_at)
            except ValueError:  # mmap checks the size once more: it was truncated in between
                result = WRONG_SIZE, 0
            except OSError as error:  # a file system without shared mappings
                result = _refused(error)
            if result[0] in (MOVED, OWNER_GONE) and order[-1] == 0 and slots:
                _take_back_copies(compare_exchange, fd, file_bytes, slots, order)
            answer += RESULT.pack(*result)
        return answer
    finally:
        os.close(fd)


def _take_back_copies(
    compare_exchange: CompareExchange,
    fd: int,
    file_bytes: int,
    slots: tuple[int, ...],
    order: tuple[int, ...],
) -> None:
    """Undo `MARK` where a move copied it."""
    first, size, _ = slots
    target, expected = order[4], order[5]
    try:
        for at in range(first + (target - first) % size, file_bytes - size, size):
            if _word(fd, at) == MARK:
                with Cell(compare_exchange, fd, at, file_bytes) as cell:
                    cell.swap(MARK, expected)
    except (OSError, ValueError):  # truncated: the daemon compares the values with NVML's once more
        return


def _refused(error: OSError) -> tuple[int, int]:
    return (NO_MEANS if error.errno in LACKING else NOT_WRITABLE), error.errno or 0


def carry_out(
    compare_exchange: CompareExchange,
    fd: int,
    file_bytes: int,
    handles: list[int],
    order: tuple[int, ...],
    lock_at: int | None = None,
) -> tuple[int, int]:
    """Carry out one order: its outcome, and the word found. ``lock_at``: offset of ``owner_pid``."""
    handle, is_pidfd, guard_at, guard, target_at, expected, new = order
    guarded = guard_at != target_at

    def holds() -> bool:
        # The lock first: a move that ends between the two reads shows in the guard.
        return (lock_at is None or _word(fd, lock_at) == 0) and _word(fd, guard_at) == guard

    if guarded and not holds():
        return DIFFERENT, 0
    # Checked before as well: a number that is taken back would be seen for a moment.
    if handle >= 0 and not handle_alive(handles[handle], is_pidfd=bool(is_pidfd)):
        return OWNER_GONE, 0
    first = MARK if guarded and not new else new
    with Cell(compare_exchange, fd, target_at, file_bytes) as cell:
        found = cell.swap(expected, first)
        if found != expected:
            return DIFFERENT, found
        undo = 0
        if handle >= 0 and not handle_alive(handles[handle], is_pidfd=bool(is_pidfd)):
            undo = OWNER_GONE
        elif guarded and not holds():
            undo = MOVED
        if undo:
            return undo, cell.swap(first, expected)
        if first != new and cell.swap(first, new) != first:
            return MOVED, 0  # filled in meanwhile: what stands there is not ours
        back = _word(fd, target_at)
        return (WRONG_SIZE, 0) if back is None else (DONE, back)


def _word(fd: int, offset: int) -> int | None:
    text = os.pread(fd, 8, offset)
    return int.from_bytes(text, "little") if len(text) == 8 else None


def atomic() -> CompareExchange:
    """The compare-and-swap of libatomic."""
    try:
        function = ctypes.CDLL("libatomic.so.1")["__atomic_compare_exchange_8"]
    except OSError:
        sys.exit("resolver: libatomic.so.1 is missing, so no slot can be written: apt-get install libatomic1")
    pointer, word, order = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
    function.argtypes, function.restype = (pointer, pointer, word, order, order), ctypes.c_bool
    return function


class Cell:
    """Aligned 8-byte word of a file, mapped within ``with``."""

    def __init__(self, compare_exchange: CompareExchange, fd: int, offset: int, file_bytes: int) -> None:
        self._compare_exchange = compare_exchange
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        length = min(mmap.ALLOCATIONGRANULARITY, file_bytes - start)  # mmap refuses more than the file has
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        self._page = mmap.mmap(fd, length, mmap.MAP_SHARED, rights, offset=start)
        self._word: Any = ctypes.c_uint64.from_buffer(self._page, offset - start)

    def swap(self, expected: int, new: int) -> int:
        """Compare and swap; returns the previous value."""
        found = ctypes.c_uint64(expected)
        at = ctypes.addressof(self._word)
        self._compare_exchange(at, ctypes.addressof(found), new, _ACQ_REL, _ACQUIRE)
        return int(found.value)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._word = None  # a page with a view on it cannot be closed
        self._page.close()
