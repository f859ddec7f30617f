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

A message with `HOLDS` in its count has HOLD after its head. It replaces the words that are held in one file: their page
stays mapped, and each is compared every millisecond and set to ``new`` again, under the same guard. Descriptors: the
file, the `note`, handles. The answer is a REPORT for each word held until then.
"""

from __future__ import annotations

import _socket  # without the module around it, which is a tenth of this process
import ctypes
import mmap
import os
import struct
import sys
import time

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
HOLDS = 1 << 31
#: the file's key, 0 is none; corrections allowed in a second
HOLD = struct.Struct("<QIxxxx")
#: outcome, corrections, another program's last value
REPORT = struct.Struct("<BxxxIQ")
#: outcome, the word found (after a success: read back)
RESULT = struct.Struct("<BxxxxxxxQ")

MAX_ORDERS = 128
NEAR = 3  # points of utilization that count as equal
#: A utilization in per cent that no slot says by itself: more than a device can do.
MARK = 101

DONE = 0  # the word was changed and read back
DIFFERENT = 1  # the word or its guard differs from the expected one: nothing was changed
OWNER_GONE = 2  # the process ended before the change was certain: taken back
MOVED = 3  # the slot moved during a utilization write: taken back
WRONG_SIZE = 4  # the file does not have the layout's size now: not mapped
NOT_WRITABLE = 5  # it cannot be opened, or not be mapped, for writing; the word is the errno
NO_MEANS = 6  # the kernel refused this process a descriptor, or memory; the word is the errno
TOO_OFTEN = 7  # a held word changed more often than watchers change it
#: A hold ends with these; others are tried again.
_FINAL = OWNER_GONE, WRONG_SIZE, NOT_WRITABLE, NO_MEANS, TOO_OFTEN

_ACQ_REL, _ACQUIRE = 4, 2  # __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE


def main() -> int:
    """Serve orders until the socket closes."""
    import array
    import select

    from resolver.linux import seccomp

    channel = _socket.socket(fileno=os.dup(0))
    room = _socket.CMSG_SPACE((MAX_ORDERS + 1) * array.array("i").itemsize)
    compare_exchange = atomic()
    received = inherited()
    holds, poll = HeldWords(compare_exchange), select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    seccomp.allow_only(seccomp.OF_THE_WRITER)
    while True:
        arrived = False
        while holds.files and not arrived:
            arrived = bool(poll.poll(1))
            holds.tick()
        message, ancillary, _flags, _address = channel.recvmsg(1 << 16, room)
        for level, kind, payload in ancillary:
            if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
                received += array.array("i", payload[: len(payload) // 4 * 4])
        if not message:
            return 0
        try:
            hold = HEAD.unpack_from(message)[1] & HOLDS
            channel.send(
                holds.replace(message, received) if hold else serve(compare_exchange, message, received)
            )
        finally:
            for fd in set(received):  # inherited ones may be the same for several orders
                os.close(fd)
            received.clear()


def differs(present: int, value: int) -> bool:
    """Check if a utilization differs from NVML's, in per cent; only 0 equals 0."""
    return abs(present - value) > NEAR or (present == 0) != (value == 0)


def _writable(descriptor: int) -> int:
    """Open a file again: the daemon reads only, and the right to write exists in this process alone."""
    flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    return os.open(f"/proc/self/fd/{descriptor}", flags)


def serve(compare_exchange: CompareExchange, message: bytes, descriptors: list[int]) -> bytes:
    """Carry out orders in the first descriptor's file."""
    file_bytes, count = HEAD.unpack_from(message)
    try:
        fd = _writable(descriptors[0])
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


class _HeldWord:
    """A held word, and its report."""

    __slots__ = ("at", "corrections", "foreign", "guard", "guard_at", "order", "outcome", "standing", "value")

    def __init__(self, order: tuple[int, ...]) -> None:
        self.order, self.at, self.guard_at, self.guard = order, order[4] // 8, order[2] // 8, order[3]
        self.value = self.standing = order[6]
        self.outcome, self.corrections, self.foreign = DONE, 0, order[6]


