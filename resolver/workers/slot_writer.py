"""The slot writer: the only program that ever maps a tenant's memory.

Runs as a child of the daemon (`resolver.workers.child`; standard library and libatomic only). It is handed open
files and compare-and-swap orders over a socket on descriptor 0, carries them out one page at a time, and
answers. If a tenant truncates the file under it, this process dies of SIGBUS, not the daemon. Once everything is
loaded the kernel refuses it every system call but those that this takes: no program, no process, no socket.

Wire format (SOCK_SEQPACKET, little-endian, one message each way)::

    order   u32 file_bytes   the size the file must have, or nothing is mapped
            u32 count        then count times ORDER
            + SCM_RIGHTS     the region's file, then one process handle per order that names one
    answer  count times RESULT

An order changes one aligned 8-byte word. For ``hostpid`` that word is the slot's ``(pid, hostpid)``, so a slot
that moved cannot be hit. For ``device_util`` the slot's ``(pid, hostpid)`` word is the guard: checked before,
checked again after, and the change is taken back if the slot moved in between.
"""

from __future__ import annotations

import _socket  # without the module around it, which is a tenth of this process
import mmap
import os
import struct
import sys

from resolver.linux.pidfd import handle_alive

TYPE_CHECKING = False  # typing itself would be a tenth of this process
if TYPE_CHECKING:
    from typing import Any, Self

HEAD = struct.Struct("<II")
#: handle index (-1: none), handle is a pidfd, guard offset, guard value, target offset, expected, new
ORDER = struct.Struct("<ibxxxQQQQQ")
#: outcome, the word found (after a success: read back)
RESULT = struct.Struct("<BxxxxxxxQ")

MAX_ORDERS = 128

DONE = 0  # the word was changed and read back
DIFFERENT = 1  # the word, or the guard, is not what was expected: nothing was changed
OWNER_GONE = 2  # the process ended before the change was certain: taken back
MOVED = 3  # the slot moved during a utilization write: taken back
WRONG_SIZE = 4  # the file does not have the layout's size now: not mapped
NOT_WRITABLE = 5  # it cannot be opened, or not be mapped, for writing

_ACQ_REL, _ACQUIRE = 4, 2  # __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE


def main() -> int:
    """Serve orders until the daemon closes the socket."""
    import array

    from resolver.linux import seccomp

    channel = _socket.socket(fileno=os.dup(0))
    room = _socket.CMSG_SPACE((MAX_ORDERS + 1) * array.array("i").itemsize)
    atomics = Atomics()
    seccomp.allow_only(seccomp.OF_THE_WRITER)
    while True:
        message, ancillary, _flags, _address = channel.recvmsg(1 << 16, room)
        received = array.array("i")
        for level, kind, payload in ancillary:
            if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
        if not message:
            return 0
        try:
            channel.send(serve(atomics, message, list(received)))
        finally:
            for fd in received:
                os.close(fd)


def serve(atomics: Atomics, message: bytes, descriptors: list[int]) -> bytes:
    """Carry out the orders of one message; the first descriptor is the region's file."""
    file_bytes, count = HEAD.unpack_from(message)
    try:
        # The daemon reads only; the right to write exists in this process alone, for this message.
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        fd = os.open(f"/proc/self/fd/{descriptors[0]}", flags)
    except OSError:
        return RESULT.pack(NOT_WRITABLE, 0) * int(count)
    try:
        answer = b""
        for index in range(count):
            order = ORDER.unpack_from(message, HEAD.size + index * ORDER.size)
            answer += RESULT.pack(*_try(atomics, fd, file_bytes, descriptors[1:], order))
        return answer
    finally:
        os.close(fd)


def _try(
    atomics: Atomics, fd: int, file_bytes: int, handles: list[int], order: tuple[int, ...]
) -> tuple[int, int]:
    if os.fstat(fd).st_size != file_bytes:
        return WRONG_SIZE, 0
    try:
        return carry_out(atomics, fd, file_bytes, handles, order)
    except ValueError:  # mmap checks the size once more: it was truncated in between
        return WRONG_SIZE, 0
    except OSError:  # a file system without shared mappings
        return NOT_WRITABLE, 0


def carry_out(
    atomics: Atomics, fd: int, file_bytes: int, handles: list[int], order: tuple[int, ...]
) -> tuple[int, int]:
    """One order: its outcome, and the word that was found."""
    handle, is_pidfd, guard_at, guard, target_at, expected, new = order
    guarded = guard_at != target_at
    if guarded and _word(fd, guard_at) != guard:
        return DIFFERENT, 0
    with Cell(atomics, fd, target_at, file_bytes) as cell:
        found = cell.swap(expected, new)
        if found != expected:
            return DIFFERENT, found
        undo = 0
        if handle >= 0 and not handle_alive(handles[handle], is_pidfd=bool(is_pidfd)):
            undo = OWNER_GONE
        elif guarded and _word(fd, guard_at) != guard:
            undo = MOVED
        if undo:
            return undo, cell.swap(new, expected)
        back = _word(fd, target_at)
        return (WRONG_SIZE, 0) if back is None else (DONE, back)


def _word(fd: int, offset: int) -> int | None:
    text = os.pread(fd, 8, offset)
    return int.from_bytes(text, "little") if len(text) == 8 else None


class Atomics:
    """The compare-and-swap of libatomic."""

    def __init__(self) -> None:
        import ctypes

        self.ctypes = ctypes
        try:
            self.compare_exchange = getattr(ctypes.CDLL("libatomic.so.1"), "__atomic_compare_exchange_8")
        except OSError:
            sys.exit(
                "resolver: libatomic.so.1 is missing, so no slot can be written: apt-get install libatomic1"
            )
        pointer, word, order = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
        self.compare_exchange.argtypes = (pointer, pointer, word, order, order)
        self.compare_exchange.restype = ctypes.c_bool


class Cell:
    """One aligned 8-byte word of a file, its page mapped for as long as the ``with`` block runs."""

    def __init__(self, atomics: Atomics, fd: int, offset: int, file_bytes: int) -> None:
        self._atomics = atomics
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        length = min(mmap.ALLOCATIONGRANULARITY, file_bytes - start)  # mmap refuses more than the file has
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        self._page = mmap.mmap(fd, length, mmap.MAP_SHARED, rights, offset=start)
        self._word: Any = atomics.ctypes.c_uint64.from_buffer(self._page, offset - start)

    def swap(self, expected: int, new: int) -> int:
        """Put ``new`` where ``expected`` is; returns what was there, which is ``expected`` on success."""
        ctypes = self._atomics.ctypes
        found = ctypes.c_uint64(expected)
        at = ctypes.addressof(self._word)
        self._atomics.compare_exchange(at, ctypes.addressof(found), new, _ACQ_REL, _ACQUIRE)
        return int(found.value)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._word = None  # a page with a view on it cannot be closed
        self._page.close()
