"""The daemon: passes over the slots, collections from NVML, and what both need to live side by side.

One thread, one event loop. A pass reads every region (some microseconds each), looks up owners that are not
known yet, and sends what has to change to the slot writer. NVML is asked beside it; a driver that hangs delays
no repair.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import select
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from resolver import __version__, log
from resolver.cgroup import parse_cgroup
from resolver.config import FIXED_AT_START, Settings
from resolver.containers import Containers, shared_directory
from resolver.errors import AccessDenied, ProcessGone, RegionRejected, ResolverError, WorkerFailed
from resolver.gpu.sampler import Sampler
from resolver.hami import writer
from resolver.hami.finder import RegionFinder
from resolver.hami.openat import open_directory
from resolver.hami.policy import Policy, decide
from resolver.hami.repairs import Order, RegionRepairs, SlotState, encode
from resolver.join import NOTHING, Joined, join
from resolver.pidmap import PidMap
from resolver.procfs import ProcessHandle, Procfs
from resolver.snapshot import RegionReport, SlotReport, Snapshot
from resolver.sources.choose import choose
from resolver.types import UnresolvedReason
from resolver.workers import Worker

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_DISCOVER_EVERY = 1.0
_WRITER_SECONDS = 1.0
_DEATHS_BEFORE_QUARANTINE = 3
_ERRORS_BEFORE_END = 10


class Service:
    """Everything the daemon holds. ``snapshot`` is replaced whole after each pass."""

    def __init__(self, settings: Settings, procfs: Procfs | None = None) -> None:
        self.settings = settings
        self.log = log.get()
        self.procfs = procfs or Procfs()
        self.pidmap = PidMap(choose(settings.source, self.procfs))
        self.containers = Containers(self.procfs, self.pidmap)
        self.finder = RegionFinder(settings.containers_dir)
        self.sampler = Sampler()
        self.writer = Worker("slot writer", "resolver.hami.writer", timeout=_WRITER_SECONDS)
        self.policy: Policy = decide(settings.hostpid_namespace, None)
        self._policy_said: Policy | None = None
        self.joined: Joined = NOTHING
        self.counters: Counter[str] = Counter()
        self.passes = 0
        self.regions: dict[str, RegionRepairs] = {}
        self.snapshot: Snapshot | None = None
        self._exits = select.epoll()
        self._watched: dict[int, SlotState] = {}
        self._without_pidfd: set[int] = set()
        self._container_ids: dict[int, str] = {}
        self._next_discovery = 0.0
        self._stopping = asyncio.Event()
        self._once_said: dict[str, str] = {}
        _raise_descriptor_limit()

    # -- life ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until `stop` is called."""
        self.log.info(
            "started",
            version=__version__,
            source=self.pidmap.source.name,
            containers_dir=list(self.settings.containers_dir),
            dry_run=self.settings.dry_run,
        )
        tasks = [
            asyncio.create_task(self._every("interval", self.pass_once)),
            asyncio.create_task(self._every("nvml_interval", self.collect_once)),
        ]
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                task.result()  # a loop ends only by an error that nobody foresaw: let it be seen
        finally:
            for task in (*tasks, stopping):
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)
            self.close()
        self.log.info("stopped", passes=self.passes, **dict(self.counters))

    async def _every(self, setting: str, step: Callable[[], Awaitable[None]]) -> None:
        """Repeat at a fixed pace. A step that took too long delays the next, it does not double it."""
        due, errors = time.monotonic(), 0
        while True:
            try:
                await step()
                errors = 0
            except Exception:
                # A defect of ours, or a file system that fails in a new way: shown, counted, and survived.
                errors += 1
                self.counters["internal_errors"] += 1
                self.log.exception("internal_error", step=setting)
                if errors >= _ERRORS_BEFORE_END:
                    raise
            due = max(due + getattr(self.settings, setting), time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    def stop(self) -> None:
        """End `run` after the step in progress."""
        self._stopping.set()

    def reload(self, settings: Settings) -> None:
        """Take over new settings; those that cannot change while running keep their value, and that is said."""
        fixed = {name: getattr(self.settings, name) for name in FIXED_AT_START}
        ignored = [name for name, value in fixed.items() if getattr(settings, name) != value]
        new = {name: getattr(settings, name) for name in Settings.__struct_fields__} | fixed
        if new["containers_dir"] != self.settings.containers_dir:
            for path in list(self.regions):
                self._drop(path)
            self.finder.close()
            self.finder, self._next_discovery = RegionFinder(new["containers_dir"]), 0.0
        changed = [name for name, value in new.items() if value != getattr(self.settings, name)]
        self.settings = Settings(**new)
        log.setup(self.settings.log_format, self.settings.log_level)
        self.log = log.get()
        self._decide()
        self.log.info("settings_reloaded", changed=changed, need_a_restart=ignored)

    def close(self) -> None:
        """Give everything back: children, handles, files."""
        self.writer.stop()
        self.sampler.worker.stop()
        for path in list(self.regions):
            self._drop(path)
        self.finder.close()
        self._exits.close()

    # -- NVML ---------------------------------------------------------------------------------------

    async def collect_once(self) -> None:
        """Ask NVML, join what it says, and see what the driver's version means for ``hostpid``."""
        collection = await self.sampler.collect()
        self._say_once("nvml", collection.error, "nvml_unavailable", "nvml_available")
        for uuid, device in collection.devices.items():
            self._say_once(
                f"device {uuid}", device.why, "device_without_samples", "device_samples", device=uuid
            )
        owners = {
            state.owner.process.host_pid
            for repairs in self.regions.values()
            for state in repairs.states.values()
            if state.owner is not None
        }
        ids = {self._container_ids[host_pid] for host_pid in owners if host_pid in self._container_ids}
        self.joined = join(collection, owners, ids, self.procfs, self.pidmap)
        self._decide()

    def _decide(self) -> None:
        self.policy = decide(self.settings.hostpid_namespace, self.sampler.driver_version)
        if self.policy != self._policy_said:
            self._policy_said = self.policy
            self.log.info("policy", hostpid_namespace=self.policy.namespace or "unknown", why=self.policy.why)

    def _say_once(self, what: str, error: str, bad: str, good: str, **where: str) -> None:
        """Log the beginning and the end of a trouble, not each time it is met."""
        before = self._once_said.get(what, "")
        if error and error != before:
            self.log.warning(bad, why=error, **where)
        elif before and not error:
            self.log.info(good, **where)
        self._once_said[what] = error

    # -- a pass -------------------------------------------------------------------------------------

    async def pass_once(self, *, patient: bool = True) -> None:
        """Find regions, read slots, find owners, repair. ``patient=False``: do not spare ``/proc``."""
        now = time.monotonic()
        self._discover(now)
        self._notice_exits()
        for path, repairs in list(self.regions.items()):
            try:
                gone = repairs.observe(repairs.region.read())
            except RegionRejected as why:
                self._reject(path, repairs, why)
                continue
            for state in gone:
                self._unwatch(state)
        self._find_owners(now, patient=patient)
        for repairs in list(self.regions.values()):
            await self._repair(repairs, now)
        self.passes += 1
        self.snapshot = self.picture()

    def _discover(self, now: float) -> None:
        full = now >= self._next_discovery
        if full:
            self._next_discovery = now + _DISCOVER_EVERY
        changes = self.finder.refresh(full)
        for region in changes.removed:
            self._drop(region.path)
        for region in changes.added:
            try:
                dir_fd = open_directory(os.path.dirname(region.path))
                try:
                    directory = shared_directory(self.procfs, dir_fd)
                finally:
                    os.close(dir_fd)
            except (OSError, ResolverError) as error:
                self.log.warning("region_unusable", path=region.path, why=str(error))
                continue
            self.regions[region.path] = RegionRepairs(region, directory)
            self.log.info(
                "region_found", container=region.dir_name, path=region.path, layout=region.layout.name
            )
        for path, why in changes.rejected:
            self.counters[f"rejected_{why.reason}"] += 1
            self.log.warning("region_rejected", path=path, reason=why.reason, why=why.detail)
        for path in self.settings.containers_dir:
            missing = path.rstrip("/") in self.finder.missing_dirs or path in self.finder.missing_dirs
            trouble = "it does not exist; waiting for it" if missing else ""
            self._say_once(
                f"dir {path}", trouble, "containers_dir_missing", "containers_dir_found", path=path
            )

    def _reject(self, path: str, repairs: RegionRepairs, why: RegionRejected) -> None:
        self.counters[f"rejected_{why.reason}"] += 1
        self.log.warning("region_rejected", path=path, reason=why.reason, why=why.detail)
        self.finder.reject(repairs.region, why)
        self._drop(path)

    def _drop(self, path: str) -> None:
        repairs = self.regions.pop(path, None)
        if repairs is None:
            return
        for state in repairs.states.values():
            self._unwatch(state)
        repairs.close()
        self.log.info("region_gone", container=repairs.region.dir_name, path=path)

    # -- processes ----------------------------------------------------------------------------------

    def _find_owners(self, now: float, *, patient: bool) -> None:
        due = [
            (repairs, state)
            for repairs in self.regions.values()
            for state in repairs.states.values()
            if state.due(now)
        ]
        # The map has to be younger than the sight of the slot: then a process that is not in it does not exist.
        if not due or not self.pidmap.refresh(unhurried=patient):
            return
        for repairs, state in due:
            found = self.containers.owner(repairs.directory, repairs.region.inode, state.slot.pid)
            state.found(found, now)
            if isinstance(found, ProcessHandle):
                self._watch(state, found)
            elif found is UnresolvedReason.NO_SUCH_PROCESS and state.looks > 1 and not state.dead:
                alive = any(other.owner is not None for other in repairs.states.values())
                state.dead = alive or self.containers.visible(repairs.directory)

    def _watch(self, state: SlotState, owner: ProcessHandle) -> None:
        self._watched[owner.fd] = state
        if owner.is_pidfd:
            self._exits.register(owner.fd, select.EPOLLIN)
        else:
            self._without_pidfd.add(owner.fd)
        with contextlib.suppress(ProcessGone, AccessDenied):
            container = parse_cgroup(self.procfs.cgroup(owner.process.host_pid))
            if container is not None:
                self._container_ids[owner.process.host_pid] = container.container_id

    def _unwatch(self, state: SlotState) -> None:
        """Forget a slot's process and give its handle back."""
        owner = state.owner
        if owner is None:
            return
        if self._watched.pop(owner.fd, None) is not None and owner.is_pidfd:
            self._exits.unregister(owner.fd)
        self._without_pidfd.discard(owner.fd)
        self._container_ids.pop(owner.process.host_pid, None)
        state.release()

    def _notice_exits(self) -> None:
        """One system call for all processes; before Linux 5.3 one look at each."""
        ended = [self._watched[fd] for fd, _ in self._exits.poll(0)] if self._watched else []
        for fd in self._without_pidfd:
            state = self._watched[fd]
            if state.owner is not None and not state.owner.alive():
                ended.append(state)
        for state in ended:
            self._unwatch(state)
            state.owner_ended()

    # -- writing ------------------------------------------------------------------------------------

    async def _repair(self, repairs: RegionRepairs, now: float) -> None:
        def conflict(state: SlotState, wait: float) -> None:
            self.counters["conflicts"] += 1
            self.log.warning(
                "conflict",
                container=repairs.region.dir_name,
                slot=state.slot.index,
                ns_pid=state.slot.pid,
                hostpid=state.slot.hostpid,
                why="another writer changed hostpid back",
                next_try_seconds=wait,
            )

        orders = list(
            repairs.plan(now, self.policy, self.joined.utilization, self.settings.write_utilization, conflict)
        )
        if self.settings.dry_run:
            for order in orders:
                self._would_write(repairs, order)
            return
        for start in range(0, len(orders), writer.MAX_ORDERS):
            if not await self._carry_out(repairs, orders[start : start + writer.MAX_ORDERS]):
                return

    async def _carry_out(self, repairs: RegionRepairs, orders: list[Order]) -> bool:
        region = repairs.region
        message, handles = encode(orders, region.layout.file_bytes)
        try:
            answer = await self.writer.request(message, [region.fd, *handles])
            if len(answer) != writer.RESULT.size * len(orders):
                raise self.writer.malformed("answered something malformed")
        except WorkerFailed as error:
            self._writer_failed(repairs, error)
            return False
        repairs.writer_deaths = 0
        for order, (outcome, word) in zip(orders, writer.RESULT.iter_unpack(answer), strict=True):
            self._written(repairs, order, outcome, word)
        return True

    def _writer_failed(self, repairs: RegionRepairs, error: WorkerFailed) -> None:
        """Leave the file alone for a while if it is to blame; a writer that somebody killed is tried again."""
        if error.waiting:
            return
        self.counters["writer_failures"] += 1
        repairs.writer_deaths += 1
        if error.own_fault or repairs.writer_deaths >= _DEATHS_BEFORE_QUARANTINE:
            repairs.writer_deaths = 0
            self.counters["quarantines"] += 1
            seconds = repairs.quarantine(time.monotonic())
            self.log.warning(
                "region_quarantined", container=repairs.region.dir_name, why=str(error), seconds=seconds
            )
        else:
            self.log.warning("writer_failed", container=repairs.region.dir_name, why=str(error))

    def _written(self, repairs: RegionRepairs, order: Order, outcome: int, word: int) -> None:
        state = order.state
        if outcome == writer.DONE and word == order.new:
            if order.device is None:
                self._repaired(repairs, order)
            else:
                self.counters["utilization_writes"] += 1
        elif outcome == writer.OWNER_GONE:
            self.counters["writes_undone"] += 1
            state.reason = UnresolvedReason.GONE
        elif outcome == writer.MOVED:
            self.counters["writes_undone"] += 1
        elif outcome == writer.NOT_WRITABLE:
            state.reason = UnresolvedReason.WRITE_FAILED
            why = "it cannot be opened for writing; mount the containers directory read-write"
            self._say_once(f"write {repairs.region.path}", why, "write_failed", "", path=repairs.region.path)
        elif order.device is None:
            self.counters["writes_missed"] += 1
            state.reason = UnresolvedReason.CHANGED

    def _repaired(self, repairs: RegionRepairs, order: Order) -> None:
        state = order.state
        self.counters[f"repairs_{order.reason}"] += 1
        state.written, state.repaired, state.reason = True, order.reason, None
        state.wrong_since = None
        self.log.info("repair", **_about(repairs, order))

    def _would_write(self, repairs: RegionRepairs, order: Order) -> None:
        """Say once per generation and value what would be written."""
        state = order.state
        if (order.device, order.new) in state.announced:
            return
        state.announced.add((order.device, order.new))
        if order.device is None:
            self.counters[f"would_repair_{order.reason}"] += 1
            self.log.info("would_repair", **_about(repairs, order))
        else:
            self.log.info(
                "would_write_utilization",
                container=repairs.region.dir_name,
                slot=order.slot,
                ns_pid=state.slot.pid,
                device=order.device,
                before=order.expected,
                after=order.new,
            )

    # -- the picture --------------------------------------------------------------------------------

    def picture(self) -> Snapshot:
        """What is known now, as one immutable value."""
        return Snapshot(
            at=time.time(),
            passes=self.passes,
            source=self.pidmap.source.name,
            processes=len(self.pidmap),
            policy=self.policy.namespace or "unknown",
            policy_why=self.policy.why,
            driver_version=self.sampler.driver_version,
            regions=tuple(self._region_report(repairs) for repairs in self.regions.values()),
            rejected=dict(self.finder.rejected),
            missing_dirs=tuple(sorted(self.finder.missing_dirs)),
            joined=self.joined,
            counters=dict(self.counters),
        )

    def _region_report(self, repairs: RegionRepairs) -> RegionReport:
        region, view = repairs.region, repairs.view
        uuids = view.uuids if view else ()
        slots = [self._slot_report(state, uuids) for state in repairs.states.values()]
        for index, why in repairs.odd.items():
            slot = view.slots[index] if view else None
            if slot:
                slots.append(
                    SlotReport(
                        slot.pid,
                        index,
                        slot.hostpid,
                        None,
                        False,
                        why,
                        None,
                        slot.sm_util,
                        (None,) * len(uuids),
                    )
                )
        return RegionReport(
            region.path, region.pod_uid, region.container_name, region.layout.name, uuids, tuple(slots)
        )

    def _slot_report(self, state: SlotState, uuids: tuple[str, ...]) -> SlotReport:
        slot, owner = state.slot, state.owner
        utilization: tuple[int | None, ...]
        if owner is None:
            utilization = ((0 if state.dead else None),) * len(uuids)
        else:
            utilization = tuple(self.joined.utilization(owner.process.host_pid, uuid) for uuid in uuids)
        return SlotReport(
            ns_pid=slot.pid,
            slot=slot.index,
            hostpid=slot.hostpid,
            host_pid=owner.process.host_pid if owner else None,
            dead=state.dead,
            unresolved=None if state.dead else state.reason,
            repaired=state.repaired,
            sm_util=slot.sm_util,
            utilization=utilization,
        )


def _about(repairs: RegionRepairs, order: Order) -> dict[str, Any]:
    """The fields of a log line about a ``hostpid``."""
    state, region = order.state, repairs.region
    owner = state.owner.process if state.owner else None
    return {
        "container": region.dir_name,
        "pod_uid": region.pod_uid,
        "container_name": region.container_name,
        "slot": order.slot,
        "ns_pid": state.slot.pid,
        "host_pid": owner.host_pid if owner else None,
        "reason": order.reason,
        "before": state.slot.hostpid,
        "after": order.new >> 32,
    }


def _raise_descriptor_limit() -> None:
    """A descriptor per region and per process: take what the system allows."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
