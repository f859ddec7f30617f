"""Containers' turns: a coroutine for each container with work searches, plans, writes and reports.

All turns run concurrently and share one slice in each round of the loop. A turn that waits for a child delays no
other. A pass leaves out containers with a turn in progress.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

from resolver.base.budget import Metered, Rounds, Slices
from resolver.base.counters import CounterName, Shortage
from resolver.base.errors import RegionRejected, ResolverError, TooSlow, WorkerFailed
from resolver.base.journal import Journal
from resolver.base.reasons import UnresolvedReason
from resolver.config import Settings
from resolver.gpu.attribution import NOTHING, Joined
from resolver.hami.hostpid_policy import HostpidPolicy
from resolver.hami.owner_check import Pause
from resolver.hami.process_reads import hami_variables
from resolver.hami.region import RegionView
from resolver.repair.known_regions import KnownRegions
from resolver.repair.orders import ORDER_SECONDS, Writing
from resolver.repair.plan import Inputs, Order
from resolver.repair.region import RegionRepairs
from resolver.repair.reported_values import TWO_TICKS
from resolver.repair.slots import SOON_SECONDS
from resolver.workers import slot_writer
from resolver.workers.lanes import TenantReader
from resolver.workers.means import shortage_of

#: Seconds after which a pass reads no more regions, and waits no more for the turns that it began.
_READ_SECONDS, PASS_SECONDS = 0.05, 0.01
#: Seconds that no container is charged for: a region was only read.
_TRIFLE_SECONDS = 5e-5


class Turns:
    """Turns in progress: ``going``, by account. They use the newest settings, ``policy`` and NVML's answer, ``joined``.

    ``refresh(seen)`` makes the map of processes newer than ``seen``, if allowed. ``wake`` is called after a turn that
    outlived its pass. ``ask_nvml`` is set when a turn needs a newer answer.
    """

    def __init__(
        self,
        settings: Settings,
        known: KnownRegions,
        reader: TenantReader,
        writing: Writing,
        refresh: Callable[[float], Awaitable[bool]],
        wake: Callable[[], None],
        counters: Counter[str],
        journal: Journal,
    ) -> None:
        self.going: dict[str, asyncio.Task[None]] = {}
        self.ask_nvml = asyncio.Event()
        self.spent = 0.0  # seconds on the loop, ever
        self._known, self._reader, self._writing, self._refresh = known, reader, writing, refresh
        self._wake, self._counters, self._journal = wake, counters, journal
        self._rounds = Rounds()
        self._failure: BaseException | None = None  # of a turn, until a pass raises it
        self._settings, self._policy, self.joined, self.patient = (
            settings,
            HostpidPolicy(None, ""),
            NOTHING,
            True,
        )

    def take_in(self, settings: Settings, policy: HostpidPolicy, joined: Joined, *, patient: bool) -> None:
        """Use these from now on; if not ``patient``, ignore budgets."""
        if joined is not self.joined:
            changed = joined.changed(self.joined)
            for repairs in self._known.by_path.values():
                repairs.values_changed(changed)
        if policy != self._policy or settings is not self._settings:
            self._known.everything()
            for repairs in self._known.by_path.values():
                repairs.unsettle()
        self._settings, self._policy, self.joined, self.patient = settings, policy, joined, patient

    def spend(self, seconds: float) -> None:
        self.spent += seconds

    def _charge(self, account: str, seconds: float) -> None:
        if seconds >= _TRIFLE_SECONDS:
            self._known.budgets.spend(account, seconds)

    def _over(self, account: str) -> bool:
        return self.patient and self._known.budgets.over(account)

    async def take(self) -> None:
        """Read due regions and start the turns of those with work; wait for all, or briefly if ``patient``."""
        begun = list[asyncio.Task[None]]()
        for account, regions in (await self._read_due()).items():
            task = self.going[account] = asyncio.create_task(self._alone(account, regions))
            task.add_done_callback(partial(self._ended, account))
            begun.append(task)
        if begun:
            _, late = await asyncio.wait(begun, timeout=PASS_SECONDS if self.patient else None)
            for task in late:
                task.add_done_callback(lambda _: self._wake())
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        for task in self.going.values():
            task.cancel()
        self.going.clear()

    async def _read_due(self) -> dict[str, list[tuple[RegionRepairs, bool]]]:
        """Read due regions from the page cache; return those with work by account, and if a lane has to read them."""
        busy: dict[str, list[tuple[RegionRepairs, bool]]] = {}
        slices, began, since = Slices(), time.monotonic(), time.thread_time()
        for repairs in self._known.due(began + SOON_SECONDS, self.going):
            account = repairs.ownership.account
            if repairs.closed:
                continue
            if self._over(account):
                self._put_off(repairs)
                continue
            self._known.watch(repairs)
            try:
                view = repairs.region.read_at_once()
                if view is None or self._look(repairs, view):
                    busy.setdefault(account, []).append((repairs, view is None))
            except RegionRejected as why:
                self._known.reject(repairs.region, why)
            now = time.thread_time()
            self._charge(account, now - since)
            if slices.over():
                if self.patient and time.monotonic() - began >= _READ_SECONDS:
                    break
                await slices.yield_now()
                now = time.thread_time()
            since = now
        return busy

    def _ended(self, account: str, task: asyncio.Task[None]) -> None:
        self.going.pop(account, None)
        if not task.cancelled():
            self._failure = task.exception() or self._failure

    async def _alone(self, account: str, regions: list[tuple[RegionRepairs, bool]]) -> None:
        """Run one turn; an internal error ends only this turn."""

        def spend(seconds: float) -> None:
            self.spend(seconds)
            self._charge(account, seconds)

        try:
            await Metered(self._turn(account, regions), spend, self._rounds)
        except Exception as error:
            for repairs, _ in regions:
                self._put_off(repairs, None)
            if shortage_of(getattr(error, "errno", None)) in (Shortage.DESCRIPTORS, Shortage.MEMORY):
                raise  # this concerns all containers
            # A defect, or something that a tenant made the kernel refuse: shown, counted, and survived.
            self._counters[CounterName.INTERNAL_ERRORS] += 1
            container = regions[0][0].ownership.container
            self._journal.record("internal_error", level="exception", container=container, step="pass")

    async def _turn(self, account: str, regions: list[tuple[RegionRepairs, bool]]) -> None:
        pause = Slices().yield_if_due
        for repairs, unread in regions:
            if self._over(account) and not repairs.closed:
                self._put_off(repairs)
            elif not repairs.closed and (not unread or await self._read(repairs)):
                if self._settings.hami_metrics:
                    await repairs.count(self._reader)
                await self._find_owners(repairs, pause)
                await self._repair(repairs, pause)
            await pause()

    # -- reads --------------------------------------------------------------------------------------

    async def _read(self, repairs: RegionRepairs) -> bool:
        """Have a lane read a region that is not in the page cache; False without work."""
        try:
            view = await repairs.region.read_by(self._reader, repairs.ownership.account)
            return not repairs.closed and self._look(repairs, view)
        except RegionRejected as why:
            self._known.reject(repairs.region, why)
        except (TooSlow, WorkerFailed):
            self._put_off(repairs, UnresolvedReason.TOO_SLOW)
        return False

    def _look(self, repairs: RegionRepairs, view: RegionView) -> bool:
        """Process a region's view; True if it has work."""
        now = time.monotonic()
        for state in repairs.observe(view, watched=repairs.region.path in self._known.watches):
            self._known.owners.unwatch(state)
        has_work = repairs.has_work(now)
        repairs.schedule.taken(now)
        if not has_work:
            repairs.rest(self._settings.interval, watched=repairs.region.path in self._known.watches)
        return has_work or (self._settings.hami_metrics and repairs.counts_are_due(now))

    def _put_off(
        self, repairs: RegionRepairs, why: UnresolvedReason | None = UnresolvedReason.OVER_BUDGET
    ) -> None:
        """Delay due work: its container is over budget, makes the kernel wait, or met a defect."""
        now = time.monotonic()
        if why is UnresolvedReason.OVER_BUDGET:
            self._counters[CounterName.OVER_BUDGET] += 1
        repairs.unsettle()
        repairs.schedule.put_off(now + self._settings.interval)
        if why is not None and repairs.slots.put_off(now, why):
            repairs.write_report(self.joined, self._known.owners.container_id)

    # -- owners -------------------------------------------------------------------------------------

    async def _find_owners(self, repairs: RegionRepairs, pause: Pause) -> None:
        now = time.monotonic()
        due = repairs.slots.due(now)  # taken from its end
        # The map must be newer than the read slots: then a process missing from it does not exist.
        if due and not await self._refresh(repairs.schedule.last):
            return
        while due and not repairs.closed and not self._over(repairs.ownership.account):
            await self._known.owners.search(repairs, due.pop(), now, pause)
            await pause()

    async def _read_variables(self, repairs: RegionRepairs) -> None:
        """Read HAMi's settings from new owners' environments, once; a tenant can make that fail for a while."""
        payer, now = repairs.ownership.account, time.monotonic()
        for state in repairs.slots.distinguished():
            if not state.reads(now):
                continue
            owner = state.owner.process
            about = self._known.owners.container_id(owner.host_pid) or payer
            with contextlib.suppress(ResolverError, OSError):
                variables = await self._reader.ask(
                    payer, about, hami_variables, owner.host_pid, owner.start_time
                )
                state.knows(*variables)

    # -- repairs ------------------------------------------------------------------------------------

    async def _repair(self, repairs: RegionRepairs, pause: Pause) -> None:
        """Plan, write and report: work that has begun is completed, because it was paid for."""
        await self._read_variables(repairs)
        policy, joined, now = self._policy, self.joined, time.monotonic()
        account = repairs.ownership.account
        orders: list[Order] = []
        for planned in repairs.plan(Inputs(now, policy, joined, self._settings.write_utilization)):
            orders += planned
            await pause()
            if repairs.closed:
                return
        await self._write(repairs, orders, pause)
        if repairs.closed:
            return
        over = self._over(account)
        unsure = any(state.evidence.unsure() for state in repairs.slots.distinguished())
        if unsure and now - joined.answered >= TWO_TICKS:  # else a tenant would set the pace
            self.ask_nvml.set()
        if not self._settings.dry_run:
            corrected = await self._writing.hold(repairs, [] if over else repairs.held)
            self._charge(account, corrected * ORDER_SECONDS)
            repairs.note_finding(now, joined.refused)
        self._writing.log(repairs, policy, joined, now, dry_run=self._settings.dry_run)
        repairs.rest(self._settings.interval, watched=repairs.region.path in self._known.watches)
        repairs.write_report(joined, self._known.owners.container_id)
        if over:
            self._put_off(repairs)

    async def _write(self, repairs: RegionRepairs, orders: list[Order], pause: Pause) -> None:
        """Send the orders in batches, each ``hostpid`` first, and at least one batch however little budget is left."""
        orders.sort(key=lambda order: order.device is not None)
        account, more = repairs.ownership.account, True
        while orders and more and not repairs.closed:
            batch, orders = orders[: slot_writer.MAX_ORDERS], orders[slot_writer.MAX_ORDERS :]
            if self._settings.dry_run:
                for order in batch:
                    self._writing.would_write(repairs, order)
            else:
                self._charge(account, len(batch) * ORDER_SECONDS)
                more = await self._writing.carry_out(repairs, batch)
            more = more and not self._over(account)
            await pause()
