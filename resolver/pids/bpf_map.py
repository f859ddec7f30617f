"""The map that the kernel keeps, read through descriptors that the loader left behind.

An answer may be out of date a microsecond later: verify it against ``/proc`` before writing or printing it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from resolver.linux.procfs import HOST_PIDNS
from resolver.pids.bpf_load import BTF, TIMEOUT, BpfUnavailable, Loaded, default_pythons, load
from resolver.pids.bpf_syscall import COUNTERS, EXIT_SHIFT, LAYOUTS, BpfMap, Kernel, LevelMap

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Nanoseconds in a clock tick as ``/proc`` counts them (USER_HZ is 100 on every machine this runs on).
TICK = 10_000_000
_OVERTAKEN_WAIT = 0.002
_PROBES = ("on_fork", "on_exec", "on_exit")

_PROCESS, _INIT, _PRESENT = LAYOUTS["process"], LAYOUTS["init"], LAYOUTS["present"]

Level = tuple[int, int]
_Identity = tuple[int, int]


class Sizes(NamedTuple):
    """Capacity of the maps. Kernel memory: 170 bytes a process and 90 a namespace, at once.

    ``processes`` live on the host and in one PID namespace each. ``namespaces``, if 0, is half of that.
    """

    processes: int = 32_768
    namespaces: int = 0

    def constants(self) -> dict[str, int]:
        """Return the constants for compiling ``pidmap.c``.

        With three slots for two processes, which have four numbers, at most nine tenths of a number per process find
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
    """Process as the kernel knows it. ``levels`` are ``(pidns, ns_pid)``, the host's first, the innermost last.

    ``start_ns`` is nanoseconds since boot (CLOCK_BOOTTIME), as every time here.
    """

    host_pid: int
    start_ns: int
    levels: tuple[Level, ...]

    @property
    def start_time(self) -> int:
        """Return the start in clock ticks since boot, as field 22 of ``/proc/<pid>/stat``."""
        return self.start_ns // TICK

    @property
    def ns_pids(self) -> tuple[int, ...]:
        """Return the numbers of the ``NSpid:`` line."""
        return tuple(ns_pid for _, ns_pid in self.levels)


class Ended(NamedTuple):
    """A process that ended."""

    host_pid: int
    start_ns: int
    exit_ns: int


class Drift(NamedTuple):
    """Processes and levels that the map had missed, and entries of processes that are gone."""

    missing: int
    stale: int


