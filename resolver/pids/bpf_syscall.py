"""BPF maps through plain ``bpf(2)``: no libbcc, no libbpf, and microseconds for a look-up.

The layouts here are those of ``bpf/pidmap.h``; a test compiles that header and compares. A map belongs to one
thread: its buffers are used again by every call.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from struct import Struct
from struct import error as StructError  # noqa: N812 - the name says what it is
from typing import TYPE_CHECKING

from resolver.errors import CannotKnow

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Field layouts, in the byte order and with the alignment of this machine. Names as in ``bpf/pidmap.h``.
LAYOUTS = {
    "u32": Struct("=I"),
    "level": Struct("=II"),  # pidns, ns_pid
    "process": Struct("=QIHHII"),  # start_time, host_tgid, level, levels, next.pidns, next.ns_pid
    "init": Struct("=QII"),  # start_time, host_tgid, padding
    "tombstone": Struct("=QQII66I"),  # start_time, exit_time, host_tgid, levels, level[33]
    "present": Struct("=QII"),  # start_time, host_tgid, ends
    "counters": Struct("=9Q"),  # see COUNTERS
}
#: The fields of ``struct counters``, in order.
COUNTERS = (
    "full",
    "update_failed",
    "read_failed",
    "levels_truncated",
    "replaced",
    "seeded",
    "levels_mended",
    "overtaken",
    "mended_at_exec",
)

# enum bpf_cmd, include/uapi/linux/bpf.h
_LOOKUP_ELEM, _DELETE_ELEM, _LOOKUP_BATCH, _ITER_CREATE = 1, 3, 24, 33
_SYSCALL_NUMBERS = {"x86_64": 321, "aarch64": 280}
_BATCH = 4096


def syscall_number(machine: str) -> int:
    """The number of ``bpf`` on this kind of machine; `CannotKnow` where it is not known."""
    try:
        return _SYSCALL_NUMBERS[machine]
    except KeyError:
        raise CannotKnow(
            f"the BPF map runs on x86_64 and aarch64, and this is {machine}: use --source netlink or scan"
        ) from None


class Kernel:
    """``bpf(2)`` itself; one for all maps of a process."""

    def __init__(self) -> None:
        self._number = ctypes.c_long(syscall_number(platform.machine()))
        # PyDLL keeps the interpreter's lock: a look-up is over before another thread could be let in.
        self._syscall = ctypes.PyDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long

    def call(self, command: int, attributes: ctypes.Array[ctypes.c_char]) -> int:
        """The result, or the negative error number."""
        result: int = self._syscall(
            self._number, command, ctypes.byref(attributes), ctypes.c_uint(len(attributes))
        )
        return -ctypes.get_errno() if result < 0 else result

    def prepared(
        self, command: int, attributes: ctypes.Array[ctypes.c_char]
    ) -> tuple[object, tuple[ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint]]:
        """The system call and its arguments, made once for a call that is made often."""
        where = ctypes.c_void_p(ctypes.addressof(attributes))
        return self._syscall, (self._number, ctypes.c_int(command), where, ctypes.c_uint(len(attributes)))

    def run_iterator(self, link: int) -> bytes:
        """Everything that the iterator behind this link writes in one run. Raises OSError."""
        attributes = ctypes.create_string_buffer(Struct("=II").pack(link, 0), 8)
        fd = self.call(_ITER_CREATE, attributes)
        if fd < 0:
            raise OSError(-fd, f"{os.strerror(-fd)} (BPF_ITER_CREATE)")
        try:
            chunks = []
            while chunk := os.read(fd, 1 << 16):
                chunks.append(chunk)
            return b"".join(chunks)
        finally:
            os.close(fd)


class BpfMap:
    """One hash or array map behind a descriptor. ``value_bytes`` counts all CPUs for a per-CPU map."""

    def __init__(self, kernel: Kernel, fd: int, key: Struct, value_bytes: int) -> None:
        self.fd = fd
        self._kernel = kernel
        self._key_bytes, self._value_bytes = key.size, value_bytes
        self._key = ctypes.create_string_buffer(key.size)
        #: Where `lookup` leaves what it found.
        self.value = ctypes.create_string_buffer(value_bytes)
        self._pack = key.pack_into
        self._attributes = ctypes.create_string_buffer(
            Struct("=IIQQQ").pack(fd, 0, ctypes.addressof(self._key), ctypes.addressof(self.value), 0), 32
        )
        self._key_only = ctypes.create_string_buffer(
            Struct("=IIQ").pack(fd, 0, ctypes.addressof(self._key)), 16
        )  # the kernel refuses to delete when anything is said about a value
        self._call, self._lookup = kernel.prepared(_LOOKUP_ELEM, self._attributes)

    def lookup(self, *key: int) -> bool:
        """Whether there is such a key; its value is in `value` until the next call. Raises OSError."""
        try:
            self._pack(self._key, 0, *key)
        except StructError:
            return False  # not a number that any process or namespace has
        if self._call(*self._lookup) == 0:  # type: ignore[operator]
            return True
        code = ctypes.get_errno()
        if code == errno.ENOENT:
            return False
        raise OSError(code, f"{os.strerror(code)} (BPF_MAP_LOOKUP_ELEM)")

    def delete(self, *key: int) -> bool:
        """Take a key out; False if it was not there. Raises OSError."""
        self._pack(self._key, 0, *key)
        code = -self._kernel.call(_DELETE_ELEM, self._key_only)
        if code not in (0, errno.ENOENT):
            raise OSError(code, f"{os.strerror(code)} (BPF_MAP_DELETE_ELEM)")
        return code == 0

    def batches(self) -> Iterator[tuple[memoryview, memoryview]]:
        """All keys and values, up to 4096 at a time, each pair of memory good until the next. Raises OSError.

        What is in the map all the while comes exactly once; what comes or goes meanwhile may or may not.
        """
        keys = ctypes.create_string_buffer(_BATCH * self._key_bytes)
        values = ctypes.create_string_buffer(_BATCH * self._value_bytes)
        position = ctypes.create_string_buffer(8)
        where, first, ended = ctypes.addressof(position), 0, False
        while not ended:
            attributes = ctypes.create_string_buffer(
                Struct("=QQQQIIQQ").pack(
                    first, where, ctypes.addressof(keys), ctypes.addressof(values), _BATCH, self.fd, 0, 0
                ),
                56,
            )
            code = -self._kernel.call(_LOOKUP_BATCH, attributes)
            if code not in (0, errno.ENOENT):
                raise OSError(code, f"{os.strerror(code)} (BPF_MAP_LOOKUP_BATCH)")
            first, ended = where, code == errno.ENOENT
            count = int.from_bytes(attributes.raw[32:36], sys.byteorder)
            yield (
                memoryview(keys)[: count * self._key_bytes],
                memoryview(values)[: count * self._value_bytes],
            )
