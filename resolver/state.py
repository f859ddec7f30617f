"""One immutable snapshot of the daemon's knowledge, replaced whole after a pass.

The API, the metrics and the commands read only this. None means unknown. ``/v1/openapi.json`` has the names, fields and
docstrings of the msgspec classes. Slots and regions keep only specific facts, because tenants choose their number:
`resolver.api.shapes` adds the rest.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from resolver.base.reasons import BypassReason, RegionReason, RepairReason, SampleReason, UnresolvedReason

if TYPE_CHECKING:
    from resolver.config import Setting
    from resolver.gpu.attribution import Joined
    from resolver.gpu.inventory import Inventory
    from resolver.hami.packed_slots import PackedSlots

#: Age of the last pass, in seconds or intervals, that makes a daemon unhealthy.
_STANDS_SECONDS, _STANDS_INTERVALS = 10.0, 20


class SlotFacts(Struct, frozen=True):
    """Content of a slot in use, and the findings about it; sent by the API as it is.

    ``pid`` and ``hostpid`` are the slot's fields; ``host_pid`` is its verified owner, None while unresolved.
    ``repaired`` is the reason of the last repair.
    """

    pid: int
    slot: int
    hostpid: int
    host_pid: int | None
    dead: bool
    unresolved: UnresolvedReason | None
    repaired: RepairReason | None


class SlotReport(SlotFacts, frozen=True):
    """One slot that is in use.

    ``utilization`` is NVML's per used device, in per cent, None if unknown; ``sm_util`` is the slot's. ``stuck``
    explains why ``sm_util`` doesn't stay at NVML's value though ``hostpid`` is right; empty otherwise. ``container_id``
    is the owner's, in a ResourceClaim's region, which any number of containers may share. ``core_policy`` is its
    GPU_CORE_UTILIZATION_POLICY, None until its environment was read.
    """

    sm_util: tuple[int, ...]
    utilization: tuple[int | None, ...]
    stuck: str = ""
    container_id: str = ""
    core_policy: str | None = None


class SlotCounts(NamedTuple):
    """Slot counts by state."""

    in_use: int
    dead: int
    repaired: int
    stuck: int
    unresolved: Counter[UnresolvedReason]


class SlotReports:
    """Slots of one region: those with an owner, then the others; reports of these are made on request.

    Each of ``slots`` has a byte in ``codes``, because a tenant can fill 1,024 in each file; 0 is none here. By
    ``meanings`` a slot is dead, or its owner is unknown, which has a reason once it was searched.
    """

    def __init__(
        self,
        owned: tuple[SlotReport, ...],
        slots: PackedSlots | tuple[()] = (),
        codes: bytes = b"",
        meanings: Mapping[int, tuple[bool, UnresolvedReason | None]] = MappingProxyType({}),
        devices: int = 0,
    ) -> None:
        self.owned, self.codes, self.meanings = owned, codes, meanings
        self._slots, self._devices = slots, devices

    def __len__(self) -> int:
        return len(self.owned) + len(self.codes) - self.codes.count(0)

    def __iter__(self) -> Iterator[SlotReport]:
        yield from self.owned
        for index, code in enumerate(self.codes) if self.meanings else ():
            if code:
                slot, (dead, why) = self._slots[index], self.meanings[code]
                yield SlotReport(
                    pid=slot.pid,
                    slot=index,
                    hostpid=slot.hostpid,
                    host_pid=None,
                    dead=dead,
                    unresolved=None if dead else why,
                    repaired=None,
                    sm_util=slot.sm_util,
                    utilization=(0 if dead else None,) * self._devices,
                )


def tally(*regions: SlotReports) -> SlotCounts:
    """Count the slots by state, without reports of unowned slots."""
    in_use = dead = repaired = stuck = 0
    unresolved = Counter[UnresolvedReason]()
    for slots in regions:
        in_use += len(slots)
        dead += sum(slot.dead for slot in slots.owned)
        repaired += sum(slot.repaired is not None for slot in slots.owned)
        stuck += sum(bool(slot.stuck) for slot in slots.owned)
        unresolved.update(slot.unresolved for slot in slots.owned if slot.unresolved is not None)
        for code, (is_dead, why) in slots.meanings.items():
            if is_dead:
                dead += slots.codes.count(code)
            elif why is not None:
                unresolved[why] += slots.codes.count(code)
    return SlotCounts(in_use, dead, repaired, stuck, unresolved)


class RegionFacts(Struct, frozen=True):
    """Cache file with its container; sent by the API as it is.

    ``container_id`` is that of its slots' owners, None if they are unknown or of several containers. ``claim`` is the
    UID of its ResourceClaim, ``placement`` a row of `hami.placements`. ``ended`` is what slots of ended processes still
    say, by device in per cent: HAMi's monitors of 2.7 to 2.9 add it to what is in use. ``moved`` is the same of copies
    that a compaction left above ``proc_num``, which those up to 2.6 add. Empty for 0.
    """

    path: str
    pod_uid: str | None
    container_name: str | None
    layout: str
    device_uuids: tuple[str, ...]
    container_id: str | None = None
    quarantined: bool = False
    claim: str | None = None
    placement: str | None = None
    ended: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()


class LimitState(StrEnum):
    """Whether HAMi-core's limit of a container's cores holds on a GPU."""

    IN_FORCE = "in_force"
    NO_LIMIT = "no_limit"
    SWITCHED_OFF = "switched_off"  # by utilization_switch, which HAMi's monitor clears for a policy
    DISABLED = "disabled"  # by a process's GPU_CORE_UTILIZATION_POLICY, which HAMi sets for disableCoreLimit
    UNKNOWN = (
        "unknown"  # a process's environment, or HAMi-core's release where that decides, is not known yet
    )
    NO_EFFECT = "no_effect"  # HAMi-core in the container can't read this driver's samples
    WAITING = "waiting"  # no slot's owner is known, so HAMi-core counts none of its use
    EXCEEDED = "exceeded"  # HAMi-core should enforce it, and each of the last two minutes was above it

    @classmethod
    def of(cls, policy: str | None, *, switch: bool) -> LimitState:
        """Decide as HAMi-core does: a process's policy wins over ``utilization_switch`` of its cache file."""
        if policy is None:
            return cls.UNKNOWN
        if policy in ("disable", "DISABLE"):
            return cls.DISABLED
        return cls.IN_FORCE if switch or policy in ("force", "FORCE") else cls.SWITCHED_OFF


