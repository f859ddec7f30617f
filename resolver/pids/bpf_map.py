"""The map that the kernel keeps: what `resolver` reads of it, through descriptors that the loader left behind.

Every answer was true when the kernel gave it, and may be out of date a microsecond later. Whoever writes or prints
one verifies it against ``/proc`` and the start time first.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from resolver.linux.procfs import HOST_PIDNS
from resolver.pids.bpf_load import BTF, TIMEOUT, BpfUnavailable, Loaded, default_pythons, load
from resolver.pids.bpf_syscall import COUNTERS, EXIT_SHIFT, LAYOUTS, BpfMap, Kernel, LevelMap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: Nanoseconds in a clock tick as ``/proc`` counts them (USER_HZ is 100 on every machine this runs on).
TICK = 10_000_000
_OVERTAKEN_WAIT = 0.002
_PROBES = ("on_fork", "on_exec", "on_exit")

_PROCESS, _INIT, _PRESENT = LAYOUTS["process"], LAYOUTS["init"], LAYOUTS["present"]

Level = tuple[int, int]
_Identity = tuple[int, int]


class Sizes(NamedTuple):
    """How many entries the maps hold. Kernel memory: 170 bytes a process and 90 a namespace, at once.

    ``processes`` is for living processes, each with a number on the host and one in a PID namespace.
    ``namespaces`` is half of that if 0: a tenant who makes one for each of its processes does not fill it up first.
    """

    processes: int = 32_768
    namespaces: int = 0

    def constants(self) -> dict[str, int]:
        """What ``pidmap.c`` is compiled with.

        With three slots for two processes, which have four numbers, at most nine tenths of a number a process find
        their slot taken: `overflow` holds one.
        """
        return {
            "SLOTS": _power_of_two(self.processes * 3 // 2),
            "OVERFLOW": self.processes,
            "NAMESPACES": self.namespaces or max(1, self.processes // 2),
        }


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


class Record(NamedTuple):
    """A process as the kernel knows it. ``levels`` are ``(pidns, ns_pid)``, the host's first, its own last.

    ``start_ns`` is nanoseconds since boot (CLOCK_BOOTTIME), as every time here.
    """

    host_pid: int
    start_ns: int
    levels: tuple[Level, ...]

    @property
    def start_time(self) -> int:
        """In clock ticks since boot, as field 22 of ``/proc/<pid>/stat``."""
        return self.start_ns // TICK

    @property
    def ns_pids(self) -> tuple[int, ...]:
        """The numbers of the ``NSpid:`` line."""
        return tuple(ns_pid for _, ns_pid in self.levels)


#: `Record` from a tuple of its fields, without the Python function that a named tuple is made by: 0.2 us of 3.
_record: Callable[[tuple[int, int, tuple[Level, ...]]], Record] = partial(tuple.__new__, Record)


class Init(NamedTuple):
    """The first process of a PID namespace."""

    host_pid: int
    start_ns: int


class Ended(NamedTuple):
    """A process that ended."""

    host_pid: int
    start_ns: int
    exit_ns: int


class Drift(NamedTuple):
    """How far the map was off: processes it missed, entries of processes that are gone, and how many were repaired.

    A level that was missing of a known process counts as ``missing`` too.
    """

    missing: int
    stale: int
    mended: int


def start(
    sizes: Sizes = Sizes(),  # noqa: B008 - immutable
    *,
    pythons: Sequence[str] | None = None,
    btf: str = BTF,
    timeout: float = TIMEOUT,
    kept_in: str = "",
) -> BpfPidMap:
    """Load the program, attach it, seed the map; blocks for half a second, ``timeout`` at most.

    Raises `BpfUnavailable` with the reason and the fix. ``pythons`` are tried in order for one that has bcc.
    """
    loaded = load(
        sizes.constants(), pythons=pythons or default_pythons(), btf=btf, timeout=timeout, kept_in=kept_in
    )
    try:
        return BpfPidMap(loaded)
    except BaseException:
        loaded.close()
        raise


class BpfPidMap:
    """The kernel's map of processes. For one thread: look-ups use the same buffers again.

    Look-ups raise OSError if the kernel refuses a descriptor that it gave; then the map is of no use any more.
    Before Linux 5.19, with ``kernel.unprivileged_bpf_disabled``, they need CAP_BPF; since then no capability.
    """

    def __init__(self, loaded: Loaded) -> None:
        self.report = loaded.report
        self._loaded = loaded
        self._kernel = Kernel()
        maps = {each["name"]: each for each in loaded.report["maps"]}
        sizes = {name: (each["key_size"], each["value_size"]) for name, each in maps.items()}
        u32 = LAYOUTS["u32"]
        #: How many living processes there is room for.
        self.room: int = maps["overflow"]["max_entries"]
        wanted = {
            "slots": (u32, LAYOUTS["slot"].size),
            "overflow": (LAYOUTS["level"], _PROCESS.size),
            "namespaces": (u32, _INIT.size),
            "counters": (u32, LAYOUTS["counters"].size),
        }
        for name, (key, value_size) in wanted.items():
            if sizes[name] != (key.size, value_size):
                raise BpfUnavailable(
                    f"the BPF program's map {name} has keys and values of {sizes[name]} bytes, and this program "
                    f"expects {(key.size, value_size)}: they are of different versions; install resolver again"
                )
        self._cpus = _possible_cpus()
        fds = loaded.maps
        self._levels = LevelMap(self._kernel, fds["slots"], maps["slots"]["max_entries"], fds["overflow"])
        self._namespaces = BpfMap(self._kernel, fds["namespaces"], u32, _INIT.size)
        self._counters = BpfMap(self._kernel, fds["counters"], u32, LAYOUTS["counters"].size * self._cpus)
        self._lost_then = 0

    # -- look-ups -----------------------------------------------------------------------------------

    def lookup(self, pidns: int, ns_pid: int) -> Record | None:
        """The living process that has this number in the namespace with this inode, at whatever level."""
        if pidns == HOST_PIDNS:
            return self.by_host(ns_pid)
        slot = self._levels.lookup(pidns, ns_pid)
        if slot is None:
            return None
        _, _, start_ns, host_pid, level, levels, outer_pidns, outer_ns_pid = slot
        if levels == 2:
            return _record((host_pid, start_ns, ((HOST_PIDNS, host_pid), (pidns, ns_pid))))
        if level == levels - 1:
            outer = self._outwards(host_pid, start_ns, levels, level - 1, (outer_pidns, outer_ns_pid))
            if outer:
                return Record(host_pid, start_ns, (*outer, (pidns, ns_pid)))
        record = self.by_host(host_pid)
        if record and record.start_ns == start_ns and record.levels[level] == (pidns, ns_pid):
            return record
        return None

    def identity(self, pidns: int, ns_pid: int) -> _Identity | None:
        """Start time in nanoseconds and host PID of who has this number there: half the price of `lookup`.

        A single one may be another process's, if the entry was taken while it was copied. The same one twice is not.
        """
        slot = self._levels.lookup(pidns, ns_pid)
        return (slot[2], slot[3]) if slot else None

    def by_host(self, host_pid: int) -> Record | None:
        """The living process with this host PID (a thread's id finds nothing)."""
        for _ in range(3):  # it may end, and its number be used again, while its levels are followed
            slot = self._levels.lookup(HOST_PIDNS, host_pid)
            if slot is None:
                return None
            _, _, start_ns, found, _, levels, pidns, ns_pid = slot
            if found != host_pid:
                continue  # the entry was taken for another process while it was copied
            if levels == 1:
                return Record(host_pid, start_ns, ((HOST_PIDNS, host_pid),))
            if levels == 2:
                return _record((host_pid, start_ns, ((HOST_PIDNS, host_pid), (pidns, ns_pid))))
            followed = self._outwards(host_pid, start_ns, levels, levels - 1, (pidns, ns_pid))
            if followed:
                return Record(host_pid, start_ns, followed)
        return None

    def _outwards(
        self, host_pid: int, start_ns: int, levels: int, level: int, key: Level
    ) -> tuple[Level, ...] | None:
        """The levels from the host's to this one; None if one on the way is not there or another process's."""
        found = [key]
        while level:
            slot = self._levels.lookup(*key)
            if slot is None or slot[2:6] != (start_ns, host_pid, level, levels):
                return None
            level -= 1
            key = slot[6], slot[7]
            found.append(key)
        return tuple(reversed(found))

    def candidates(self, ns_pid: int) -> list[int]:
        """Host PIDs of every process, in whatever namespace, whose own number is ``ns_pid``; sorted."""
        return sorted({*self.everywhere(ns_pid)} - {0})

    def everywhere(self, ns_pid: int) -> Iterator[int]:
        """The same one namespace after the other, the host's first: 0 where nobody has that number."""
        host = self.by_host(ns_pid)
        if host and len(host.levels) == 1:
            yield ns_pid
        for keys, _ in self._namespaces.batches():
            for (pidns,) in LAYOUTS["u32"].iter_unpack(keys):
                host_pid = 0
                slot = self._levels.lookup(pidns, ns_pid)
                if slot:
                    _, _, _, owner, level, levels, _, _ = slot
                    host_pid = owner if level == levels - 1 else 0
                yield host_pid

    def tombstone(self, host_pid: int) -> Ended | None:
        """The last process with this host PID that ended, while nobody else needs the slot that keeps it.

        When it ended is known to an eighth of a second, rounded down, but not to before its start.
        """
        slot = self._levels.ended(HOST_PIDNS, host_pid)
        if slot is None or slot[3] != host_pid:
            return None
        return Ended(host_pid, start_ns=slot[2], exit_ns=max(slot[2], slot[0] << EXIT_SHIFT))

    # -- the whole of it ----------------------------------------------------------------------------

    def first_processes(self) -> bytes:
        """The first process of every PID namespace but the host's, as the map has them: `first_processes_in` reads it.

        Half a millisecond for 6000, while to read them takes ten times as long: compare it with what it was.
        """
        return b"".join(bytes(values) for _, values in self._namespaces.batches())

    def namespaces(self) -> dict[int, Init]:
        """``{pidns: its first process}`` of every PID namespace but the host's whose first process lives."""
        found = {}
        for keys, values in self._namespaces.batches():
            for (pidns,), (start_ns, host_pid, _) in zip(
                LAYOUTS["u32"].iter_unpack(keys), _INIT.iter_unpack(values), strict=True
            ):
                found[pidns] = Init(host_pid, start_ns)
        return found

    def count(self) -> int:
        """How many processes live."""
        return sum(entry[0] == HOST_PIDNS for some in self._levels.entries() for entry in some)

    def dump(self) -> dict[int, Record]:
        """``{host_pid: record}`` of all the living. What begins or ends meanwhile may be there or not."""
        found, deep = {}, []
        for some in self._levels.entries():
            for pidns, number, start_ns, host_pid, _, count, *own in some:
                if pidns != HOST_PIDNS or number != host_pid:
                    continue  # not the host's level; or the slot went to another process while it was copied
                if count <= 2:
                    inner = ((own[0], own[1]),) if count == 2 else ()
                    found[host_pid] = Record(host_pid, start_ns, ((HOST_PIDNS, host_pid), *inner))
                else:
                    deep.append(host_pid)
        for host_pid in deep:  # containers in containers: few
            if record := self.by_host(host_pid):
                found[host_pid] = record
        return found

    # -- how well it does ---------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """What went wrong or was repaired since the start, see ``struct counters`` in ``bpf/pidmap.h``."""
        self._counters.lookup(0)
        totals = map(sum, zip(*LAYOUTS["counters"].iter_unpack(self._counters.value), strict=True))
        return dict(zip(COUNTERS, totals, strict=True))

    def missed_events(self) -> int:
        """Events that the kernel did not show the probes, because one ran already on that CPU (Linux 5.12)."""
        programs = self._loaded.programs
        return sum(_run_stats(fd)["recursion_misses"] for name, fd in programs.items() if name in _PROBES)

    def run_stats(self) -> dict[str, dict[str, int]]:
        """By program: ``run_cnt`` and ``run_time_ns`` (while kernel.bpf_stats_enabled), ``recursion_misses``."""
        return {name: _run_stats(fd) for name, fd in self._loaded.programs.items()}

    def complete(self) -> bool:
        """Whether an absence proves anything: every process found room since the last reconciliation."""
        return self._lost() == self._lost_then

    def _lost(self) -> int:
        now = self.counters()
        return now["full"] + now["update_failed"] + now["read_failed"] + now["levels_truncated"]

    def reconcile(self) -> Drift:
        """Compare with every process there is, put in what is missing, take out what is gone.

        An entry counts as gone if it was there before, during and after two walks over all processes that did
        not meet its process. Milliseconds for each 1000 processes.
        """
        steps = self.reconciling()
        while (drift := next(steps)) is None:
            pass
        return drift

    def reconciling(self) -> Iterator[Drift | None]:
        """`reconcile` in steps, between which other work can be done: None after each, the drift at the end.

        However long the steps are apart: an entry that was there before both walks names a process that has been.
        """
        lost, before = self._lost(), self.counters()
        entries = []
        for some in self._entries():
            entries += some
            yield None
        present = self._present()
        yield None
        suspects = [entry for entry in entries if entry[2] not in present]
        stale = mended = 0
        if suspects:
            yield None
            present = self._present()
            yield None
        for table, key, identity in suspects:
            if identity not in present and _identity(table, key) == identity:
                stale += 1
                mended += table.delete(*key)
        after = self.counters()
        for _ in range(10):
            # The walk meets a process shortly before its fork event; that one is not missing, and says so itself.
            if after["seeded"] - before["seeded"] <= after["overtaken"] - before["overtaken"]:
                break
            time.sleep(_OVERTAKEN_WAIT)
            after["overtaken"] = self.counters()["overtaken"]
        grown = {name: after[name] - before[name] for name in COUNTERS}
        seeded = max(0, grown["seeded"] - grown["overtaken"]) + grown["levels_mended"]
        now = self._lost()
        if now == lost:
            self._lost_then = now
        yield Drift(seeded + now - lost, stale, seeded + mended)

    def _entries(self) -> Iterator[list[tuple[BpfMap | LevelMap, tuple[int, ...], _Identity]]]:
        """Everything in the maps of the living, some at a time: the map, the key, and whose it is said to be."""
        for some in self._levels.entries():
            yield [(self._levels, entry[:2], (entry[2], entry[3])) for entry in some]
        for keys, values in self._namespaces.batches():
            yield [
                (self._namespaces, each, (fields[0], fields[1]))
                for each, fields in zip(
                    LAYOUTS["u32"].iter_unpack(keys), _INIT.iter_unpack(values), strict=True
                )
            ]

    def _present(self) -> set[_Identity]:
        """Start time and host PID of every process that is not reaped; the walk puts in those that are missing."""
        written = self._kernel.run_iterator(self._loaded.links["iterator"])
        return {(start_ns, host_pid) for start_ns, host_pid, _ in _PRESENT.iter_unpack(written)}

    def close(self) -> None:
        """Detach the probes and give everything back; may be called twice."""
        self._loaded.close()


def first_processes_in(read: bytes) -> Iterator[tuple[int, int]]:
    """Host PID and start time in nanoseconds since boot, of what `BpfPidMap.first_processes` gave."""
    return ((host_pid, start_ns) for start_ns, host_pid, _ in _INIT.iter_unpack(read))


def _run_stats(program: int) -> dict[str, int]:
    """What the kernel says of the program behind this descriptor; read every second, so without a file object."""
    fd = os.open(f"/proc/self/fdinfo/{program}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(fd, 4096)
    finally:
        os.close(fd)
    fields = dict(line.split(b":", 1) for line in text.splitlines() if b":" in line)
    return {
        name: int(fields.get(name.encode(), 0)) for name in ("run_cnt", "run_time_ns", "recursion_misses")
    }


def _identity(table: BpfMap | LevelMap, key: tuple[int, ...]) -> _Identity | None:
    if isinstance(table, LevelMap):
        slot = table.lookup(*key)
        return (slot[2], slot[3]) if slot else None
    return _INIT.unpack(table.value)[:2] if table.lookup(*key) else None


def _possible_cpus() -> int:
    """How many values a per-CPU map has: CPUs that may ever come, not those that are on."""
    with open("/sys/devices/system/cpu/possible", encoding="ascii") as file:
        return int(file.read().strip().replace(",", "-").rsplit("-", 1)[-1]) + 1
