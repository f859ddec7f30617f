"""One immutable picture of what the daemon knows, swapped whole after a pass.

The API, the metrics and the command line read this and nothing else. None is "not known" everywhere. The classes of
msgspec's are sent by the API as they are: their names, fields and docstrings are in ``/v1/openapi.json``. Tenants
choose how many slots and regions there are, so only what is their own is kept: `resolver.api.shapes` adds the rest.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, overload

from msgspec import Struct

from resolver.reasons import RepairReason, SampleReason, UnresolvedReason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resolver.config import Setting
    from resolver.gpu.attribution import Joined
    from resolver.gpu.inventory import Inventory
    from resolver.hami.hostpid_policy import Origin
    from resolver.hami.packed_slots import PackedSlots
    from resolver.reasons import RegionReason

#: A daemon whose last pass is older than this, or than so many intervals, is unhealthy.
_STANDS_SECONDS, _STANDS_INTERVALS = 10.0, 20


class SlotFacts(Struct, frozen=True):
    """What a slot that is in use holds, and what was found out about it: kept here, and sent by the API as it is.

    ``pid`` and ``hostpid`` are what the slot says; ``host_pid`` is its verified owner, None while it is unresolved.
    ``repaired`` is why it was last written.
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

    ``utilization`` is per used device, in per cent, None where it is not known; ``sm_util`` is what the slot says.
    ``stuck`` says why ``sm_util`` does not stay what NVML says though ``hostpid`` is right; empty while it does.
    ``container_id`` is the owner's, where the region is a ResourceClaim's and so of any number of containers.
    """

    sm_util: tuple[int, ...]
    utilization: tuple[int | None, ...]
    stuck: str = ""
    container_id: str = ""


class UnownedCode:
    """What is known of a slot that nobody is known to own, in one byte; 0 is none."""

    UNOWNED: Final = 1  # in use, and there is no reason yet why nobody is known to own it
    REASON: Final = 0x1F
    DEAD: Final = 0x20
    ABANDONED: Final = 0x40  # dead because nobody has the file open
    UNSURE: Final = 0x80  # the file was touched since it was called dead
    _REASONS: Final = tuple(UnresolvedReason)

    @classmethod
    def of(cls, why: UnresolvedReason | None) -> int:
        """The code of a slot that is not dead."""
        return cls.UNOWNED if why is None else cls.UNOWNED + 1 + cls._REASONS.index(why)

    @classmethod
    def reason(cls, code: int) -> UnresolvedReason | None:
        """Why nobody is known to own the slot."""
        number = (code & cls.REASON) - cls.UNOWNED - 1
        return cls._REASONS[number] if number >= 0 else None


class SlotCounts(NamedTuple):
    """How many slots of a region are what."""

    in_use: int
    dead: int
    repaired: int
    stuck: int
    unresolved: Mapping[UnresolvedReason, int]


class SlotReports(Sequence[SlotReport]):
    """The slots of one region: those with an owner, then those without, of which little is kept.

    A `SlotReport` of an unowned slot is made when it is asked for: a tenant can fill 1,024 slots in each of its files.
    """

    __slots__ = ("_codes", "_devices", "_owned", "_slots", "_unowned")

    def __init__(self, owned: tuple[SlotReport, ...], slots: PackedSlots, codes: bytes, devices: int) -> None:
        """``codes`` are `UnownedCode`, one for each of ``slots``."""
        self._owned, self._slots, self._codes, self._devices = owned, slots, codes, devices
        self._unowned = len(codes) - codes.count(0)

    def __len__(self) -> int:
        return len(self._owned) + self._unowned

    def __iter__(self) -> Iterator[SlotReport]:
        yield from self._owned
        if not self._unowned:
            return
        nothing: tuple[int | None, ...] = (None,) * self._devices
        idle: tuple[int | None, ...] = (0,) * self._devices
        for index, code in enumerate(self._codes):
            if code:
                slot, dead = self._slots[index], bool(code & UnownedCode.DEAD)
                yield SlotReport(
                    pid=slot.pid,
                    slot=index,
                    hostpid=slot.hostpid,
                    host_pid=None,
                    dead=dead,
                    unresolved=None if dead else UnownedCode.reason(code),
                    repaired=None,
                    sm_util=slot.sm_util,
                    utilization=idle if dead else nothing,
                )

    @overload
    def __getitem__(self, index: int) -> SlotReport: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[SlotReport]: ...
    def __getitem__(self, index: int | slice) -> SlotReport | Sequence[SlotReport]:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SlotReports) and not self._unowned and not other._unowned:
            return self._owned == other._owned  # one by one, the same object is equal at once
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash((self._owned, self._codes))

    def tally(self) -> SlotCounts:
        """Counted without making the reports of unowned slots."""
        owned = tally(self._owned)
        dead, unresolved = owned.dead, Counter(owned.unresolved)
        for code in set(self._codes):
            count = self._codes.count(code)
            if code & UnownedCode.DEAD:
                dead += count
            elif (why := UnownedCode.reason(code)) is not None:
                unresolved[why] += count
        return SlotCounts(
            in_use=len(self), dead=dead, repaired=owned.repaired, stuck=owned.stuck, unresolved=unresolved
        )


def tally(slots: Iterable[SlotReport]) -> SlotCounts:
    """How many of the slots are what."""
    if isinstance(slots, SlotReports):
        return slots.tally()
    listed = tuple(slots)
    return SlotCounts(
        in_use=len(listed),
        dead=sum(slot.dead for slot in listed),
        repaired=sum(slot.repaired is not None for slot in listed),
        stuck=sum(bool(slot.stuck) for slot in listed),
        unresolved=Counter(slot.unresolved for slot in listed if slot.unresolved is not None),
    )


class RegionFacts(Struct, frozen=True):
    """A cache file and whose it is: kept here, and sent by the API as it is.

    ``container_id`` is that of its slots' owners, None until one is resolved, and where they are of several containers.
    ``claim`` is the UID of the ResourceClaim whose it is. ``placement`` is a row of `hami.placements`.
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


