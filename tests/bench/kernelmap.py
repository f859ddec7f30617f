"""The map that a daemon holds, read from outside and held against ``/proc``."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from resolver.errors import ProcessGone
from resolver.linux.procfs import HOST_PIDNS, Procfs
from resolver.pids.bpf_syscall import COUNTERS, LAYOUTS, BpfMap, Kernel, LevelMap

_PIDFD_GETFD = 438
_HASH, _ARRAY, _PER_CPU_ARRAY, _TRACING = "1", "2", 6, 26  # enum bpf_map_type, enum bpf_prog_type
_TICK = 10_000_000  # nanoseconds in a tick of field 22 of /proc/<pid>/stat
_SETTLE = 0.2
_INIT = 1  # some kernels keep the host's first process from BPF iterators; see "What it cannot see" in bpf/README.md


class State(NamedTuple):
    """``counters`` as in ``struct counters``; ``missed`` are events that the kernel did not show the probes."""

    counters: dict[str, int]
    missed: int


def state(daemon: int) -> State:
    """What the programs have counted so far."""
    counters, missed = dict.fromkeys(COUNTERS, 0), 0
    layout = LAYOUTS["counters"]
    for number, fields in _descriptors(daemon):
        if fields.get("prog_type") == str(_TRACING):
            missed += int(fields.get("recursion_misses", 0))
        if fields.get("map_type") == str(_PER_CPU_ARRAY) and fields.get("value_size") == str(layout.size):
            with _borrowed(daemon, number) as fd:
                cpus = int(Path("/sys/devices/system/cpu/possible").read_text().rpartition("-")[2]) + 1
                table = BpfMap(Kernel(), fd, LAYOUTS["u32"], layout.size * cpus)
                table.lookup(0)
                totals = map(sum, zip(*layout.iter_unpack(table.value), strict=True))
                counters = dict(zip(COUNTERS, totals, strict=True))
    return State(counters, missed)


def differences(daemon: int) -> tuple[int, int, int]:
    """Processes in both, processes that the map misses, entries of the map without a process; but for host PID 1.

    What differs is looked at again a moment later: a process may begin or end during the look.
    """
    first = _compare(daemon)
    time.sleep(_SETTLE)
    second = _compare(daemon)
    return second[0], len(first[1] & second[1]), len(first[2] & second[2])


def _compare(daemon: int) -> tuple[int, set[tuple[int, int]], set[tuple[int, int]]]:
    procfs, listed = Procfs(), set()
    for host_pid in procfs.entries().keys() - {_INIT}:
        with contextlib.suppress(ProcessGone):
            if procfs.status(host_pid).state not in "ZX":
                listed.add((host_pid, procfs.start_time(host_pid)))
    mapped = {(host_pid, start_ns // _TICK) for host_pid, start_ns in _mapped(daemon) if host_pid != _INIT}
    return len(listed & mapped), listed - mapped, mapped - listed


def _mapped(daemon: int) -> Iterator[tuple[int, int]]:
    """Host PID and start time in nanoseconds of every process in the map."""
    maps = {
        (fields.get("map_type"), fields.get("value_size")): (number, int(fields.get("max_entries", 0)))
        for number, fields in _descriptors(daemon)
    }
    slots, count = maps[_ARRAY, str(LAYOUTS["slot"].size)]
    overflow, _ = maps[_HASH, str(LAYOUTS["process"].size)]
    with _borrowed(daemon, slots) as first, _borrowed(daemon, overflow) as second:
        for some in LevelMap(Kernel(), first, count, second).entries():
            yield from ((each[3], each[2]) for each in some if each[0] == HOST_PIDNS)


def _descriptors(daemon: int) -> Iterator[tuple[int, dict[str, str]]]:
    """Number and ``fdinfo`` of each descriptor that the daemon has open."""
    for entry in Path(f"/proc/{daemon}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):
            lines = (line.split(":", 1) for line in entry.read_text().splitlines() if ":" in line)
            yield int(entry.name), {name: value.strip() for name, value in lines}


@contextlib.contextmanager
def _borrowed(daemon: int, number: int) -> Iterator[int]:
    """A descriptor of ours for what the daemon has open under that number."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(daemon)
    try:
        fd = libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
        if fd < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd of the daemon's map (root is needed)")
    finally:
        os.close(pidfd)
    try:
        yield fd
    finally:
        os.close(fd)
