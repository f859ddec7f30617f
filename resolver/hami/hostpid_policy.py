"""What `hostpid` must be: the number that the tenant's own utilization watcher will meet in its samples.

That depends on the driver: `DRIVERS` has what is known. What was measured on this node
(`resolver.hami.driver_memory`) counts more than the version.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from resolver.config import HostpidNamespace
from resolver.reasons import RepairReason

_FORCE = "set --hostpid-namespace"


class DriverRange(NamedTuple):
    """Releases of the driver that are known to do the same, ``first`` to ``last``, both included.

    ``first`` is empty for all before, ``last`` for all after. What a caller in a container gets: ``listed`` are the
    PIDs in NVML's list of processes, ``samples`` those in its utilization samples. ``known_from`` is where that comes
    from; ``measured`` is the release with which that was seen on hardware, empty
    if nobody wrote down one.
    """

    first: str
    last: str
    listed: str
    samples: HostpidNamespace
    known_from: str
    measured: str


#: Oldest first. A version between two rows is what both say, or unknown.
DRIVERS = (
    DriverRange(
        first="",
        last="535.104.05",
        listed="host",
        samples=HostpidNamespace.HOST,
        known_from="public reports of HAMi-core",
        measured="",
    ),
    DriverRange(
        first="535.113.01",
        last="560.35.03",
        listed="container, memory reads 0",
        samples=HostpidNamespace.HOST,
        known_from="public reports of HAMi-core, [below](#measured-on-hardware)",
        measured="560.35.03",
    ),
    DriverRange(
        first="565.57.01",
        last="565.77",
        listed="container",
        samples=HostpidNamespace.HOST,
        known_from="public reports of HAMi-core",
        measured="",
    ),
    DriverRange(
        first="570.86.15",
        last="",
        listed="container",
        samples=HostpidNamespace.CONTAINER,
        known_from="the open kernel modules' source",
        measured="",
    ),
)


class Origin(StrEnum):
    """How it is known what ``hostpid`` must be."""

    FORCED = "forced"
    MEASURED = "measured"
    BY_VERSION = "by version"
    UNKNOWN = "unknown"


class HostpidPolicy(NamedTuple):
    """``namespace`` is HOST, CONTAINER, or None while it cannot be known; ``why`` is for people."""

    namespace: HostpidNamespace | None
    why: str
    origin: Origin = Origin.UNKNOWN

    def wanted(self, host_pid: int, ns_pid: int) -> int | None:
        """The number that a slot of this process must hold, or None."""
        if self.namespace is HostpidNamespace.HOST:
            return host_pid
        return ns_pid if self.namespace is HostpidNamespace.CONTAINER else None


def parse_driver_version(text: str) -> tuple[int, ...] | None:
    """``"535.104.05"`` as numbers, None if it is something else."""
    return tuple(map(int, text.split("."))) if re.fullmatch(r"\d+(\.\d+){1,3}", text) else None


def by_version(driver_version: str) -> HostpidPolicy:
    """What the driver's version alone says."""
    version = parse_driver_version(driver_version)
    if version is None:
        return HostpidPolicy(None, f"driver version {driver_version!r} is not understood; {_FORCE}")
    since = [row for row in DRIVERS if not row.first or (parse_driver_version(row.first) or ()) <= version]
    until = [row for row in DRIVERS if not row.last or version <= (parse_driver_version(row.last) or ())]
    if since[-1].samples is not until[0].samples:
        return HostpidPolicy(None, f"driver {driver_version} lies between those known to differ; {_FORCE}")
    return HostpidPolicy(
        since[-1].samples,
        f"driver {driver_version}: samples carry {_extent(since[-1].samples)}",
        Origin.BY_VERSION,
    )


def known() -> str:
    """The table in one sentence."""
    host, container = _extent(HostpidNamespace.HOST), _extent(HostpidNamespace.CONTAINER)
    return f"samples carry {host}, {container}"


def _extent(samples: HostpidNamespace) -> str:
    rows = [row for row in DRIVERS if row.samples is samples]
    last = rows[-1].last
    return f"{samples.value} PIDs {f'up to {last}' if last else f'from {rows[0].first} on'}"


def decide(
    setting: HostpidNamespace,
    driver_version: str | None,
    measured: HostpidNamespace | None = None,
    unmeasurable: str = "",
) -> HostpidPolicy:
    """The policy for a node. ``driver_version`` is None until NVML has answered.

    ``measured`` is what that very driver was seen to do on this node; ``unmeasurable`` says why it will never be seen,
    and stays empty while it may be.
    """
    if setting is not HostpidNamespace.AUTO:
        return HostpidPolicy(setting, f"forced by hostpid_namespace = {setting.value}", Origin.FORCED)
    if driver_version is None:
        return HostpidPolicy(
            None, "NVML has not reported the driver's version yet; --hostpid-namespace decides without it"
        )
    if measured is not None:
        return HostpidPolicy(
            measured,
            f"driver {driver_version}: samples in a container carry {measured.value} PIDs",
            Origin.MEASURED,
        )
    policy = by_version(driver_version)
    return policy._replace(why=f"{policy.why}; not measured: {unmeasurable}") if unmeasurable else policy


def classify(hostpid: int, wanted: int, other_number: int, *, shared: bool) -> RepairReason | None:
    """Why ``hostpid`` is wrong, or None if it is right.

    ``other_number`` is the same process's number in the namespace that is not wanted; ``shared`` says that
    another slot of the region holds this ``hostpid`` too.
    """
    if hostpid == wanted:
        return None
    if hostpid == 0:
        return RepairReason.MISSING
    if hostpid == other_number:
        return RepairReason.WRONG_NAMESPACE
    return RepairReason.DUPLICATE if shared else RepairReason.STALE
