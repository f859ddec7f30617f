"""The daemon: passes over the slots, collections from NVML, and what both need to live side by side.

One thread, one event loop. A pass reads every region (some microseconds each), looks up owners that are not
known yet, and sends what has to change to the slot writer. NVML is asked beside it; a driver that hangs delays
no repair.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from resolver import __version__, api, log
from resolver.budget import Slices
from resolver.config import (
    FIXED_AT_START,
    OFF,
    HostpidNamespace,
    Settings,
    SourceName,
    described,
)
from resolver.containers.pod_names import PodNames
from resolver.daemon.driver_measurement import DriverTruth
from resolver.daemon.notify import Systemd
from resolver.daemon.rights import Rights
from resolver.daemon.running_containers import Census
from resolver.errors import AccessDenied, ProcessGone
from resolver.events import Events
from resolver.gpu.attribution import NOTHING, Joined, join
from resolver.gpu.inventory import NONE as NO_INVENTORY
from resolver.gpu.inventory import changes
from resolver.gpu.sampler import SAMPLE_SECONDS, Sampler
from resolver.hami.hostpid_policy import Policy, decide
from resolver.linux.procfs import Procfs
from resolver.lookup.cached import LiveLookup
from resolver.pids.ladder import Ladder
from resolver.pids.listing import Listing
from resolver.pids.pidmap import PidMap
from resolver.pids.scan import ScanSource
from resolver.pids.source import close as close_source
from resolver.reasons import SampleReason
from resolver.repair.repairer import Repairer
from resolver.state import PassSeconds, Process, Snapshot, View, Worker

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping

    from resolver.api import Entrances
    from resolver.gpu.attribution import Used
    from resolver.gpu.sampler import Collection
    from resolver.pids.source import Source

_ERRORS_BEFORE_END = 10
_DRIVER_SECONDS = 1.0  # a driver that answered before may take this long; then what it said counts no more
_FOLLOW_EVERY = 0.01  # seconds between two looks at values that a watcher makes wrong every 120 ms
#: A process whose last sample is older (seconds; drivers take some six a second) seems to idle; and at the earliest so
#: many seconds after an answer NVML is asked again for it.
_SEEMS_IDLE, _ASK_AGAIN_AFTER = 0.3, 0.25
_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


def _inventory_of(snapshot: Snapshot) -> tuple[int, str]:
    return snapshot.inventory.version, snapshot.joined.error


class Service:
    """Everything the daemon holds. ``snapshot`` is replaced whole after each pass."""

    def __init__(
        self,
        settings: Settings,
        procfs: Procfs | None = None,
        *,
        in_charge: bool = False,
        origins: Mapping[str, str] | None = None,
        holder: str = "",
    ) -> None:
        """``in_charge``: the whole process is this daemon's, so drop its capabilities, and serve the API.

        ``origins`` tells where each setting comes from, for those who ask. ``holder`` is the PID of the daemon that
        writes on this node: nothing is written, and the API not served, until `take_over`.
        """
        _raise_descriptor_limit()
        self.settings = settings
        self._origins = dict(origins or {})
        self._described = described(settings, self._origins)
        self.events = Events()
        self.journal = log.Journal(self.events)
        self.counters: Counter[str] = Counter()
        self.procfs = procfs or Procfs()
        self.pidmap = PidMap(Listing(ScanSource(self.procfs)))
        self.ladder = Ladder(
            settings.source, self.procfs, settings.map_size, self.pidmap.use, self.journal.tell
        )
        self.repairer = Repairer(settings, self.procfs, self.pidmap, self.counters, self.journal)
        self.sampler = Sampler()
        self.truth = DriverTruth(
            settings.run_dir, self.repairer.owners, self.procfs, self.pidmap, self.counters, self.journal
        )
        if in_charge:
            self.truth.enable(wanted=settings.hostpid_namespace is HostpidNamespace.AUTO)
        self.live = LiveLookup(self.procfs, self.pidmap)
        self.census = Census(
            self.procfs, self.pidmap, self.live, PodNames(settings.pod_logs_dir), self.journal
        )
        self.policy: Policy = decide(settings.hostpid_namespace, None)
        self.joined: Joined = NOTHING
        self.passes = 0
        self.started_at = time.time()
        self.collected_at = 0.0
        self._inventories = Events(1)  # who waits for the next picture with another inventory
        self.inventory = NO_INVENTORY
        self.snapshot: Snapshot | None = None
        self._pass_counts = [0] * len(_BOUNDS)
        self._pass_seconds = 0.0
        self._gpu_processes: tuple[Process, ...] = ()
        self._in_charge = in_charge
        self._rights = Rights(settings, self.ladder.steps, self.journal)
        self._policy_said: Policy | None = None
        self._new_settings: tuple[Settings, dict[str, str]] | None = None
        self._stopping = asyncio.Event()
        self._contested = asyncio.Event()  # some tenant's watcher writes wrong values
        self._hurry = asyncio.Event()
        self._ask_again = asyncio.Event()  # NVML, before its interval is over
        self._trouble = asyncio.Event()  # a source has failed
        self.holder = holder
        self._entrances: Entrances | None = None
        self._our_turn = asyncio.Event()
        if not holder:
            self._our_turn.set()
        self._failed_source: Source | None = None

    # -- life ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until `stop` is called. `CannotKnow` if the source that was asked for does not work here."""
        if self._in_charge:
            self._entrances = api.make_entrances(self.settings, self.journal)  # nobody can reach them yet
            self._give_up_rights()
        if self.settings.source != SourceName.AUTO:
            try:
                await self._unless_stopped(self.start_source())
            except BaseException:
                self.close()
                raise
        self.journal.log.info(
            "started",
            version=__version__,
            source=self.settings.source,
            containers_dir=list(self.settings.containers_dir),
            dry_run=self.settings.dry_run,
            settings=self._described,
        )
        tasks = [
            asyncio.create_task(self._every("nvml_interval", self.collect_once, self._ask_again)),
            asyncio.create_task(self._passes()),
        ]
        if self.settings.source == SourceName.AUTO:
            tasks.append(asyncio.create_task(self._climb()))
        else:
            tasks.append(asyncio.create_task(self._every("nvml_interval", self._tend, self._trouble)))
        tasks.append(asyncio.create_task(self._follow()))
        if self._in_charge:
            tasks += [asyncio.create_task(serving) for serving in self._servers()]
            if (systemd := Systemd.from_environment()) is not None:
                tasks.append(asyncio.create_task(systemd.keep_told(self.view().snapshot, self._standstill)))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                task.result()  # a loop ends only by an error that nobody foresaw: let it be seen
        finally:
            for task in (*tasks, stopping):
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)
            source, counted = self.pidmap.source.name, dict(self.pidmap.counters())
            self.close()
        self.journal.log.info(
            "stopped", passes=self.passes, source=source, source_counters=counted, **dict(self.counters)
        )

    def _standstill(self) -> str:
        return self.view().snapshot().standstill(self.settings.interval)

    async def _passes(self) -> None:
        if self.holder:
            self.journal.log.info("waiting", holder=self.holder, why="another daemon writes on this node")
        await self._our_turn.wait()
        await self._every("interval", self.pass_once, self._hurry)

    async def _follow(self) -> None:
        """Between the passes, only while some tenant's watcher writes wrong values: put them right after its ticks."""
        while True:
            await self._contested.wait()
            with contextlib.suppress(
                OSError
            ):  # no descriptors left, say: the next pass meets it too, and tells
                await self.repairer.follow()
            await asyncio.sleep(_FOLLOW_EVERY)

    def take_over(self) -> None:
        """The daemon that wrote on this node has ended: begin."""
        self.journal.log.info("took_over", holder=self.holder)
        self.holder = ""
        self._our_turn.set()

    async def _every(self, setting: str, step: Callable[[], Awaitable[None]], hurry: asyncio.Event) -> None:
        """Repeat at a fixed pace, sooner in a hurry. A step that took long delays the next, it does not double it."""
        due, errors = time.monotonic(), 0
        while not self._stopping.is_set():
            try:
                await step()
                errors = 0
            except Exception as error:
                if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                    self._out_of_descriptors()
                else:
                    # A defect of ours, or a file system that fails in a new way: shown, counted, and survived.
                    errors += 1
                    self.counters["internal_errors"] += 1
                    self.journal.log.exception("internal_error", step=setting)
                    if errors >= _ERRORS_BEFORE_END:
                        raise
            due = max(due + getattr(self.settings, setting), time.monotonic())
            # Not wait_for: before Python 3.12 it can swallow a cancellation, and the daemon would not end.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due - time.monotonic()):
                    await hurry.wait()
                due = time.monotonic()  # the pace goes on from here
            hurry.clear()

    async def start_source(self) -> None:
        """Find the best source, then give up the rights that only its first start took."""
        await self.ladder.start()
        self._rights.source_started()
        self._give_up_rights()

    def _give_up_rights(self) -> None:
        if self._in_charge:
            self._rights.give_up(self.truth.rights)

    async def _climb(self) -> None:
        """With ``auto`` nothing waits for the best source: the scan does until it is there."""
        await self.start_source()
        await self._every("nvml_interval", self._tend, self._trouble)

    async def _serve(self) -> None:
        await self._our_turn.wait()  # the socket is the other daemon's as long
        if self._entrances is not None:
            await api.serve(self.view(), self.settings, self.journal, self._entrances)

    def _servers(self) -> Iterator[Coroutine[Any, Any, None]]:
        """Who answers others. Imported late: without them the daemon weighs a third less."""
        yield self._serve()
        if self.settings.metrics_addr != OFF:
            from resolver import metrics

            yield metrics.serve(self.view(), self.settings, self.journal)
        if self.settings.broker:
            from resolver.serve import broker

            for reason in broker.Refusal:
                # There from the start, for a rate to start from.
                self.counters[f"broker_refused_{reason}"] += 0
            yield broker.serve(
                self.settings, self.procfs, self.pidmap, lambda: self.policy, self.journal, self.counters
            )

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for the work, which may take a compiler's time, or for `stop`."""
        working, stopping = asyncio.create_task(work), asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            working.cancel()
            stopping.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    def _look_after_source(self) -> None:
        source, trouble = self.pidmap.source, self.journal.trouble
        if self.ladder.keep_up(source):
            if source is not self._failed_source:
                self._failed_source = source  # once each: the next try to replace it comes at the usual pace
                self._trouble.set()
            return
        trouble("source", source.shortage(), "source_incomplete", "source_complete", source=source.name)

    async def _tend(self) -> None:
        await self.ladder.tend(self.pidmap.source)

    def _out_of_descriptors(self) -> None:
        self.counters["out_of_descriptors"] += 1
        self.repairer.shed()
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        why = f"all {limit} descriptors are in use, so some regions are not looked after: raise the limit (ulimit -n)"
        self.journal.trouble("descriptors", why, "out_of_descriptors", "")

    def stop(self) -> None:
        """End `run` now."""
        self._stopping.set()

    def reload(self, settings: Settings, origins: Mapping[str, str] | None = None) -> None:
        """Take over new settings at the next pass."""
        self._new_settings = settings, dict(origins or {})
        self._hurry.set()

    def _use(self, wanted: Settings, origins: dict[str, str]) -> None:
        """Those settings that cannot change while running keep their value, and that is said."""
        fixed = {name: getattr(self.settings, name) for name in FIXED_AT_START}
        ignored = [name for name, value in fixed.items() if getattr(wanted, name) != value]
        new = {name: getattr(wanted, name) for name in Settings.__struct_fields__} | fixed
        changed = [name for name, value in new.items() if value != getattr(self.settings, name)]
        self.settings = Settings(**new)
        kept = {name: self._origins[name] for name in FIXED_AT_START if name in self._origins}
        self._origins = origins | kept
        self._described = described(self.settings, self._origins)
        self.repairer.use(self.settings)
        log.setup(self.settings.log_format, self.settings.log_level)
        self._decide()
        self.journal.log.info("settings_reloaded", changed=changed, need_a_restart=ignored)

    def close(self) -> None:
        """Give everything back: children, handles, files."""
        self.sampler.stop()
        self.truth.close()
        self.repairer.close()
        close_source(self.pidmap.source)
        if self._entrances is not None:
            self._entrances.close()

    # -- the two steps ------------------------------------------------------------------------------

    async def collect_once(self) -> None:
        """Ask NVML, join what it says, and see what the driver's version means for ``hostpid``."""
        collection = await self.sampler.collect(max(_DRIVER_SECONDS, self.settings.nvml_interval))
        trouble = self.journal.trouble
        self.counters["implausible_samples"] = self.sampler.implausible
        for kind, fields in changes(self.inventory, collection.inventory):
            level = "warning" if kind in ("gpu_gone", "gpu_unhealthy") else "info"
            self.journal.tell(kind, level=level, **fields)
        self.inventory = collection.inventory
        if not collection.error:
            self.collected_at = collection.at
        trouble("nvml", collection.error, "nvml_unavailable", "nvml_available")
        for uuid, device in collection.devices.items():
            trouble(f"device {uuid}", device.why, "device_without_samples", "device_samples", device=uuid)
        owners = self.repairer.owners
        self.joined = await join(collection, owners, owners.container_ids(), self.procfs, self.pidmap)
        self._decide()
        if self.policy.origin != "forced":
            self.truth.consider(collection)
        await self._count_containers()
        self._expect_idleness(collection)

    def _expect_idleness(self, collection: Collection) -> None:
        """Ask NVML again when it can say 0 of a process that seems to idle, where no watcher will say so."""
        now = time.time()
        ages = {
            (nvml_pid, uuid): now - stamp / 1e6
            for uuid, device in collection.devices.items()
            for nvml_pid, (stamp, _) in device.newest.items()
            if now - stamp / 1e6 > _SEEMS_IDLE  # the oldest count as busy still, or they were not in here
        }
        oldest = (
            max((ages.get(each, 0.0) for each in self.repairer.lingering()), default=0.0) if ages else 0.0
        )
        if oldest:
            wait = max(SAMPLE_SECONDS - oldest + 0.01, _ASK_AGAIN_AFTER)
            asyncio.get_running_loop().call_later(wait, self._ask_again.set)

    async def pass_once(self, *, patient: bool = True) -> None:
        """One pass over the slots, and a new snapshot."""
        if self._new_settings is not None:
            wanted, self._new_settings = self._new_settings, None
            self._use(*wanted)
        self._look_after_source()
        began = time.perf_counter()
        await self.repairer.pass_once(self.policy, self.joined, patient=patient)
        self._timed(time.perf_counter() - began)
        if self.repairer.contested():
            self._contested.set()
        else:
            self._contested.clear()
        self.passes += 1
        before, self.snapshot = self.snapshot, self.picture()
        if before is None or _inventory_of(before) != _inventory_of(self.snapshot):
            self._inventories.publish("inventory", {})

    def _decide(self) -> None:
        version, truth = self.sampler.driver_version, self.truth
        self.policy = decide(self.settings.hostpid_namespace, version, truth.get(version), truth.unable)
        if version and self.policy.origin == "measured" and truth.rights:
            truth.disable(version)
            self._give_up_rights()
        if self.policy != self._policy_said:
            self._policy_said = self.policy
            self._hurry.set()
            self.journal.tell(
                "policy",
                hostpid_namespace=self.policy.namespace or "unknown",
                why=self.policy.why,
                origin=self.policy.origin,
            )

    def _timed(self, seconds: float) -> None:
        self._pass_seconds += seconds
        for index, bound in enumerate(_BOUNDS):
            self._pass_counts[index] += seconds <= bound

    async def _count_containers(self) -> None:
        """Who runs on this node, and which of their processes use a GPU."""
        owners, regions = self.repairer.owners, dict[str, list[str]]()
        for region in self.repairer.reports():
            if region.container_id:
                regions.setdefault(region.container_id, []).append(region.path)
        users = owners.by_container()
        for used in self.joined.used:
            if used.no_slot in (SampleReason.NO_SLOT, SampleReason.NO_SHARED_REGION):
                users.setdefault(used.container, used.host_pid)
        await self.census.refresh(users, regions)
        slices, processes = Slices(), []
        for used in self.joined.used:
            processes.append(self._gpu_process(used))
            await slices.breathe()
        self._gpu_processes = tuple(processes)

    def _gpu_process(self, used: Used) -> Process:
        owner = self.repairer.owners.process(used.host_pid) if used.no_slot is None else None
        container_id = used.container or self.repairer.owners.container_id(used.host_pid)
        ns_pid: int | None = owner.ns_pids[-1] if owner else None
        comm: str | None = None
        with contextlib.suppress(ProcessGone, AccessDenied):
            if owner is None:
                ns_pid = self.procfs.ns_pids(used.host_pid)[-1]
            comm = self.procfs.comm(used.host_pid)
        container = self.census.get(container_id)
        names: tuple[str | None, ...] = (None,) * 4
        if container is not None:
            names = container.pod_uid, container.container_name, container.namespace, container.pod
        pod_uid, separator, name = container_id.partition("_")
        if separator:  # of a process that has ended, its slot's directory is what is left
            names = pod_uid, name, *(each or None for each in self.census.pods.of(pod_uid))
        return Process(
            host_pid=used.host_pid,
            ns_pid=ns_pid,
            device_uuid=used.device_uuid,
            container_id=None if separator else container_id or None,
            pod_uid=names[0],
            container_name=names[1],
            namespace=names[2],
            pod=names[3],
            comm=comm or None,
            sm_util=used.sm_util,
            memory=used.memory,
            no_slot=used.no_slot,
        )

    def view(self) -> View:
        """What the API and the metrics are given."""
        return View(
            lambda: self.snapshot or self.picture(), self.live, self.procfs, self.events, self._inventories
        )

    def picture(self) -> Snapshot:
        """What is known now, as one immutable value."""
        discoveries = self.repairer.discoveries
        workers = [self.sampler.worker, self.repairer.writing.worker, self.truth.worker]
        workers += [worker for discovery in discoveries for worker in discovery.workers]
        return Snapshot(
            at=time.time(),
            started_at=self.started_at,
            passes=self.passes,
            pass_seconds=PassSeconds(_BOUNDS, tuple(self._pass_counts), self.passes, self._pass_seconds),
            source=self.pidmap.source.name,
            sources_not_used=dict(self.ladder.why_not),
            source_counters=self.pidmap.counters(),
            incomplete=self.pidmap.source.shortage() or self.pidmap.source.incomplete(),
            not_ready=self.ladder.not_ready(self.pidmap.source),
            processes=len(self.pidmap.source),
            map_size=self.settings.map_size,
            policy=self.policy.namespace or "unknown",
            policy_why=self.policy.why,
            policy_origin=self.policy.origin,
            driver_version=self.sampler.driver_version,
            inventory=self.inventory,
            regions=self.repairer.reports(),
            rejected=self.repairer.rejected(),
            missing_dirs=tuple(sorted({path for each in discoveries for path in each.missing_dirs})),
            containers=self.census.containers(),
            gpu_processes=self._gpu_processes,
            joined=self.joined,
            collected_at=self.collected_at,
            workers=tuple(Worker(w.name, w.starts, w.failures, w.last_failure or None) for w in workers),
            counters=dict(self.counters),
            dry_run=self.settings.dry_run,
            settings=self._described,
            holder=self.holder,
            not_measured=""
            if self.policy.origin in ("measured", "forced")
            else self.truth.unable or self.truth.why,
        )


def _raise_descriptor_limit() -> None:
    """A descriptor per region and per process: take what the system allows."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