class _HeldFile:
    """Held words of one file, mapped. Raises OSError, and ValueError for a file that is too short."""

    def __init__(self, message: bytes, descriptors: list[int]) -> None:
        self.file_bytes, count = HEAD.unpack_from(message)
        self.key, self.allowed = HOLD.unpack_from(message, HEAD.size)
        at, count = HEAD.size + HOLD.size, count & ~HOLDS
        self.holds = [_HeldWord(ORDER.unpack_from(message, at + n * ORDER.size)) for n in range(count)]
        self.slots = SLOTS.unpack_from(message, at + count * ORDER.size)
        self.fd, self.handles = _writable(descriptors[0]), list[int]()
        try:
            self.handles += [os.dup(handle) for handle in descriptors[2:]]
            self.page = mmap.mmap(self.fd, self.file_bytes)
        except BaseException:
            self.close()
            raise
        self.words = memoryview(self.page)[: self.file_bytes // 8 * 8].cast("Q")
        self.second, self.changes = 0, 0

    def close(self) -> None:
        """Release everything."""
        for fd in (self.fd, *self.handles):
            os.close(fd)


class HeldWords:
    """Held words, by file. ``note`` names the file that is touched, for the daemon if SIGBUS ends this process."""

    def __init__(self, compare_exchange: CompareExchange) -> None:
        self.files: dict[int, _HeldFile] = {}
        self._compare_exchange = compare_exchange
        self._note: memoryview | None = None
        self._looks: list[tuple[int, memoryview, int, _HeldWord, _HeldFile]] | None = None

    def replace(self, message: bytes, descriptors: list[int]) -> bytes:
        """Hold these words of a file and no others; returns reports of those before."""
        key, _ = HOLD.unpack_from(message, HEAD.size)
        before, self._looks = self.files.pop(key, None), None
        answer = b""
        if before is not None:
            answer = b"".join(
                REPORT.pack(hold.outcome, hold.corrections, hold.foreign) for hold in before.holds
            )
            before.close()
        if HEAD.unpack_from(message)[1] & ~HOLDS:
            if self._note is None:
                self._note = memoryview(mmap.mmap(descriptors[1], mmap.PAGESIZE)).cast("Q")
            try:
                self.files[key] = _HeldFile(message, descriptors)
            except (OSError, ValueError):
                return answer or b"\0"  # the next order in this file has the reason
        return answer or b"\0"

    def tick(self) -> None:
        """Compare all held words once, and correct those that differ."""
        note = self._note
        if note is None:
            return
        if self._looks is None:
            self._looks = [
                (held.key, held.words, hold.at, hold, held)
                for held in self.files.values()
                for hold in held.holds
                if hold.outcome == DONE
            ]
        for key, words, at, hold, held in self._looks:
            note[0] = key
            if words[at] != hold.standing:
                self._correct(held, hold)
        note[0] = 0

    def _correct(self, held: _HeldFile, hold: _HeldWord) -> None:
        words = held.words
        present = words[hold.at]
        if words[held.slots[2] // 8]:
            return  # a process that holds the lock may be moving slots
        hold.foreign = present
        if not differs(present, hold.value):
            hold.standing = present
            return
        second = int(time.monotonic())
        if second != held.second:
            held.second, held.changes = second, 0
        held.changes += 1
        outcome = TOO_OFTEN if held.changes > held.allowed else self._swap(held, hold, present)
        if outcome == DONE:
            hold.corrections += 1
            hold.standing = hold.value
        elif outcome in _FINAL or words[hold.guard_at] != hold.guard:
            hold.outcome = outcome
            self._looks = None

    def _swap(self, held: _HeldFile, hold: _HeldWord, present: int) -> int:
        order = (*hold.order[:5], present, hold.value)
        try:
            if os.fstat(held.fd).st_size != held.file_bytes:
                return WRONG_SIZE
            outcome, _ = carry_out(
                self._compare_exchange,
                held.fd,
                held.file_bytes,
                held.handles,
                order,
                held.slots[2],
                held.page,
            )
        except ValueError:
            return WRONG_SIZE
        except OSError as error:
            return _refused(error)[0]
        if outcome in (MOVED, OWNER_GONE) and hold.value == 0:
            _take_back_copies(self._compare_exchange, held.fd, held.file_bytes, held.slots, order)
        return outcome


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
    mapped: mmap.mmap | None = None,
) -> tuple[int, int]:
    """Carry out one order: its outcome, and the word found.

    ``lock_at``: offset of ``owner_pid``. ``mapped``: the whole file, if it is.
    """
    handle, is_pidfd, guard_at, guard, target_at, expected, new = order
    guarded = guard_at != target_at

    def holds() -> bool:
        # The lock first: a move that ends between the two reads shows in the guard.
        return (lock_at is None or _word(fd, lock_at) == 0) and _word(fd, guard_at) == guard

    if guarded and not holds():
        return DIFFERENT, 0
    # Checked before, too: a number taken back would be visible for a moment.
    if handle >= 0 and not handle_alive(handles[handle], is_pidfd=bool(is_pidfd)):
        return OWNER_GONE, 0
    first = MARK if guarded and not new else new
    with Cell(compare_exchange, fd, target_at, file_bytes, mapped) as cell:
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
            return MOVED, 0  # filled in meanwhile by another writer
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

    def __init__(
        self,
        compare_exchange: CompareExchange,
        fd: int,
        offset: int,
        file_bytes: int,
        mapped: mmap.mmap | None = None,
    ) -> None:
        self._compare_exchange = compare_exchange
        self._page: mmap.mmap | None = None
        if mapped is not None:
            self._word: Any = ctypes.c_uint64.from_buffer(mapped, offset)
            return
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        length = min(mmap.ALLOCATIONGRANULARITY, file_bytes - start)  # mmap refuses more than the file has
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        self._page = mmap.mmap(fd, length, mmap.MAP_SHARED, rights, offset=start)
        self._word = ctypes.c_uint64.from_buffer(self._page, offset - start)

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
        if self._page is not None:
            self._page.close()
