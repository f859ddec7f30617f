"""Policy for ``hostpid``: the number that tenants' watchers find in their samples."""

import os
import re
from enum import StrEnum
from typing import NamedTuple

from resolver.base.reasons import RepairReason
from resolver.config import HostpidNamespace

_FORCE = "set --hostpid-namespace (make gpu-check measures which)"


WSL = "microsoft" in os.uname().release.lower()


class DriverRange(NamedTuple):
    """Driver releases with the same behaviour; an empty ``first`` or ``last`` is unbounded.

    ``listed`` is the kind of PID in NVML's process list in a container, ``samples`` the kind in its samples, None if
    unknown. ``measured``: a release tested on hardware.
    """

    first: str
    last: str
    listed: str
    samples: HostpidNamespace | None
    known_from: str
    measured: str = ""


_TABLE = """
| 535.104.12 | host | host | SOURCE |
535.113.01 | 560.35.03 | container, memory reads 0 | host | SOURCE; also 535.43.24 and later of that side branch, \
and every later 535 and 550 | 560.35.03
565.57.01 | 565.77 | container | host | SOURCE |
570.86.15 | 580.142 | container | container | SOURCE; a public reading | 580.105.08
590.44.01 | | container | | SOURCE: a second path has host PIDs, and which one NVML takes is unknown |
"""


def _ranges() -> tuple[DriverRange, ...]:
    table = _TABLE.replace("SOURCE", "source of the open modules, tag by tag")
    rows = ([cell.strip() for cell in line.split("|")] for line in table.strip("\n").splitlines())
    return tuple(
        DriverRange(first, last, listed, HostpidNamespace(samples) if samples else None, known_from, measured)
        for first, last, listed, samples, known_from, measured in rows
    )


#: Oldest first. A version between two rows is known if both rows agree.
DRIVERS = _ranges()


class Origin(StrEnum):
    """Origin of the decision."""

    FORCED = "forced"
    BY_MACHINE = "by machine"
    BY_VERSION = "by version"
    BY_WATCHERS = "by watchers"
    UNKNOWN = "unknown"


class WatcherFinding(StrEnum):
    """A watcher's result: it found samples by the slots' ``hostpid``, found none, or the driver refuses its call.

    Finding none contradicts the policy; with the layout `FILLS_NOTHING` it only raises doubts.
    """

    CONFIRMS = "confirms"
    CONTRADICTS = "contradicts"
    DOUBTS = "doubts"
    UNABLE = "unable"


#: The layout of HAMi 2.4.1 and later releases; the watcher of 2.4.1 never fills in a value.
FILLS_NOTHING = "v1.1"


class HostpidPolicy(NamedTuple):
    """``namespace`` is HOST, CONTAINER, or None while unknown; ``why`` is for people."""

    namespace: HostpidNamespace | None
    why: str
    origin: Origin = Origin.UNKNOWN

    def wanted(self, host_pid: int, ns_pid: int) -> int | None:
        """Return the right number for this process's slot, if known."""
        if self.namespace is HostpidNamespace.HOST:
            return host_pid
        return ns_pid if self.namespace is HostpidNamespace.CONTAINER else None


def parse_driver_version(text: str) -> tuple[int, ...] | None:
    """Parse ``"535.104.05"`` into numbers; None for another form."""
    return tuple(map(int, text.split("."))) if re.fullmatch(r"\d+(\.\d+){1,3}", text) else None


def by_version(driver_version: str) -> HostpidPolicy:
    """Decide by version alone."""
    version = parse_driver_version(driver_version)
    if version is None:
        return HostpidPolicy(None, f"driver version {driver_version!r} is not understood; {_FORCE}")
    since = [row for row in DRIVERS if not row.first or (parse_driver_version(row.first) or ()) <= version]
    until = [row for row in DRIVERS if not row.last or version <= (parse_driver_version(row.last) or ())]
    samples = since[-1].samples
    if samples is not until[0].samples:
        return HostpidPolicy(None, f"driver {driver_version} lies between those known to differ; {_FORCE}")
    if samples is None:
        return HostpidPolicy(
            None, f"which PIDs samples of driver {driver_version} carry is not known; {_FORCE}"
        )
    return HostpidPolicy(
        samples, f"driver {driver_version}: samples carry {_extent(samples)}", Origin.BY_VERSION
    )


def known() -> str:
    """Summarize the table in one sentence."""
    host, container = _extent(HostpidNamespace.HOST), _extent(HostpidNamespace.CONTAINER)
    return f"samples carry {host}, {container}"


def _extent(samples: HostpidNamespace) -> str:
    rows = [row for row in DRIVERS if row.samples is samples]
    first, last = rows[0].first, rows[-1].last
    return f"{samples.value} PIDs {f'from {first} to {last}' if first else f'up to {last}'}"


def decide(
    setting: HostpidNamespace, driver_version: str | None, *, vgpu: bool | None = False
) -> HostpidPolicy:
    """Return the policy for a node. ``driver_version`` is None until NVML has answered.

    ``vgpu``: the node is a vGPU guest, with samples from the hypervisor; None if only some GPUs are virtual.
    """
    if setting is not HostpidNamespace.AUTO:
        return HostpidPolicy(setting, f"forced by hostpid_namespace = {setting.value}", Origin.FORCED)
    if driver_version is None:
        return HostpidPolicy(
            None, "NVML has not reported the driver's version yet; --hostpid-namespace decides without it"
        )
    if WSL:
        return HostpidPolicy(None, f"under WSL the driver's version, Windows', shows nothing; {_FORCE}")
    if vgpu is None:
        return HostpidPolicy(None, f"only some of the GPUs are virtual (vGPU); {_FORCE}")
    if vgpu:
        why = "a vGPU guest: the hypervisor's samples carry host PIDs with every driver"
        return HostpidPolicy(HostpidNamespace.HOST, why, Origin.BY_MACHINE)
    return by_version(driver_version)


def contradiction(policy: HostpidPolicy) -> str:
    """Explain why watchers find no samples by the policy's numbers if it is wrong, with the fix."""
    if policy.origin is Origin.FORCED:
        return f"--hostpid-namespace {policy.namespace} is wrong for this driver: try auto"
    other = HostpidNamespace.CONTAINER if policy.namespace is HostpidNamespace.HOST else HostpidNamespace.HOST
    message = f"the driver's samples do not carry {policy.namespace} PIDs as its version says"
    return f"{message}: check with make gpu-check, then set --hostpid-namespace {other}"


def contradicted(policy: HostpidPolicy, containers: int) -> HostpidPolicy:
    """Return the policy after watchers contradicted it: unknown."""
    why = f"the watchers of {containers} containers find no samples by {policy.namespace} PIDs; {_FORCE}"
    return HostpidPolicy(None, why)


def shown(namespace: HostpidNamespace, containers: int) -> HostpidPolicy:
    """Return the policy that watchers show by finding their samples."""
    why = f"the watchers of {containers} containers find samples by {namespace} PIDs, and none by the other"
    return HostpidPolicy(namespace, why, Origin.BY_WATCHERS)


def classify(hostpid: int, wanted: int, other_number: int, *, shared: bool) -> RepairReason | None:
    """Return why ``hostpid`` is wrong, if it is."""
    if hostpid == wanted:
        return None
    if hostpid == 0:
        return RepairReason.MISSING
    if hostpid == other_number:
        return RepairReason.WRONG_NAMESPACE
    return RepairReason.DUPLICATE if shared else RepairReason.STALE