class RegionReport(RegionFacts, frozen=True, kw_only=True):
    """One shared region with its slots.

    ``limit`` and ``sm_limit`` come from the file, and so from its tenant: bytes of memory by device, 0 without a limit;
    per cent of its cores, 0 or 100 and more without one. ``container_ids`` are those of all its slots' owners.
    ``limiting`` is utilization_switch, ``limits`` by device why it can't be enforced, None if it can.
    """

    slots: SlotReports
    limit: tuple[int, ...] = ()
    sm_limit: tuple[int, ...] = ()
    container_ids: tuple[str, ...] = ()
    limiting: bool = True
    limits: tuple[LimitState | None, ...] = ()

    def memory_limit(self, device: int) -> int | None:
        """Return the bytes allowed on a device, None without a limit."""
        return (self.limit[device] if device < len(self.limit) else 0) or None

    def core_limit(self, device: int) -> int | None:
        """Return per cent of a device's cores, None without a limit."""
        limit = self.sm_limit[device] if device < len(self.sm_limit) else 0
        return limit if 0 < limit < 100 else None


class Counted(NamedTuple):
    """Bytes of GPU memory as HAMi-core counts them: three kinds, and all of it."""

    context: int
    module: int
    data: int
    total: int


class HamiCounts(NamedTuple):
    """HAMi-core's counts in one region, of its slots' owners."""

    memory: tuple[Counted, ...]  # by device; empty where a slot's owner is unknown
    last_kernel: int  # Unix time, 0 for never


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

    ``ns_pid`` is its PID in its container. ``sm_util`` is in per cent, ``memory`` in bytes. ``no_slot`` explains why
    HAMi doesn't know it; null if it owns a slot. ``sm_util_why``: NVML's 0 is not believed, because a watcher disputes
    it.
    """

    host_pid: int
    ns_pid: int | None
    device_uuid: str
    container_id: str | None
    pod_uid: str | None
    container_name: str | None
    namespace: str | None
    pod: str | None
    comm: str | None  # the process's name: at most 15 arbitrary bytes
    sm_util: int | None
    memory: int | None
    no_slot: SampleReason | None
    sm_util_why: str | None = None


class ContainerUse(Struct, frozen=True):
    """Use of one GPU by one container ``since`` the daemon first saw it there (Unix time). Null means unknown.

    ``gpu_seconds`` is SM utilization from 0 to 1 times seconds, integrated from the device's own samples and divided
    among its processes. ``error`` is its largest error as a share of it: 0.03, and more where time is unknown or
    containers used the GPU at once.
    ``unknown_seconds`` is the time without an answer from NVML, in none of the sums. ``energy`` is an estimate in
    joules: the GPU's power in proportion to use. ``used_1m`` and ``used_5m`` are mean utilization (of up to 10 s more),
    ``core_limit`` is in per cent. ``idle_since`` is when its processes, which still hold memory, last used the GPU,
    later by the unknown time. ``xids`` counts the GPU's errors meanwhile.
    """

    namespace: str | None
    pod: str | None
    container_name: str | None
    pod_uid: str | None
    container_id: str | None
    device_uuid: str
    since: float
    gpu_seconds: float
    memory_byte_seconds: float
    unknown_seconds: float
    energy: float | None
    used_1m: float | None
    used_5m: float | None
    idle_since: float | None
    core_limit: int | None
    limit_state: LimitState
    xids: int
    error: float | None = None


class WithoutSlot(Struct, frozen=True):
    """Process on a GPU that has had no slot ``since`` then (Unix time): HAMi-core limits nothing there.

    ``causes`` are read from ``/proc``; empty until it was read, and for processes of the host.
    """

    process: Process
    since: float
    causes: tuple[BypassReason, ...] = ()


class UsageReport(NamedTuple):
    """Everything that the accounts say."""

    containers: tuple[ContainerUse, ...] = ()
    without_slot: tuple[WithoutSlot, ...] = ()
    unused_joules: Mapping[str, float] = MappingProxyType({})  # by device, while no process used it


class Worker(Struct, frozen=True):
    """One kind of child: its starts and failures so far, and the last failure."""

    name: str
    starts: int
    failures: int
    last_failure: str | None


class PassSeconds(Struct, frozen=True):
    """Durations of a step: ``counts`` is how many took at most each bound, in seconds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    observations: int
    total: float


