"""A pass over the slots: find regions, read them, find owners, have the slot writer repair what is wrong."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from resolver.containers import Containers, shared_directory
from resolver.errors import RegionRejected, ResolverError, WorkerFailed
from resolver.hami import stuck, writer
from resolver.hami.finder import RegionFinder
from resolver.hami.mapped import MappedFinder
from resolver.hami.openat import open_directory
from resolver.hami.repairs import Order, RegionRepairs, SlotState, encode
from resolver.owners import Owners
from resolver.procfs import ProcessHandle, Procfs
from resolver.report import region_report
from resolver.types import RegionReason, SampleReason, UnresolvedReason
from resolver.workers import Worker

if TYPE_CHECKING:
    from collections import Counter

    from resolver.config import Settings
    from resolver.hami.policy import Policy
    from resolver.hami.region import SharedRegion
    from resolver.join import Joined
    from resolver.log import Journal
    from resolver.pidmap import PidMap
    from resolver.snapshot import RegionReport

_DISCOVER_EVERY = 1.0
_WRITER_SECONDS = 1.0
_DEATHS_BEFORE_QUARANTINE = 3
_UNWRITABLE_SECONDS = 5.0


class Repairer:
    """Every region of the node and what is known of its slots."""

    def __init__(
        self, settings: Settings, procfs: Procfs, pidmap: PidMap, counters: Counter[str], journal: Journal
    ) -> None:
        self.settings = settings
        self.procfs = procfs
        self.pidmap = pidmap
        self.counters = counters
        self.journal = journal
        self.regions: dict[str, RegionRepairs] = {}
        self.owners = Owners(procfs)
        self.finder = RegionFinder(settings.containers_dir)
        self.mapped = MappedFinder(procfs)
        self.writer = Worker(
            # A tenant's umask may have taken the right to write from others, and root is one of them without this.
            "slot writer",
            "resolver.hami.writer",
            timeout=_WRITER_SECONDS,
            rights=frozenset({"DAC_OVERRIDE"}),
        )
        self._containers = Containers(procfs, pidmap)
        self._next_discovery = 0.0
        self._reports: dict[str, RegionReport] = {}  # of regions that nothing has happened to since

    async def pass_once(self, policy: Policy, joined: Joined, *, patient: bool = True) -> None:
        """One pass. ``patient=False``: look into ``/proc`` at any cost, this pass is the only one."""
        now = time.monotonic()
        self._discover(now, joined)
        if self.owners.ended():
            for repairs in self.regions.values():
                repairs.unsettle()
        for path, repairs in list(self.regions.items()):
            try:
                gone = repairs.observe(repairs.region.read())
            except RegionRejected as why:
                self._count_rejected(path, why)
                self._reject(repairs.region, why)
                self.drop(path)
                continue
            for state in gone:
                self.owners.unwatch(state)
        # On a quiet node this is where a pass ends: nothing changed since all was right.
        busy = [repairs for repairs in self.regions.values() if not repairs.settled(policy, joined)]
        self._find_owners(busy, now, patient=patient)
        for repairs in busy:
            await self._repair(repairs, now, policy, joined)
            self._reports.pop(repairs.region.path, None)

    def use(self, settings: Settings) -> None:
        """Take over new settings; between two passes only."""
        if settings.containers_dir != self.settings.containers_dir:
            self._drop_all()
            self.finder, self._next_discovery = RegionFinder(settings.containers_dir), 0.0
        if self.settings.mapped_regions and not settings.mapped_regions:
            for path in list(self.mapped.found):
                self.drop(path)
            self.mapped.close()
        self.settings = settings

    def close(self) -> None:
        """Give everything back: the child, handles, files."""
        self.writer.stop()
        self._drop_all()
        self.owners.close()

    # -- regions ------------------------------------------------------------------------------------

    def _discover(self, now: float, joined: Joined) -> None:
        full = now >= self._next_discovery
        if full:
            self._next_discovery = now + _DISCOVER_EVERY
            if self.settings.mapped_regions:
                self._discover_mapped(joined)
        changes = self.finder.refresh(full)
        for region in changes.removed:
            self.drop(region.path)
        for region in changes.added:
            try:
                dir_fd = open_directory(os.path.dirname(region.path))
                try:
                    directory = shared_directory(self.procfs, dir_fd)
                finally:
                    os.close(dir_fd)
            except (OSError, ResolverError) as error:
                why = RegionRejected(RegionReason.IO_ERROR, f"its directory cannot be used: {error}")
                self._count_rejected(region.path, why)
                self.finder.reject(region, why)  # and tried again later
                continue
            self._add(RegionRepairs(region, directory))
        for path, why in changes.rejected:
            self._count_rejected(path, why)
        for path in self.settings.containers_dir:
            missing = path.rstrip("/") in self.finder.missing_dirs or path in self.finder.missing_dirs
            trouble = "it does not exist; waiting for it" if missing else ""
            self.journal.trouble(
                f"dir {path}", trouble, "containers_dir_missing", "containers_dir_found", path=path
            )

    def _discover_mapped(self, joined: Joined) -> None:
        """Those that have no directory on the host: found through the processes that NVML lists."""
        known = (None, SampleReason.PROCESS_ENDED)  # None: it owns a slot
        users = {used.host_pid for used in joined.used if used.no_slot not in known}

        def in_use(name: str) -> bool:
            repairs = self.regions.get(name)
            return repairs is not None and any(state.owner is not None for state in repairs.states.values())

        changes = self.mapped.refresh(users, self.pidmap.arrival, in_use)
        for region in changes.removed:
            self.drop(region.path)
        for region in changes.added:
            place = self.mapped.place(region)
            if place is not None:
                self._add(RegionRepairs(region, place))
        for path, why in changes.rejected:
            self._count_rejected(path, why)

    def _add(self, repairs: RegionRepairs) -> None:
        region = repairs.region
        self.regions[region.path] = repairs
        self.journal.tell(
            "region_found", container=region.dir_name, path=region.path, layout=region.layout.name
        )

    def _reject(self, region: SharedRegion, why: RegionRejected) -> None:
        for finder in (self.finder, self.mapped):
            finder.reject(region, why)  # the one that does not know it does nothing

    def rejected(self) -> dict[str, RegionReason]:
        """What is left alone now, and why, by path."""
        return {**self.finder.rejected, **self.mapped.rejected}

    def _count_rejected(self, path: str, why: RegionRejected) -> None:
        self.counters[f"rejected_{why.reason}"] += 1
        self.journal.log.warning("region_rejected", path=path, reason=why.reason, why=why.detail)

    def drop(self, path: str) -> None:
        """Give up a region that is gone; nothing happens if it is not known."""
        repairs = self.regions.pop(path, None)
        self._reports.pop(path, None)
        if repairs is not None:
            self._release(repairs)
            self.journal.tell("region_gone", container=repairs.region.dir_name, path=path)

    def shed(self) -> None:
        """Descriptors ran out: give up half of the regions, so that there are some for the work on the others."""
        self.finder.max_regions = max(1, len(self.regions) // 2)
        why = RegionRejected(RegionReason.IO_ERROR, "it was given up, all descriptors are in use")
        for path, repairs in list(self.regions.items())[self.finder.max_regions :]:
            self._reject(repairs.region, why)
            self.drop(path)

    def _release(self, repairs: RegionRepairs) -> None:
        for state in repairs.states.values():
            self.owners.unwatch(state)
        repairs.close()

    def _drop_all(self) -> None:
        for repairs in self.regions.values():
            self._release(repairs)
        self.regions.clear()
        self._reports.clear()
        self.finder.close()
        self.mapped.close()

    # -- processes ----------------------------------------------------------------------------------

    def _find_owners(self, busy: list[RegionRepairs], now: float, *, patient: bool) -> None:
        due = [(repairs, state) for repairs in busy for state in repairs.states.values() if state.due(now)]
        # The map has to be younger than the sight of the slot: then a process that is not in it does not exist.
        if not due or not self.pidmap.refresh(unhurried=patient):
            return
        for repairs, state in due:
            found = self._containers.owner(repairs.place, repairs.region.inode, state.slot.pid)
            state.found(found, now)
            if isinstance(found, ProcessHandle):
                self.owners.watch(state, found)
                self.pidmap.name_container(found.process.host_pid, repairs.region.dir_name)
            elif found is UnresolvedReason.NO_SUCH_PROCESS and state.looks > 1 and not state.dead:
                others = any(other.owner is not None for other in repairs.states.values())
                state.dead = others or self._containers.visible(repairs.place)

    # -- writing ------------------------------------------------------------------------------------

    async def _repair(self, repairs: RegionRepairs, now: float, policy: Policy, joined: Joined) -> None:
        def conflict(state: SlotState, wait: float) -> None:
            self.counters["conflicts"] += 1
            self.journal.tell(
                "conflict",
                level="warning",
                container=repairs.region.dir_name,
                slot=state.slot.index,
                ns_pid=state.slot.pid,
                hostpid=state.slot.hostpid,
                why="another writer changed hostpid back",
                next_try_seconds=wait,
            )

        orders = list(
            repairs.plan(now, policy, joined.utilization, self.settings.write_utilization, conflict)
        )
        if not orders:
            repairs.settle(policy, joined)
        for state in stuck.look(repairs, policy, joined.utilization, joined.at, now):
            self.counters["slots_stuck"] += 1
            self.journal.tell("slot_stuck", level="warning", **_of_slot(repairs, state), why=state.stuck)
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
            self.journal.tell(
                "region_quarantined",
                level="warning",
                container=repairs.region.dir_name,
                why=str(error),
                seconds=seconds,
            )
        else:
            self.journal.log.warning("writer_failed", container=repairs.region.dir_name, why=str(error))

    def _written(self, repairs: RegionRepairs, order: Order, outcome: int, word: int) -> None:
        state = order.state
        self._writable(repairs, outcome)
        if outcome == writer.DONE and order.device is None:
            # Written, and that once, even if another writer changed it back before it was read back.
            self._repaired(repairs, order)
            if word != order.new:
                state.reason = UnresolvedReason.CHANGED
        elif outcome == writer.DONE:
            self.counters["utilization_writes"] += 1
            if state.dead:
                self._zeroed(repairs, order)
        elif outcome == writer.OWNER_GONE:
            self.counters["writes_undone"] += 1
            state.reason = UnresolvedReason.GONE
        elif outcome == writer.MOVED:
            self.counters["writes_undone"] += 1
        elif outcome == writer.NOT_WRITABLE:
            state.reason = UnresolvedReason.WRITE_FAILED
            repairs.pause(time.monotonic(), _UNWRITABLE_SECONDS, UnresolvedReason.WRITE_FAILED)
        elif order.device is None:
            self.counters["writes_missed"] += 1
            state.reason = UnresolvedReason.CHANGED

    def _writable(self, repairs: RegionRepairs, outcome: int) -> None:
        """Say once that a file cannot be written, and once that it can again; other outcomes tell neither."""
        if outcome not in (writer.DONE, writer.NOT_WRITABLE):
            return
        path, why = repairs.region.path, ""
        if outcome == writer.NOT_WRITABLE:
            why = "it cannot be opened for writing; mount the containers directory read-write"
        self.journal.trouble(f"write {path}", why, "write_failed", "write_works_again", path=path)

    def _repaired(self, repairs: RegionRepairs, order: Order) -> None:
        state = order.state
        self.counters[f"repairs_{order.reason}"] += 1
        state.written, state.repaired, state.reason = order.new >> 32, order.reason, None
        state.written_at = order.slot
        state.wrong_since = None
        self.journal.tell("repair", **_about(repairs, order))

    def _zeroed(self, repairs: RegionRepairs, order: Order) -> None:
        self.journal.log.info(
            "dead_slot_zeroed",
            container=repairs.region.dir_name,
            slot=order.slot,
            ns_pid=order.state.slot.pid,
            device=order.device,
            before=order.expected,
        )

    def _would_write(self, repairs: RegionRepairs, order: Order) -> None:
        """Say once per generation and value what would be written."""
        state = order.state
        if (order.device, order.new) in state.announced:
            return
        state.announced.add((order.device, order.new))
        if order.device is None:
            self.counters[f"would_repair_{order.reason}"] += 1
            self.journal.log.info("would_repair", **_about(repairs, order))
        else:
            self.journal.log.info(
                "would_write_utilization",
                container=repairs.region.dir_name,
                slot=order.slot,
                ns_pid=state.slot.pid,
                device=order.device,
                before=order.expected,
                after=order.new,
            )

    # -- the picture --------------------------------------------------------------------------------

    def reports(self, joined: Joined) -> tuple[RegionReport, ...]:
        """Every region and slot, for the snapshot."""
        reports = {
            path: self._reports.get(path)
            or region_report(repairs, joined, self.owners.container_id, time.monotonic())
            for path, repairs in self.regions.items()
        }
        self._reports = reports
        return tuple(reports.values())


def _about(repairs: RegionRepairs, order: Order) -> dict[str, Any]:
    """The fields of a log line about a ``hostpid``."""
    return {
        **_of_slot(repairs, order.state),
        "slot": order.slot,
        "reason": order.reason,
        "before": order.state.slot.hostpid,
        "after": order.new >> 32,
    }


def _of_slot(repairs: RegionRepairs, state: SlotState) -> dict[str, Any]:
    """Which slot it is, and whose."""
    region, owner = repairs.region, state.owner
    return {
        "container": region.dir_name,
        "pod_uid": region.pod_uid,
        "container_name": region.container_name,
        "slot": state.slot.index,
        "ns_pid": state.slot.pid,
        "host_pid": owner.process.host_pid if owner else None,
    }
