"""What can run out, and what time it is: descriptors, memory, clocks."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from typing import TYPE_CHECKING, NamedTuple

from resolver.doctor.findings import Finding, failed, ok, several, together, unknown, warning
from resolver.errors import ResolverError
from resolver.linux.inotify import OF_A_DIRECTORY, OF_A_FILE, Inotify, why_not
from resolver.linux.safe_open import open_directory, open_plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resolver.doctor.node import Node

_SPARE_DESCRIPTORS = 64  # the daemon's own: log, sockets, children, maps
_FEW_DESCRIPTORS = 4096
#: The BPF loader has LLVM in memory for half a second, beside a daemon of 45 MiB and two children.
_WITH_LOADER, _WITHOUT_LOADER = 288 << 20, 112 << 20
_EPOCH = 1_704_067_200  # 2024: no release of this is older
_DAY = 86400
_JUMP = 0.05
_WATCHED = 0.25  # seconds


def descriptors(node: Node) -> Finding:
    """Whether there are enough: one for each region, one for each process with a slot."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # the daemon raises the soft limit by itself
    limit = "no limit" if hard == resource.RLIM_INFINITY else f"at most {hard}"
    regions = len(node.regions.regions)
    needed = _SPARE_DESCRIPTORS + 4 * regions
    found = f"{limit}; {several(regions, 'region')} here"
    fix = (
        "raise the hard limit: ulimit -Hn 65536, LimitNOFILE=65536 (systemd), or in the container runtime's unit "
        "(containerd.service: LimitNOFILE)"
    )
    if hard == resource.RLIM_INFINITY or hard >= max(needed, _FEW_DESCRIPTORS):
        return ok(found)
    cause = "every region takes a descriptor, and every process with a slot another one"
    if hard < needed:
        return failed(found, f"{cause}: regions are skipped for lack of them (out_of_descriptors)", fix)
    return warning(found, f"{cause}: with some hundred processes some regions would be skipped", fix)


def watches(node: Node) -> Finding:
    """Whether the kernel would report changes to every cache file and its directory: by trying it."""
    paths = [path for path, _ in node.regions.regions]
    try:
        queue = Inotify()
    except OSError as error:
        return _by_the_clock("no inotify", error)
    watched, refused = 0, None
    try:
        for path in paths:
            for fd, mask in _to_be_watched(path):
                try:
                    queue.add(fd, mask)
                    watched += 1
                except OSError as error:
                    refused = error
                finally:
                    os.close(fd)
    finally:
        queue.close()
    most = _number(f"{node.procfs.root}/sys/fs/inotify/max_user_watches")
    limit = f", at most {most}" if most is not None else ""
    found = f"{several(watched, 'watch', 'watches')} for {several(len(paths), 'region')}{limit}"
    return ok(found) if refused is None else _by_the_clock(found, refused)


def _to_be_watched(path: str) -> Iterator[tuple[int, int]]:
    """A cache file's directory and itself, open, and what is watched of each."""
    with contextlib.suppress(ResolverError):  # the check `regions` reports what is refused
        directory = open_directory(os.path.dirname(path))
        yield os.dup(directory), OF_A_DIRECTORY
        try:
            yield open_plain(directory, os.path.basename(path))[0], OF_A_FILE
        finally:
            os.close(directory)


def _by_the_clock(found: str, error: OSError) -> Finding:
    return warning(
        found,
        f"{why_not(error)}. Cache files that are not watched are checked every interval: a new process is seen later, "
        "and it costs more CPU",
        "sysctl -w fs.inotify.max_user_instances=1024 fs.inotify.max_user_watches=524288; for good: /etc/sysctl.d",
    )


class Memory(NamedTuple):
    """Bytes; None without a limit, or where it is not known."""

    available: int | None
    limit: int | None
    limited_by: str


def memory(node: Node) -> Finding:
    """Whether the daemon, its children and for a moment the compiler have room."""
    seen = _memory(node)
    needed = _WITH_LOADER if "bpf" in node.sources else _WITHOUT_LOADER
    troubles = []
    if seen.limit is not None and seen.limit < needed:
        grave = failed if seen.limit < _WITHOUT_LOADER else warning
        troubles.append(
            grave(
                f"the limit is {seen.limit >> 20} MiB ({seen.limited_by})",
                f"the daemon and its children take up to {_WITHOUT_LOADER >> 20} MiB, while the probes are compiled "
                f"{_WITH_LOADER >> 20} MiB: beyond the limit the kernel kills one of them",
                f"raise it to {needed >> 20}Mi or more (Kubernetes: resources.limits.memory; systemd: MemoryMax), "
                "or set source = netlink",
            )
        )
    if seen.available is not None and seen.available < needed:
        troubles.append(
            warning(
                f"{seen.available >> 20} MiB are available",
                "the node itself is short of memory: whatever starts next may be killed",
                "see who has it: ps axo rss,comm --sort -rss | head",
            )
        )
    if seen.available is None:
        return unknown(
            f"{node.procfs.root}/meminfo has no MemAvailable",
            "the kernel is older than 3.14, or something hides it",
            "free -m shows what it can",
        )
    limit = f"limit {seen.limit >> 20} MiB ({seen.limited_by})" if seen.limit is not None else "no limit"
    return together(f"{seen.available >> 20} MiB available, {limit}", troubles)