class Source(Struct, frozen=True):
    """Source of PIDs. ``not_used`` explains why others aren't used, ``incomplete`` why it needs help.

    ``not_ready`` is why it isn't trusted yet, null once it has found the canary. The kernel's map has room for
    ``map_size`` processes, 0 without one.
    """

    name: str
    not_used: dict[str, str]
    incomplete: str | None
    not_ready: str | None
    processes: int
    map_size: int
    counters: dict[str, int]


class Policy(Struct, frozen=True):
    """Which number ``hostpid`` must be: ``namespace`` is ``host``, ``container`` or ``unknown``.

    ``origin`` is ``by version``, ``forced`` or ``unknown``; ``watchers`` counts containers that confirm or doubt it.
    """

    namespace: str
    why: str
    origin: str
    watchers: dict[str, int]


class Snapshot(NamedTuple):
    """Everything, as of Unix time ``at``. Counters only ever grow.

    ``passed_at`` is the last pass's end, ``collected_at`` NVML's last answer; Unix time, 0: never.
    """

    at: float
    started_at: float
    passes: int
    passed_at: float
    pass_seconds: PassSeconds
    source: Source
    policy: Policy
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
    settings: tuple[Setting, ...] = ()
    holder: str = ""  # PID of the daemon that must end before this one writes
    interval: float = 0.0  # seconds between two full passes
    standing: Mapping[str, str] = MappingProxyType({})  # troubles in the log that last: why, by event
    unwatched: int = 0  # regions that the kernel reports no changes of
    hami_counts: Mapping[str, HamiCounts] = MappingProxyType({})  # by path; only with ``--hami-metrics``
    over_budget: Mapping[str, float] = MappingProxyType({})  # since when (Unix time), by account
    nvml_seconds: PassSeconds = PassSeconds(bounds=(), counts=(), observations=0, total=0.0)  # of collections
    used: Callable[[], UsageReport] = UsageReport  # the accounts, as of the call

    def standstill(self) -> str:
        """Explain why the daemon should be restarted; empty while passes are made, or before its turn."""
        age = time.time() - (self.passed_at if self.passes else self.started_at)
        if self.holder or age <= max(_STANDS_SECONDS, _STANDS_INTERVALS * self.interval):
            return ""
        if self.passes:
            return f"the last pass over the slots is {age:.0f} s old"
        return f"no pass over the slots was made in the {age:.0f} s since the start"

    def slot_counts(self) -> SlotCounts:
        """Count all slots by state."""
        return tally(*(region.slots for region in self.regions))

    def unresolved(self) -> Iterator[tuple[RegionReport, SlotReport]]:
        """Yield every unresolved slot with its region."""
        return ((region, slot) for region, slot in self.slots() if slot.unresolved is not None)

    def slots(self) -> Iterator[tuple[RegionReport, SlotReport]]:
        """Yield every slot in use with its region."""
        return ((region, slot) for region in self.regions for slot in region.slots)
