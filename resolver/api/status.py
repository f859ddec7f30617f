"""The daemon's state and its problems: ``/v1/status`` serves them, and commands, doctor and systemd show them."""

import os
import time
from collections import Counter
from collections.abc import Iterator

from msgspec import Struct

from resolver.base.counters import CounterName
from resolver.base.reasons import STARTING, TroubleReason
from resolver.base.text import some
from resolver.base.version import VERSION
from resolver.config import Setting
from resolver.hami.placements import BARE
from resolver.state import PassSeconds, Policy, Snapshot, Source, Worker


class DaemonTrouble(Struct, frozen=True):
    """Problem of the daemon: a fixed ``reason``, its meaning ``what``, the cause ``why``, and the ``fix``.

    ``grave``: some of the daemon's work isn't done because of it.
    """

    reason: str
    grave: bool
    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"

    def with_fix(self) -> str:
        """Format the problem, with its fix if it is grave."""
        return f"{self}; fix: {self.fix}" if self.grave else str(self)


def troubles(snapshot: Snapshot) -> list[DaemonTrouble]:
    """Return all current problems, gravest first."""
    why_by_reason = dict(_causes(snapshot))
    result = []
    for reason in TroubleReason:
        if why := why_by_reason.get(reason):
            sentence, fix = reason.for_terminal()
            fix = fix.replace("SOURCE", snapshot.source.name).replace("/PID/", f"/{os.getpid()}/")
            result.append(DaemonTrouble(reason=reason, grave=reason.grave, what=sentence, why=why, fix=fix))
    return result


def _causes(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """Yield every reason with its cause, which is empty without that problem."""
    yield from snapshot.standing.items()
    yield TroubleReason.STALLED, snapshot.standstill()
    yield TroubleReason.NOT_READY, snapshot.source.not_ready or ""
    yield TroubleReason.NVML_UNAVAILABLE, snapshot.joined.error.replace(STARTING, "")
    yield TroubleReason.SOURCE_INCOMPLETE, snapshot.source.incomplete or ""
    yield TroubleReason.DRY_RUN, "so it writes nothing" if snapshot.dry_run else ""
    skipped = Counter(reason for reason in snapshot.rejected.values() if reason.grave).most_common()
    yield TroubleReason.FILES_SKIPPED, ", ".join(f"{count} {why}" for why, count in skipped)
    unresolved = snapshot.slot_counts().unresolved.most_common()
    yield TroubleReason.SLOTS_UNRESOLVED, ", ".join(f"{count} {why}" for why, count in unresolved)
    over = sorted(snapshot.over_budget.items(), key=lambda item: item[1])
    since = (
        f"{os.path.basename(name)} since {time.strftime('%H:%M:%S', time.gmtime(at))} UTC"
        for name, at in over
    )
    yield TroubleReason.OVER_BUDGET, some(since)
    count = snapshot.counters.get(CounterName.INTERNAL_ERRORS, 0)
    yield (
        TroubleReason.INTERNAL_ERRORS,
        f"{count} time{'s' if count > 1 else ''} since its start" if count else "",
    )


class Driver(Struct, frozen=True):
    """NVML: the driver's ``version``, the time of its last answer, and why it fails now (``error``)."""

    version: str | None
    collected_at: float | None
    error: str | None
    gpus: int
    gpus_unhealthy: int


class Totals(Struct, frozen=True):
    """Current numbers."""

    containers: int
    regions: int
    regions_rejected: int
    slots: int
    slots_dead: int
    slots_repaired: int
    slots_unresolved: int
    samples_unresolved: int
    processes: int


class Found(Struct, frozen=True):
    """Number of repaired cache files of one scheduler in one directory, null for those inside containers."""

    placement: str
    directory: str | None
    regions: int


class Status(Struct, frozen=True):
    """``/v1/status``: the daemon's state. ``counters`` and ``api`` only grow, except ``connected``.

    ``idle_since`` is the earliest last use of a GPU, among containers that hold memory of it and are idle.
    ``core_limits`` counts containers with a core limit on a GPU by `LimitState`, ``without_slot`` processes that have
    been on a GPU for 30 s without a slot, by reason.
    """

    at: float
    version: str
    started_at: float
    host_pid: int
    dry_run: bool
    passes: int
    pass_seconds: PassSeconds
    source: Source
    troubles: list[DaemonTrouble]
    policy: Policy
    driver: Driver
    totals: Totals
    idle_since: float | None
    core_limits: dict[str, int]
    without_slot: dict[str, int]
    found: list[Found]
    workers: list[Worker]
    counters: dict[str, int]
    api: dict[str, int]
    settings: list[Setting]


def state_of(snapshot: Snapshot, api: dict[str, int]) -> Status:
    """Return the daemon's state. ``api`` has the API's own counters."""
    slots = snapshot.slot_counts()
    gpus, joined, used = snapshot.inventory.gpus, snapshot.joined, snapshot.used()
    return Status(
        at=snapshot.at,
        version=VERSION,
        started_at=snapshot.started_at,
        host_pid=os.getpid(),
        dry_run=snapshot.dry_run,
        passes=snapshot.passes,
        pass_seconds=snapshot.pass_seconds,
        source=snapshot.source,
        troubles=troubles(snapshot),
        policy=snapshot.policy,
        driver=Driver(
            version=snapshot.driver_version,
            collected_at=snapshot.collected_at or None,
            error=joined.error or None,
            gpus=len(gpus),
            gpus_unhealthy=sum(not gpu.healthy for gpu in gpus),
        ),
        totals=Totals(
            containers=len(snapshot.containers),
            regions=len(snapshot.regions),
            regions_rejected=len(snapshot.rejected),
            slots=slots.in_use,
            slots_dead=slots.dead,
            slots_repaired=slots.repaired,
            slots_unresolved=slots.unresolved.total(),
            samples_unresolved=len(joined.orphans),
            processes=len(snapshot.gpu_processes),
        ),
        idle_since=min((use.idle_since for use in used.containers if use.idle_since), default=None),
        core_limits=Counter(use.limit_state.value for use in used.containers if use.core_limit is not None),
        without_slot=Counter(process.process.no_slot or "" for process in used.without_slot),
        found=_found(snapshot),
        workers=list(snapshot.workers),
        counters=dict(snapshot.counters),
        api=api,
        settings=list(snapshot.settings),
    )


def _found(snapshot: Snapshot) -> list[Found]:
    counts = Counter(
        (
            region.placement or "",
            "" if region.placement == BARE.name else os.path.dirname(os.path.dirname(region.path)),
        )
        for region in snapshot.regions
    )
    return [Found(name, where or None, count) for (name, where), count in sorted(counts.items())]