def start(
    sizes: Sizes = Sizes(),  # noqa: B008 - immutable
    *,
    pythons: Sequence[str] | None = None,
    btf: str = BTF,
    timeout: float = TIMEOUT,
    kept_in: str = "",
) -> BpfPidMap:
    """Load the program, attach it, seed the map; blocks for half a second, ``timeout`` at most.

    Raises `BpfUnavailable` with the reason and the fix.
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
        """Find the living process with this number in the namespace with this inode, at any level."""
        if pidns == HOST_PIDNS:
            return self.by_host(ns_pid)
        slot = self._levels.lookup(pidns, ns_pid)
        if slot is None:
            return None
        _, _, start_ns, host_pid, level, *_ = slot
        record = self.by_host(host_pid)
        if record and record.start_ns == start_ns and record.levels[level : level + 1] == ((pidns, ns_pid),):
            return record
        return None

    def identity(self, pidns: int, ns_pid: int) -> _Identity | None:
        """Return start time in nanoseconds and host PID of that process: half the price of `lookup`.

        A single answer may mix two processes, if the entry was reused while it was copied. Two equal answers can't.
        """
        slot = self._levels.lookup(pidns, ns_pid)
        return (slot[2], slot[3]) if slot else None

    def by_host(self, host_pid: int) -> Record | None:
        """Find the living process with this host PID (a thread's id finds nothing)."""
        for _ in range(3):  # it may end, and its number be used again, while its levels are followed
            slot = self._levels.lookup(HOST_PIDNS, host_pid)
            if slot is None:
                return None
            _, _, start_ns, found, _, levels, pidns, ns_pid = slot
            if found != host_pid:
                continue  # the entry was taken for another process while it was copied
            if levels <= 2:
                inner = ((pidns, ns_pid),) if levels == 2 else ()
                return Record(host_pid, start_ns, ((HOST_PIDNS, host_pid), *inner))
            followed = self._outwards(host_pid, start_ns, levels, levels - 1, (pidns, ns_pid))
            if followed:
                return Record(host_pid, start_ns, followed)
        return None

    def _outwards(
        self, host_pid: int, start_ns: int, levels: int, level: int, key: Level
    ) -> tuple[Level, ...] | None:
        """Return the levels from the host's to this one; None if one of them is missing or another process's."""
        found = [key]
        while level:
            slot = self._levels.lookup(*key)
            if slot is None or slot[2:6] != (start_ns, host_pid, level, levels):
                return None
            level -= 1
            key = slot[6], slot[7]
            found.append(key)
        return tuple(reversed(found))

    def everywhere(self, ns_pid: int) -> Iterator[int]:
        """Yield them one namespace after the other, the host's first: 0 for a namespace without that number."""
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
        """Return the last ended process with this host PID, while its slot isn't reused.

        Its end is known to an eighth of a second, rounded down, but never before its start.
        """
        slot = self._levels.ended(HOST_PIDNS, host_pid)
        if slot is None or slot[3] != host_pid:
            return None
        return Ended(host_pid, start_ns=slot[2], exit_ns=max(slot[2], slot[0] << EXIT_SHIFT))

    # -- the whole of it ----------------------------------------------------------------------------

    def first_processes(self) -> bytes:
        """Return the first process of every PID namespace but the host's as bytes, for `first_processes_in`.

        Takes half a millisecond for 6000, and decoding ten times as long: compare the bytes first.
        """
        return b"".join(bytes(values) for _, values in self._namespaces.batches())

    def count(self) -> int:
        """Count living processes."""
        return sum(entry[0] == HOST_PIDNS for some in self._levels.entries() for entry in some)

    # -- how well it does ---------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """Return the errors and repairs since the start, see ``struct counters`` in ``bpf/pidmap.h``."""
        self._counters.lookup(0)
        totals = map(sum, zip(*LAYOUTS["counters"].iter_unpack(self._counters.value), strict=True))
        return dict(zip(COUNTERS, totals, strict=True))

    def missed_events(self) -> int:
        """Events that the kernel did not show the probes, because one ran already on that CPU (Linux 5.12)."""
        programs = self._loaded.programs
        return sum(run_stats(fd)["recursion_misses"] for name, fd in programs.items() if name in _PROBES)

    def complete(self) -> bool:
        """Return True if an absence proves something: every process found room since the last reconciliation."""
        return self._lost() == self._lost_then

    def _lost(self) -> int:
        now = self.counters()
        return now["full"] + now["update_failed"] + now["read_failed"] + now["levels_truncated"]

    def reconciling(self) -> Iterator[Drift | None]:
        """Compare with all processes, add missing entries, drop stale ones. Yield None between steps, then the drift.

        An entry is stale if it was there before, during and after two walks over all processes that didn't meet its
        process. Takes milliseconds for each 1000 processes; other work can be done between the steps.
        """
        lost, before = self._lost(), self.counters()
        entries = []
        for some in self._entries():
            entries += some
            yield None
        present = self._present()
        yield None
        suspects = [entry for entry in entries if entry[2] not in present]
        stale = 0
        if suspects:
            yield None
            present = self._present()
            yield None
        for table, key, identity in suspects:
            if identity not in present and _identity(table, key) == identity:
                stale += 1
                table.delete(*key)
        after = self.counters()
        for _ in range(50):
            # The walk meets a process shortly before its fork event; that one is not missing, and says so itself. On a
            # busy machine its parent may have lost the CPU in between.
            if after["seeded"] - before["seeded"] <= after["overtaken"] - before["overtaken"]:
                break
            time.sleep(_OVERTAKEN_WAIT)
            yield None
            after["overtaken"] = self.counters()["overtaken"]
        grown = {name: after[name] - before[name] for name in COUNTERS}
        seeded = max(0, grown["seeded"] - grown["overtaken"]) + grown["levels_mended"]
        now = self._lost()
        if now == lost:
            self._lost_then = now
        yield Drift(seeded + now - lost, stale)

    def _entries(self) -> Iterator[list[tuple[BpfMap | LevelMap, tuple[int, ...], _Identity]]]:
        """Yield the maps' entries of living processes in batches: map, key, and claimed process."""
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
    """Decode host PID and start time in nanoseconds since boot, from `BpfPidMap.first_processes`."""
    return ((host_pid, start_ns) for start_ns, host_pid, _ in _INIT.iter_unpack(read))


def run_stats(program: int) -> dict[str, int]:
    """Read ``run_cnt``, ``run_time_ns`` (with kernel.bpf_stats_enabled) and ``recursion_misses`` of a program."""
    with open(f"/proc/self/fdinfo/{program}", "rb", buffering=0) as file:
        text = file.read(4096)
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
    """Count the values of a per-CPU map: CPUs that may ever come, not only those online."""
    with open("/sys/devices/system/cpu/possible", encoding="ascii") as file:
        return int(file.read().strip().replace(",", "-").rsplit("-", 1)[-1]) + 1
