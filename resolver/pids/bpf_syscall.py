"""BPF maps through plain ``bpf(2)``: no libbpf, and microseconds for a look-up.

A map belongs to one thread: calls share its buffers.
"""

import ctypes
import errno
import os
import platform
import sys
from collections.abc import Iterator
from struct import Struct
from struct import error as StructError  # noqa: N812 - an exception's name

#: Field layouts, in the byte order and with the alignment of this machine. Names as in ``bpf/pidmap.h``.
LAYOUTS = {
    "u32": Struct("=I"),
    "level": Struct("=II"),  # pidns, ns_pid
    "process": Struct("=QIHHII"),  # start_time, host_tgid, level, levels, next.pidns, next.ns_pid
    "init": Struct("=QII"),  # start_time, host_tgid, padding
    "counters": Struct("=6Q"),  # see COUNTERS
}
#: The fields of ``struct counters``, in order.
COUNTERS = (
    "full",
    "update_failed",
    "read_failed",
    "levels_truncated",
    "seeded",
    "mended_at_exec",
)

# enum bpf_cmd, include/uapi/linux/bpf.h
_LOOKUP_ELEM, _LOOKUP_BATCH, _ITER_CREATE = 1, 24, 33
_SYSCALL_NUMBERS = {"x86_64": 321, "aarch64": 280}
_BATCH = 4096
SOME_PROCESSES = 2048  # in one step: some milliseconds


class Kernel:
    """``bpf(2)``; one for all maps of a process."""

    def __init__(self) -> None:
        self._number = ctypes.c_long(_SYSCALL_NUMBERS[platform.machine()])
        # PyDLL keeps the interpreter's lock: a look-up is over before another thread could be let in.
        self._syscall = ctypes.PyDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long

    def call(self, command: int, attributes: ctypes.Array[ctypes.c_char]) -> int:
        """Return the result, or negative error number."""
        result: int = self._syscall(
            self._number, command, ctypes.byref(attributes), ctypes.c_uint(len(attributes))
        )
        return -ctypes.get_errno() if result < 0 else result

    def run_iterator(self, link: int) -> Iterator[bytes]:
        """Yield the output of a link's iterator, a byte for each process. Raises OSError."""
        attributes = ctypes.create_string_buffer(Struct("=II").pack(link, 0), 8)
        fd = self.call(_ITER_CREATE, attributes)
        if fd < 0:
            raise OSError(-fd, f"{os.strerror(-fd)} (BPF_ITER_CREATE)")
        with open(fd, "rb", buffering=0) as written:
            while (some := written.read(SOME_PROCESSES)) != b"":
                yield some or b""  # None after a million threads in a row: it goes on


class BpfMap:
    """Hash or array map behind a descriptor; keys and values are tuples of their fields."""

    def __init__(self, kernel: Kernel, fd: int, key: Struct, value: Struct) -> None:
        self.fd = fd
        self._kernel = kernel
        self._key_bytes, self._value_bytes = key.size, value.size
        self._key = ctypes.create_string_buffer(key.size)
        self._value = ctypes.create_string_buffer(value.size)
        self._pack, self._unpack = key.pack_into, value.unpack
        where = ctypes.addressof(self._key)
        self._attributes = ctypes.create_string_buffer(
            Struct("=IIQQQ").pack(fd, 0, where, ctypes.addressof(self._value), 0), 32
        )

    def lookup(self, *key: int) -> tuple[int, ...] | None:
        """Return the value of a key; None without one. Raises OSError."""
        try:
            self._pack(self._key, 0, *key)
        except StructError:
            return None  # not a number that any process or namespace has
        return self._unpack(self._value) if self._call(_LOOKUP_ELEM, self._attributes) else None

    def _call(self, command: int, attributes: ctypes.Array[ctypes.c_char]) -> bool:
        code = -self._kernel.call(command, attributes)
        if code not in (0, errno.ENOENT):
            raise OSError(code, f"{os.strerror(code)} (bpf command {command})")
        return code == 0

    def batches(self) -> Iterator[tuple[memoryview, memoryview]]:
        """Yield keys and values, up to 4096 at a time, in memory valid until the next. Raises OSError.

        Entries in the map all the while come exactly once.
        """
        keys = ctypes.create_string_buffer(_BATCH * self._key_bytes)
        values = ctypes.create_string_buffer(_BATCH * self._value_bytes)
        position = ctypes.create_string_buffer(8)
        where, first, more = ctypes.addressof(position), 0, True
        while more:
            attributes = ctypes.create_string_buffer(
                Struct("=QQQQIIQQ").pack(
                    first, where, ctypes.addressof(keys), ctypes.addressof(values), _BATCH, self.fd, 0, 0
                ),
                56,
            )
            first, more = where, self._call(_LOOKUP_BATCH, attributes)
            count = int.from_bytes(attributes.raw[32:36], sys.byteorder)
            yield (
                memoryview(keys)[: count * self._key_bytes],
                memoryview(values)[: count * self._value_bytes],
            )
