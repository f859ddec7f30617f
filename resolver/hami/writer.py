"""The slot writer: the only program that ever maps a tenant's memory.

Runs as a child of the daemon (`resolver.child`; standard library and libatomic only). It is handed open
files and compare-and-swap orders over a socket on descriptor 0, carries them out one page at a time, and
answers. If a tenant truncates the file under it, this process dies of SIGBUS, not the daemon.

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

import struct
import sys

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
NOT_WRITABLE = 5  # it cannot be opened for writing

_ACQ_REL, _ACQUIRE = 4, 2  # __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE


def main() -> int:
    """Serve orders until the daemon closes the socket."""
    import array
    import contextlib
    import ctypes
    import mmap
    import os
    import socket

    from resolver.handles import handle_alive

    try:
        swap = ctypes.CDLL("libatomic.so.1").__atomic_compare_exchange_8
    except OSError:
        print("libatomic.so.1 is missing: apt-get install libatomic1", file=sys.stderr)
        return 3
    swap.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_int)
    swap.restype = ctypes.c_bool
    page_bytes = mmap.ALLOCATIONGRANULARITY

    def word(fd: int, offset: int) -> int | None:
        text = os.pread(fd, 8, offset)
        return int.from_bytes(text, "little") if len(text) == 8 else None

    def carry_out(fd: int, handles: list[int], order: tuple[int, ...]) -> tuple[int, int]:
        handle, is_pidfd, guard_at, guard, target_at, expected, new = order
        if guard_at != target_at and word(fd, guard_at) != guard:
            return DIFFERENT, 0
        start = target_at - target_at % page_bytes
        page = mmap.mmap(fd, page_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=start)
        try:
            cell = ctypes.c_uint64.from_buffer(page, target_at - start)
            try:
                at, found = ctypes.addressof(cell), ctypes.c_uint64(expected)
                if not swap(at, ctypes.addressof(found), new, _ACQ_REL, _ACQUIRE):
                    return DIFFERENT, found.value
                undo = 0
                if handle >= 0 and not handle_alive(handles[handle], is_pidfd=bool(is_pidfd)):
                    undo = OWNER_GONE
                elif guard_at != target_at and word(fd, guard_at) != guard:
                    undo = MOVED
                if undo:
                    found = ctypes.c_uint64(new)
                    swap(at, ctypes.addressof(found), expected, _ACQ_REL, _ACQUIRE)
                    return undo, found.value
                back = word(fd, target_at)
                return (DONE, back) if back is not None else (WRONG_SIZE, 0)
            finally:
                del cell  # a page with a view on it cannot be closed
        finally:
            page.close()

    def serve(message: bytes, received: list[int]) -> bytes:
        file_bytes, count = HEAD.unpack_from(message)
        orders = [ORDER.unpack_from(message, HEAD.size + i * ORDER.size) for i in range(count)]
        try:
            # The daemon reads only; the right to write exists in this process alone, for this message.
            fd = os.open(f"/proc/self/fd/{received[0]}", os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            return RESULT.pack(NOT_WRITABLE, 0) * count
        try:
            answer = bytearray()
            for order in orders:
                if os.fstat(fd).st_size != file_bytes:
                    answer += RESULT.pack(WRONG_SIZE, 0)
                else:
                    answer += RESULT.pack(*carry_out(fd, received[1:], order))
            return bytes(answer)
        finally:
            os.close(fd)

    channel = socket.socket(fileno=os.dup(0))
    room = socket.CMSG_SPACE((MAX_ORDERS + 1) * array.array("i").itemsize)
    while True:
        message, ancillary, _flags, _address = channel.recvmsg(1 << 16, room)
        received = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
        if not message:
            return 0
        try:
            channel.send(serve(message, list(received)))
        finally:
            for fd in received:
                with contextlib.suppress(OSError):
                    os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
