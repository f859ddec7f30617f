"""One immutable picture of what the daemon knows, swapped whole after a pass.

The API, the metrics and the command line read this and nothing else. None is "not known" everywhere. The classes of
msgspec's are sent by the API as they are: their names, fields and docstrings are in ``/v1/openapi.json``. Slots and
regions are kept small instead, since tenants choose how many there are.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from resolver.reasons import SampleReason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resolver.config import SettingReport
    from resolver.events import Events
    from resolver.gpu.attribution import Joined
    from resolver.gpu.inventory import Inventory
    from resolver.hami.hostpid_policy import Origin
    from resolver.linux.procfs import Procfs
    from resolver.lookup.cached import LiveLookup
    from resolver.reasons import RegionReason, RepairReason, UnresolvedReason

#: A daemon whose last pass is older than this, or than so many intervals, is not well.
_STANDS_SECONDS, _STANDS_INTERVALS = 10.0, 20


class SlotReport(NamedTuple):
    """One slot that is in use.

    ``host_pid`` is the verified owner's, None while unresolved. ``repaired`` is why it was last written.
    ``utilization`` is per used device, in per cent, None where it is not known; ``sm_util`` is what the slot says.
    ``stuck`` says why ``sm_util`` does not stay what NVML says though ``hostpid`` is right; empty while it does.
    """

    ns_pid: int
    slot: int
    hostpid: int
    host_pid: int | None
    dead: bool
    unresolved: UnresolvedReason | None
    repaired: RepairReason | None
    sm_util: tuple[int, ...]
    utilization: tuple[int | None, ...]
    stuck: str = ""


class RegionReport(NamedTuple):
    """One shared region with its slots. ``container_id`` is that of its slots' owners, empty until one is resolved.

    ``limit`` is what the file says, and so its tenant: bytes of memory on each device, 0 without a limit.
    """

    path: str
    pod_uid: str
    container_name: str
    layout: str
    device_uuids: tuple[str, ...]
    slots: tuple[SlotReport, ...]
    container_id: str = ""
    quarantined: bool = False
    limit: tuple[int, ...] = ()


class Container(Struct, frozen=True):
    """One container that runs on this node.

    ``pidns`` is the inode of its PID namespace and ``init_host_pid`` the first process in there; null for a container
    that shares another's. ``regions`` are the paths of its HAMi files. ``since`` is Unix time: first seen.
    """

    container_id: str
    pod_uid: str | None
    container_name: str | None
    namespace: str | None
    pod: str | None
    runtime: str | None
    pidns: int | None
    init_host_pid: int | None
    regions: tuple[str, ...]
    since: float


class Process(Struct, frozen=True):
    """One process on one GPU, as NVML lists it or has samples of it.

    ``ns_pid`` is its own number in its container. ``sm_util`` is in per cent, ``memory`` in bytes. ``no_slot`` is why
    HAMi knows nothing of it; null if it owns a slot.
    """

    host_pid: int
    ns_pid: int | None
    device_uuid: str
    container_id: str | None
    pod_uid: str | None
    container_name: str | None
    namespace: str | None
    pod: str | None
    comm: str | None  # what the process calls itself: at most 15 bytes of anything
    sm_util: int | None
    memory: int | None
    no_slot: SampleReason | None


class Worker(Struct, frozen=True):
    """One kind of child: how often it was started and failed, ever, and what the last failure was."""

    name: str
    starts: int
    failures: int
    last_failure: str | None


class PassSeconds(Struct, frozen=True):
    """Durations of passes: ``counts`` is how many took at most each bound, in seconds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    observations: int
    total: float


class Snapshot(NamedTuple):
    """Everything, as of Unix time ``at``. Counters only ever grow.

    ``policy`` is ``host``, ``container`` or ``unknown``; ``policy_origin`` is ``measured``, ``by version``, ``forced``,
    or ``unknown``. ``not_ready`` says why the source is not known to work; empty while it is. ``collected_at`` is when
    NVML last answered (Unix time, 0 before the first time), ``joined.error`` why it does not now.
    """

    at: float
    started_at: float
    passes: int
    pass_seconds: PassSeconds
    source: str
    sources_not_used: Mapping[str, str]  # why
    source_counters: Mapping[str, int]
    incomplete: str  # why the source alone does not know every process; empty while it does
    not_ready: str
    processes: int
    map_size: int  # that the kernel's map has room for
    policy: str
    policy_why: str
    policy_origin: Origin
    driver_version: str | None
    inventory: Inventory
    regions: tuple[RegionReport, ...]
    rejected: Mapping[str, RegionReason]
    missing_dirs: tuple[str, ...]
    containers: tuple[Container, ...]
    gpu_processes: tuple[Process, ...]
    joined: Joined
    collected_at: float
    workers: tuple[Worker, ...]
    counters: Mapping[str, int]
    dry_run: bool
    settings: tuple[SettingReport, ...] = ()
    holder: str = ""  # PID of the daemon whose end this one waits for before it writes
    not_measured: str = ""  # why the driver's truth was not measured; empty if it was

    def standstill(self, interval: float) -> str:
        """Why the daemon should be restarted; empty while passes are made, or before its turn."""
        if self.holder:
            return ""
        age = time.time() - (self.at if self.passes else self.started_at)
        if age <= max(_STANDS_SECONDS, _STANDS_INTERVALS * interval):
            return ""
        if self.passes:
            return f"the last pass over the slots is {age:.0f} s old"
        return f"no pass over the slots was made in the {age:.0f} s since the start"

    def unresolved(self) -> list[tuple[RegionReport, SlotReport]]:
        """Every slot that nothing can be said about, with its region."""
        return [
            (region, slot) for region in self.regions for slot in region.slots if slot.unresolved is not None
        ]


class View(NamedTuple):
    """What the API and the metrics read: the last pass's snapshot, the map for look-ups, and the events.

    ``snapshot()`` never waits. ``inventories`` has an event each time that a snapshot with another inventory, or
    another failure of NVML, is shown.
    """

    snapshot: Callable[[], Snapshot]
    live: LiveLookup
    procfs: Procfs
    events: Events
    inventories: Events
