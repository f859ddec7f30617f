"""What `hostpid` must be: the number that the tenant's own utilization watcher will meet in its samples.

That depends on the driver. Up to the 565 series NVML's utilization samples carry host PIDs even for a caller
inside a container; from 570.86.15 on they carry the caller's own numbers. Between the two nothing is known, and
nothing is assumed. What was measured on this node (`resolver.hami.driver_memory`) counts more than the version.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from resolver.config import HostpidNamespace
from resolver.reasons import RepairReason

#: The last version seen to put host PIDs into the samples, and the first that puts the caller's.
LAST_HOST = (565, 77)
FIRST_CONTAINER = (570, 86, 15)


class Policy(NamedTuple):
    """``namespace`` is HOST, CONTAINER, or None while it cannot be known; ``why`` is for people.

    ``origin`` is ``forced``, ``measured``, ``by version``, or ``unknown``.
    """

    namespace: HostpidNamespace | None
    why: str
    origin: str = "unknown"

    def wanted(self, host_pid: int, ns_pid: int) -> int | None:
        """The number that a slot of this process must hold, or None."""
        if self.namespace is HostpidNamespace.HOST:
            return host_pid
        return ns_pid if self.namespace is HostpidNamespace.CONTAINER else None


def parse_driver_version(text: str) -> tuple[int, ...] | None:
    """``"535.104.05"`` as numbers, None if it is something else."""
    return tuple(map(int, text.split("."))) if re.fullmatch(r"\d+(\.\d+){1,3}", text) else None


def by_version(driver_version: str) -> Policy:
    """What the driver's version alone says."""
    version = parse_driver_version(driver_version)
    if version is None:
        return Policy(None, f"driver version {driver_version!r} is not understood; set --hostpid-namespace")
    if version <= LAST_HOST:
        return Policy(
            HostpidNamespace.HOST,
            f"driver {driver_version}: samples carry host PIDs up to 565.77",
            "by version",
        )
    if version >= FIRST_CONTAINER:
        return Policy(
            HostpidNamespace.CONTAINER,
            f"driver {driver_version}: samples carry container PIDs from 570.86.15 on",
            "by version",
        )
    return Policy(
        None, f"driver {driver_version} lies between those known to differ; set --hostpid-namespace"
    )


def decide(
    setting: HostpidNamespace,
    driver_version: str | None,
    measured: HostpidNamespace | None = None,
    unmeasurable: str = "",
) -> Policy:
    """The policy for a node. ``driver_version`` is None until NVML has told it.

    ``measured`` is what that very driver was seen to do on this node; ``unmeasurable`` says why it will never be seen,
    and stays empty while it may be.
    """
    if setting is not HostpidNamespace.AUTO:
        return Policy(setting, f"forced by hostpid_namespace = {setting.value}", "forced")
    if driver_version is None:
        return Policy(
            None, "NVML has not told the driver's version yet; --hostpid-namespace decides without it"
        )
    if measured is not None:
        return Policy(
            measured,
            f"driver {driver_version}: samples in a container carry {measured.value} PIDs",
            "measured",
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
