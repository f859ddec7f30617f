"""The kernel's map, read through the loader's descriptors by plain ``bpf(2)``: no libbpf, microseconds for a look-up.

Verify answers against ``/proc`` before writing or printing them: they may be out of date. A map belongs to one thread:
look-ups share its buffers.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from collections.abc import Iterator
from struct import Struct
from struct import error as StructError  # noqa: N812 - an exception's name
from typing import NamedTuple

from resolver.linux.procfs import HOST_PIDNS
from resolver.pids.bpf_load import BpfUnavailable, Loaded, load

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

#: Nanoseconds in a clock tick as ``/proc`` counts them (USER_HZ is 100 on every machine this runs on).
TICK = 10_000_000
_PROBES = ("on_fork", "on_exec", "on_exit")

_U32, _INIT = LAYOUTS["u32"], LAYOUTS["init"]
#: Map to the layouts of its keys and values.
_MAPS = {
    "processes": (LAYOUTS["level"], LAYOUTS["process"]),
    "namespaces": (_U32, _INIT),
    "counters": (_U32, LAYOUTS["counters"]),
}

Level = tuple[int, int]
_Identity = tuple[int, int]


def sizes(processes: int) -> dict[str, int]:
    """Capacity of the maps, for compiling ``pidmap.c``. Kernel memory: 190 bytes a process and 90 a namespace, at once.

    ``processes`` live on the host and in one PID namespace each.
    """
    return {"LEVELS": processes * 2, "NAMESPACES": max(1, processes // 2)}


class Record(NamedTuple):
    """Process. ``levels`` are ``(pidns, ns_pid)``, the host's first; its start is as CLOCK_BOOTTIME has it."""

    host_pid: int
    start_ns: int
    levels: tuple[Level, ...]


def start(processes: int = 32_768, *, kept_in: str = "") -> KernelMap:
    """Load the program, attach it, seed the map; blocks half a second. Raises `BpfUnavailable`."""
    loaded = load(sizes(processes), kept_in)
    try:
        return KernelMap(loaded)
    except BaseException:
        loaded.close()
        raise


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