class RegionReport(RegionFacts, frozen=True, kw_only=True):
    """One shared region with its slots.

    ``limit`` and ``sm_limit`` are what the file says, and so its tenant: bytes of memory on each device, 0 without a
    limit, and per cent of its cores, 0 or 100 and more without one. ``container_ids`` are those of all its slots'
    owners.
    """

    slots: Sequence[SlotReport]
    limit: tuple[int, ...] = ()
    sm_limit: tuple[int, ...] = ()
    container_ids: tuple[str, ...] = ()

    def memory_limit(self, device: int) -> int | None:
        """Bytes that it may hold on one of ``device_uuids``, None without a limit."""
        return (self.limit[device] if device < len(self.limit) else 0) or None

    def core_limit(self, device: int) -> int | None:
        """Per cent of the cores of one of ``device_uuids``, None without a limit."""
        limit = self.sm_limit[device] if device < len(self.sm_limit) else 0
        return limit if 0 < limit < 100 else None


class Counted(NamedTuple):
    """Bytes of GPU memory as HAMi-core counts them for its processes: three kinds, and all of it."""

    context: int
    module: int
    data: int
    total: int


class HamiCounts(NamedTuple):
    """What HAMi-core says in one region of the processes that own its slots.

    ``memory`` is by device, and empty where a slot's owner is unknown. ``last_kernel`` is Unix time, 0 for never.
    """

    memory: tuple[Counted, ...]
    last_kernel: int


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
    settings: tuple[Setting, ...] = ()
    holder: str = ""  # PID of the daemon whose end this one waits for before it writes
    unwatched: int = 0  # regions that the kernel reports no changes of
    not_measured: str = ""  # why the driver was not measured; empty if it was
    hami_counts: Mapping[str, HamiCounts] = MappingProxyType(
        {}
    )  # by region's path; with ``--hami-metrics`` only

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

    def tallies(self) -> Iterator[SlotCounts]:
        """How many slots are what, region by region."""
        return (tally(region.slots) for region in self.regions)

    def unresolved(self) -> Iterator[tuple[RegionReport, SlotReport]]:
        """Every slot that could not be resolved, with its region."""
        return (
            (region, slot) for region in self.regions for slot in region.slots if slot.unresolved is not None
        )
