"""Slot writer: the only program that maps a tenant's memory.

It carries out compare-and-swap orders (its process: `resolver.workers.writer_child`). If a tenant truncates the file,
SIGBUS kills it. Wire format (SOCK_SEQPACKET, little-endian, one message each way)::

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

A message with `HOLDS` in its count has HOLD after its head. It replaces the words that are held in one file: they stay
mapped, and are set to ``new`` again after each change, under the same guard. Descriptors: the file, the `note`,
handles. The answer is a REPORT for each word held until then.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys

from resolver.linux.pidfd import handle_alive
from resolver.workers.child import LACKING

TYPE_CHECKING = False  # typing itself would be a tenth of this process
if TYPE_CHECKING:
    from typing import Any

HEAD = struct.Struct("<II")
#: handle index (-1: none), handle is a pidfd, guard offset, guard value, target offset, expected, new
ORDER = struct.Struct("<ibxxxQQQQQ")
#: offset of the first slot, bytes of a slot, offsets of ``owner_pid`` and ``proc_num``
SLOTS = struct.Struct("<IIII")
HOLDS = 1 << 31
#: the file's key, 0 is none; corrections allowed in a second
HOLD = struct.Struct("<QIxxxx")
#: outcome, corrections, another program's last value
REPORT = struct.Struct("<BxxxIQ")
#: outcome, the word found (after a success: read back)
RESULT = struct.Struct("<BxxxxxxxQ")

MAX_ORDERS = 128
NEAR = 3  # points of utilization that count as equal
#: A utilization in per cent that no other program writes, because no device reaches it.
MARK = 101

DONE = 0  # the word was changed and read back
DIFFERENT = 1  # the word or its guard differs from the expected one: nothing was changed
OWNER_GONE = 2  # the process ended before the change was certain: taken back
MOVED = 3  # the slot moved during a utilization write: taken back
WRONG_SIZE = 4  # the file does not have the layout's size now: not mapped
NOT_WRITABLE = 5  # it cannot be opened, or not be mapped, for writing; the word is the errno
NO_MEANS = 6  # the kernel refused this process a descriptor, or memory; the word is the errno
TOO_OFTEN = 7  # a held word changed more often than watchers change it
_ACQ_REL, _ACQUIRE = 4, 2  # __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE


def differs(present: int, value: int) -> bool:
    """Check if a utilization differs from NVML's, in per cent; only 0 equals 0."""
    return abs(present - value) > NEAR or (present == 0) != (value == 0)