class KernelMap:
    """Map of processes that the kernel keeps.

    Look-ups raise OSError if the map can't be read any more. Before Linux 5.19, ``kernel.unprivileged_bpf_disabled``
    makes them need CAP_BPF.
    """

    def __init__(self, loaded: Loaded) -> None:
        self.report, self.loaded = loaded.report, loaded
        #: Number of living processes at the last walk.
        self.living: int = self.report["seeded"]
        self._kernel = Kernel()
        described = {kernel_map["name"]: kernel_map for kernel_map in self.report["maps"]}
        for name, (key, value) in _MAPS.items():
            sizes_there = described[name]["key_size"], described[name]["value_size"]
            if sizes_there != (key.size, value.size):
                raise BpfUnavailable(
                    f"the BPF program's map {name} has keys and values of {sizes_there} bytes, and this program "
                    f"expects {key.size, value.size}: they are of different versions; install resolver again"
                )
        #: Number of processes with two levels that the map has room for.
        self.room: int = described["processes"]["max_entries"] // 2
        self.processes, self.namespaces, self._counters = (
            BpfMap(self._kernel, loaded.descriptors[name], *layouts) for name, layouts in _MAPS.items()
        )
        self._lost_then = 0

    # -- look-ups -----------------------------------------------------------------------------------

    def lookup(self, pidns: int, ns_pid: int) -> Record | None:
        """Find a living process by number, at any level."""
        if pidns == HOST_PIDNS:
            return self.by_host(ns_pid)
        entry = self.processes.lookup(pidns, ns_pid)
        if entry is None:
            return None
        start_ns, host_pid, level, *_ = entry
        record = self.by_host(host_pid)
        if record and record.start_ns == start_ns and record.levels[level : level + 1] == ((pidns, ns_pid),):
            return record
        return None

    def identity(self, pidns: int, ns_pid: int) -> _Identity | None:
        """Its start time and host PID, maybe a mix of two processes; two equal answers are no mix."""
        entry = self.processes.lookup(pidns, ns_pid)
        return (entry[0], entry[1]) if entry else None

    def by_host(self, host_pid: int) -> Record | None:
        """Find a living process; None for a thread."""
        for _ in range(3):  # it may end, and its number be used again, while its levels are followed
            entry = self.processes.lookup(HOST_PIDNS, host_pid)
            if entry is None:
                return None
            start_ns, owner, _, levels, pidns, ns_pid = entry
            if owner != host_pid:
                continue  # the entry was taken for another process while it was copied
            followed = self._outwards(host_pid, start_ns, levels, (pidns, ns_pid))
            if followed:
                return Record(host_pid, start_ns, followed)
        return None

    def _outwards(self, host_pid: int, start_ns: int, levels: int, key: Level) -> tuple[Level, ...] | None:
        """All levels, the host's first; None if one is missing or another process's."""
        outer = []
        for level in range(levels - 1, 0, -1):
            outer.append(key)
            if levels == 2:
                break  # as most have: the host's entry names it
            entry = self.processes.lookup(*key)
            if entry is None or entry[:4] != (start_ns, host_pid, level, levels):
                return None
            key = entry[4], entry[5]
        return ((HOST_PIDNS, host_pid), *reversed(outer))

    def everywhere(self, ns_pid: int) -> Iterator[int]:
        """Yield the host PID, or 0, in each namespace, the host's first."""
        host = self.by_host(ns_pid)
        if host and len(host.levels) == 1:
            yield ns_pid
        for keys, _ in self.namespaces.batches():
            for (pidns,) in _U32.iter_unpack(keys):
                entry = self.processes.lookup(pidns, ns_pid)
                innermost = entry is not None and entry[2] == entry[3] - 1
                yield entry[1] if entry and innermost else 0

    def first_processes(self) -> Iterator[tuple[int, int]]:
        """Read the first processes of all PID namespaces but the host's: host PIDs and start times.

        Takes half a millisecond for 6000; decoding them one by one takes ten times as long.
        """
        read = b"".join(bytes(values) for _, values in self.namespaces.batches())
        return ((host_pid, start_ns) for start_ns, host_pid, _ in _INIT.iter_unpack(read))

    # -- how well it does ---------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        return dict(zip(COUNTERS, self._counters.lookup(0) or (), strict=True))

    def missed_events(self) -> int:
        """Count events that a probe missed because one ran on that CPU (Linux 5.12)."""
        return sum(run_stats(self.loaded.descriptors[name])["recursion_misses"] for name in _PROBES)

    def complete(self) -> bool:
        """Check that every process has found room since the last walk."""
        return self._lost() == self._lost_then

    def _lost(self) -> int:
        now = self.counters()
        return now["full"] + now["update_failed"] + now["read_failed"] + now["levels_truncated"]

    def reconciling(self) -> Iterator[int | None]:
        """Walk over all processes and add missing ones. Yield None between steps, then the number of repairs."""
        lost, seeded, living = self._lost(), self.counters()["seeded"], 0
        for some in self._kernel.run_iterator(self.loaded.descriptors["iterator"]):
            living += some.count(0)
            yield None
        self.living = living
        now = self._lost()
        if now == lost:
            self._lost_then = now
        yield self.counters()["seeded"] - seeded + now - lost

    def close(self) -> None:
        self.loaded.close()


def run_stats(program: int) -> dict[str, int]:
    """``run_cnt``, ``run_time_ns`` (with kernel.bpf_stats_enabled) and ``recursion_misses``."""
    with open(f"/proc/self/fdinfo/{program}", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return {name: int(fields.get(name, 0)) for name in ("run_cnt", "run_time_ns", "recursion_misses")}
