"""Starts the odd processes of ``lives.c``, and reads every process's numbers from ``/proc``."""

import contextlib
import ctypes
import errno
import os
import struct
import subprocess
from pathlib import Path
from typing import NamedTuple, Self

from resolver.base.errors import AccessDenied, ProcessGone
from resolver.linux.procfs import HOST_PIDNS, Procfs, parse_start_time
from resolver.pids.bpf_map import LAYOUTS, TICK, BpfMap, Kernel, KernelMap, Record

SOURCE = Path(__file__).with_name("lives.c")
FLAGS = ("-O2", "-g", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread")
#: In the flags of /proc/<pid>/stat, include/linux/sched.h.
PF_EXITING = 0x4

Identity = tuple[int, int]


def compile_lives(directory: Path) -> Path:
    """Compile the program, and return its path; the compiler's complaint goes to standard error."""
    program = directory / "lives"
    subprocess.run(["cc", *FLAGS, "-o", program, SOURCE], check=True)
    return program


class Life(contextlib.AbstractContextManager["Life"]):
    """One run of the program. ``host_pid`` belongs to the started process, which is not the one that prints "ready"."""

    def __init__(self, program: Path, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )
        assert self._process.stdout is not None
        self.stdout = self._process.stdout
        self.host_pid = self._process.pid

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.host_pid, 9)
        self.end()

    def line(self) -> str:
        line = self.stdout.readline().decode()
        assert line, f"{self._process.args!r} ended and said nothing"
        return line.strip()

    def ready(self) -> Self:
        assert self.line() == "ready"
        return self

    def nudge(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"x")
        self._process.stdin.flush()

    def running(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait(60)


def child_of(host_pid: int) -> int:
    (child,) = children_of(host_pid)
    return child


def children_of(host_pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{host_pid}/task/{host_pid}/children").read_text().split()]


def reconcile(pidmap: KernelMap) -> int:
    """Compare a map with all processes at once; return the number of missing ones."""
    return next(missing for missing in pidmap.reconciling() if missing is not None)


def drift(pidmap: KernelMap, failed: int) -> int:
    """Return the number of processes that a walk misses in the map; 0 if ``update_failed`` exceeds ``failed``."""
    missing = reconcile(pidmap)
    return missing if pidmap.counters()["update_failed"] == failed else 0


def everybody(pidmap: KernelMap) -> dict[int, Record]:
    """``{host_pid: record}`` of all living processes. Those that start or end meanwhile may be missing."""
    entries = [each for keys, _ in pidmap.processes.batches() for each in LAYOUTS["level"].iter_unpack(keys)]
    numbers = (number for pidns, number in entries if pidns == HOST_PIDNS)
    return {record.host_pid: record for record in map(pidmap.by_host, numbers) if record}


def put(table: BpfMap, key: bytes, value: bytes) -> None:
    """BPF_MAP_UPDATE_ELEM, or without a value BPF_MAP_DELETE_ELEM, of an entry that may be gone: only tests do it."""
    keys, values = ctypes.create_string_buffer(key, len(key)), ctypes.create_string_buffer(value, len(value))
    where = ctypes.addressof(keys), ctypes.addressof(values) if value else 0
    attributes = ctypes.create_string_buffer(struct.pack("=IIQQQ", table.fd, 0, *where, 0), 32)
    code = Kernel().call(2 if value else 3, attributes)
    assert code == 0 or (code == -errno.ENOENT and not value), os.strerror(-code)


def take_out(pidmap: KernelMap, host_pid: int) -> None:
    put(pidmap.processes, LAYOUTS["level"].pack(HOST_PIDNS, host_pid), b"")
    assert pidmap.by_host(host_pid) is None


def firsts(pidmap: KernelMap) -> dict[int, tuple[int, int]]:
    """``{pidns: host PID and start of its first process}`` of every PID namespace but the host's."""
    batches = pidmap.namespaces.batches()
    return {
        pidns: (host_pid, start_ns)
        for keys, values in batches
        for (pidns,), (start_ns, host_pid, _) in zip(
            LAYOUTS["u32"].iter_unpack(keys), LAYOUTS["init"].iter_unpack(values), strict=True
        )
    }


def start_time(record: Record) -> int:
    """In clock ticks since boot, as field 22 of ``/proc/<pid>/stat``."""
    return record.start_ns // TICK


def ns_pids(record: Record) -> tuple[int, ...]:
    return tuple(ns_pid for _, ns_pid in record.levels)


def candidates(pidmap: KernelMap, ns_pid: int) -> list[int]:
    """The sorted host PIDs of every process, in any namespace, with this innermost number."""
    return sorted({*pidmap.everywhere(ns_pid)} - {0})


class Truth(NamedTuple):
    """Processes by ``/proc``: levels by ``(host_pid, start time in ticks)``, and those that have begun to exit."""

    living: dict[Identity, tuple[tuple[int, int], ...]]
    ending: set[Identity]


def truth() -> Truth:
    """Every process but PID 1: some kernels of small virtual machines keep that one from BPF iterators."""
    procfs = Procfs()
    found = Truth({}, set())
    for host_pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if host_pid == 1:
            continue
        try:
            identity = (host_pid, parse_start_time(Path(f"/proc/{host_pid}/stat").read_bytes()))
            if not any(_runs(host_pid, tid) for tid in os.listdir(f"/proc/{host_pid}/task")):
                found.ending.add(identity)
                continue
            found.living[identity] = tuple(
                zip(_pidns_chain(procfs, host_pid), procfs.ns_pids(host_pid), strict=True)
            )
        except (FileNotFoundError, ProcessLookupError, ProcessGone):
            continue
        except AccessDenied:  # closed even to root
            found.ending.add(identity)
    return found


def by_identity(pidmap: KernelMap) -> dict[Identity, tuple[tuple[int, int], ...]]:
    records = everybody(pidmap).items()
    return {(host_pid, start_time(record)): record.levels for host_pid, record in records if host_pid != 1}


def compare(pidmap: KernelMap) -> tuple[list[str], int]:
    """Differences between the map and ``/proc`` while both change, and the number of processes that were compared.

    Processes that lived before and after the map was read are in it. Those in it before and after ``/proc`` was read
    live. All levels are equal.
    """
    before, mapped, after = truth(), by_identity(pidmap), truth()
    again = by_identity(pidmap)
    lasted = before.living.keys() & after.living.keys()
    # Between its place in /proc and its fork event a process exists that has not run yet.
    wrong = [f"{each} lives and is not in the map" for each in lasted - mapped.keys() - again.keys()]
    wrong += [
        f"{each} is {mapped[each]} in the map and {before.living[each]} in /proc"
        for each in lasted & mapped.keys()
        if mapped[each] != before.living[each]
    ]
    ghosts = (mapped.keys() & again.keys()) - after.living.keys() - after.ending
    return wrong + [f"{each} is in the map and does not live" for each in ghosts], len(lasted)


def _pidns_chain(procfs: Procfs, host_pid: int) -> tuple[int, ...]:
    # A leader that ended before its threads has no namespaces any more; its threads have.
    for tid in os.listdir(f"/proc/{host_pid}/task"):
        with contextlib.suppress(ProcessGone):
            return procfs.pidns_chain(int(tid))
    raise ProcessGone(str(host_pid))


def _runs(host_pid: int, tid: str) -> bool:
    try:
        stat = Path(f"/proc/{host_pid}/task/{tid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return not int(stat[stat.rindex(b")") + 2 :].split()[6]) & PF_EXITING