class Words:
    """A file's words, mapped for writing. Raises OSError, and ValueError if it has another size."""

    _exchange: Any
    _load: Any

    @classmethod
    def load_functions(cls) -> None:
        try:
            library = ctypes.CDLL("libatomic.so.1")
        except OSError:
            sys.exit(
                "resolver: libatomic.so.1 is missing, so no slot can be written: apt-get install libatomic1"
            )
        pointer, word, order = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
        cls._exchange, cls._load = library["__atomic_compare_exchange_8"], library["__atomic_load_8"]
        cls._exchange.argtypes = (pointer, pointer, word, order, order)
        cls._load.argtypes, cls._load.restype = (pointer, order), word

    def __init__(self, descriptor: int, file_bytes: int) -> None:
        # Opened again, because the daemon's descriptor is read-only: this process alone may write.
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        self._fd, self._bytes = os.open(f"/proc/self/fd/{descriptor}", flags), file_bytes
        try:
            if not self.whole():
                raise ValueError("it has another size")
            self._file = mmap.mmap(self._fd, file_bytes)
        except BaseException:
            os.close(self._fd)
            raise
        self.view = memoryview(self._file)[: file_bytes // 8 * 8].cast("Q")
        self._first: Any = ctypes.c_char.from_buffer(self._file)
        self._start = ctypes.addressof(self._first)
        self._previous = ctypes.c_uint64()
        self._at_previous = ctypes.byref(self._previous)

    def whole(self) -> bool:
        """Check that no process changed the file's size."""
        return os.lseek(self._fd, 0, os.SEEK_END) == self._bytes

    def load(self, offset: int) -> int:
        return int(self._load(self._start + offset, _ACQUIRE))

    def stand(self, guard_at: int, guard: int, slots: tuple[int, ...] | None) -> bool:
        """Check the guard, and that no process holds the lock; a move that ends in between shows in the guard."""
        free = slots is None or (self.load(slots[2]) == 0 and self.in_use(guard_at, slots))
        return free and self.load(guard_at) == guard

    def in_use(self, guard_at: int, slots: tuple[int, ...]) -> bool:
        """Check that a slot's guard is below ``proc_num``: a move leaves the guard, too, in its copy."""
        first, size, _, proc_num = slots
        return guard_at >= proc_num or (guard_at - first) // size < self.load(proc_num) & 0xFFFFFFFF

    def swap(self, offset: int, expected: int, new: int) -> int:
        """Compare and swap; returns the previous value."""
        self._previous.value = expected
        self._exchange(self._start + offset, self._at_previous, new, _ACQ_REL, _ACQUIRE)
        return self._previous.value

    def close(self) -> None:
        self.view.release()
        self._first = None  # a mapping with a view on it can't be closed
        self._file.close()
        os.close(self._fd)


def serve(message: bytes, descriptors: list[int]) -> bytes:
    """Carry out orders in the first descriptor's file."""
    file_bytes, count = HEAD.unpack_from(message)
    end = HEAD.size + count * ORDER.size
    slots = SLOTS.unpack_from(message, end) if len(message) >= end + SLOTS.size else None
    try:
        words = Words(descriptors[0], file_bytes)
    except ValueError:
        return RESULT.pack(WRONG_SIZE, 0) * int(count)
    except OSError as error:  # as on a file system without shared mappings
        outcome = NO_MEANS if error.errno in LACKING else NOT_WRITABLE
        return RESULT.pack(outcome, error.errno or 0) * int(count)
    try:
        answer = b""
        for index in range(count):
            order = ORDER.unpack_from(message, HEAD.size + index * ORDER.size)
            cut = index > 0 and not words.whole()  # the size was just checked before the first one
            result = (WRONG_SIZE, 0) if cut else carry_out(words, descriptors[1:], order, slots)
            answer += RESULT.pack(*result)
        return answer
    finally:
        words.close()


def carry_out(
    words: Words, handles: list[int], order: tuple[int, ...], slots: tuple[int, ...] | None = None
) -> tuple[int, int]:
    """Carry out one order: its outcome, and the word found."""
    handle, is_pidfd, guard_at, guard, target, expected, new = order
    guarded = guard_at != target

    def gone() -> bool:
        return handle >= 0 and not handle_alive(handles[handle], is_pidfd=bool(is_pidfd))

    if guarded and not words.stand(guard_at, guard, slots):
        return DIFFERENT, 0
    if gone():  # else a successor with its PID would see a word that is then undone
        return OWNER_GONE, 0
    first = MARK if guarded and not new else new
    previous = words.swap(target, expected, first)
    if previous != expected:
        return DIFFERENT, previous
    outcome = OWNER_GONE if gone() else DONE
    if guarded and not outcome and not words.stand(guard_at, guard, slots):
        outcome = MOVED
    if outcome:
        previous = words.swap(target, first, expected)
    elif first != new and words.swap(target, first, new) != first:
        outcome, previous = MOVED, 0  # filled in meanwhile by another writer
    else:
        return DONE, words.load(target)
    if new == 0 and slots:
        _take_back_copies(words, slots, target, expected)
    return outcome, previous


def _take_back_copies(words: Words, slots: tuple[int, ...], target: int, expected: int) -> None:
    """Undo `MARK` where a move copied it."""
    first, size, *_ = slots
    for at in range(first + (target - first) % size, len(words.view) * 8 - size, size):
        if words.view[at // 8] == MARK:
            words.swap(at, MARK, expected)