def _memory(node: Node) -> Memory:
    available = None
    try:
        with open(f"{node.procfs.root}/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    available = int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    limits = list(_cgroup_limits(node))
    return Memory(available, *min(limits, default=(None, "")))


def _cgroup_limits(node: Node) -> list[tuple[int, str]]:
    """``(bytes, file)`` of every memory limit on this process's own cgroup, as far as its hierarchy is mounted."""
    found = []
    try:
        lines = node.procfs.cgroup(os.getpid()).splitlines()
        mounts = node.mounts
    except (ResolverError, OSError):
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        name = "memory.max" if not controllers else "memory.limit_in_bytes"
        if controllers and "memory" not in controllers.split(","):
            continue
        for mount in mounts:
            fits = mount.fs_type == ("cgroup" if controllers else "cgroup2")
            if fits and (not controllers or "memory" in mount.super_options.split(",")):
                inside = os.path.relpath(path, mount.root) if path.startswith(mount.root) else "."
                while True:
                    file_name = os.path.normpath(f"{mount.mount_point}/{inside}/{name}")
                    limit = _number(file_name)
                    if limit is not None and limit < 1 << 60:  # v1 says a huge number for none
                        found.append((limit, file_name))
                    if inside in (".", "") or inside.startswith(".."):
                        break
                    inside = os.path.dirname(inside) or "."
    return found


def _number(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


class Clocks(NamedTuple):
    """Seconds: the wall clock, the steady clock and the one that counts sleep, read together."""

    wall: float
    steady: float
    since_boot: float


def read_clocks() -> Clocks:
    """All three now."""
    return Clocks(
        time.time(), time.clock_gettime(time.CLOCK_MONOTONIC), time.clock_gettime(time.CLOCK_BOOTTIME)
    )


def clock(node: Node) -> Finding:
    """Whether the clocks are those that start times and utilization samples refer to."""
    first = read_clocks()
    time.sleep(_WATCHED)
    return judge_clocks(node, first, read_clocks())


def judge_clocks(node: Node, first: Clocks, second: Clocks) -> Finding:
    """What follows from two readings, some time apart."""
    troubles = []
    at = _date(second.wall)
    set_it = "timedatectl set-ntp true (or chronyc makestep); check: timedatectl"
    battery = _number(f"{node.sys}/class/rtc/rtc0/since_epoch")
    if second.wall < _EPOCH:
        troubles.append(
            failed(
                f"the wall clock says {at}",
                "that is before this program was written. Samples carry the wall clock's time: when it is set right "
                "they look old, and utilization has a gap",
                set_it,
            )
        )
    elif battery is not None and abs(battery - second.wall) > _DAY:
        troubles.append(
            warning(
                f"the wall clock says {at}, the machine's own {_date(battery)}",
                "one of the two is wrong by more than a day, and the machine takes its own at the next boot",
                f"{set_it}; then, if that one was right: hwclock --systohc",
            )
        )
    jump = (second.wall - first.wall) - (second.steady - first.steady)
    if abs(jump) > _JUMP:
        troubles.append(
            warning(
                f"the wall clock jumped by {jump:+.3f} s within {second.steady - first.steady:.2f} s",
                "something sets it again and again: samples look too old or too new, and utilization has gaps",
                f"let one program keep the time: {set_it}",
            )
        )
    troubles += _time_namespace(node)
    return together(f"{at}, steady; up {second.since_boot / 3600:.1f} h", troubles)


def _date(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def _time_namespace(node: Node) -> list[Finding]:
    """The kernel shifts start times in ``/proc`` by these offsets, for readers inside (proc(5))."""
    try:
        with open(f"{node.procfs.root}/self/timens_offsets", encoding="ascii") as file:
            offsets = [line.split() for line in file]
    except OSError:
        return []  # before Linux 5.6, or not built in
    shifted = [line for line in offsets if len(line) == 3 and line[1:] != ["0", "0"]]
    if not shifted:
        return []
    return [
        failed(
            f"a time namespace of its own ({', '.join(f'{name} {seconds:>} s' for name, seconds, _ in shifted)})",
            "start times in /proc are shifted there, and do not agree with those in the kernel's map",
            "run it in the host's time namespace: without unshare --time, or nsenter --time --target 1",
        )
    ]
