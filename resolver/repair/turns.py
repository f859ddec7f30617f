"""Containers' turns: a coroutine for each container with work reads, searches, plans, writes and reports.

All go on at once and share one slice in each round of the loop. A turn that waits for a child delays no other. A pass
leaves out containers with a turn in progress.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING

from resolver.base.budget import Metered, Rounds, Slices
from resolver.base.counters import CounterName, Shortage
from resolver.base.errors import ResolverError
from resolver.base.reasons import UnresolvedReason
from resolver.hami.process_reads import hami_variables
from resolver.linux.procfs import ProcessHandle
from resolver.repair.orders import ORDER_SECONDS, of_slot
from resolver.repair.plan import Inputs
from resolver.repair.reported_values import TWO_TICKS
from resolver.workers import slot_writer
from resolver.workers.means import shortage_of

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from resolver.base.journal import Journal
    from resolver.containers.log_names import ContainerNames
    from resolver.hami.owner_check import Pause
    from resolver.repair.agenda import Pass
    from resolver.repair.known_regions import KnownRegions
    from resolver.repair.orders import Writing
    from resolver.repair.plan import Order
    from resolver.repair.region import RegionRepairs
    from resolver.repair.slot_states import OwnedSlot
    from resolver.workers.lanes import TenantReader

#: Seconds after which a pass waits no more for the turns that it began.
_PASS_SECONDS = 0.01


class Turns:
    """Turns in progress: ``going``, by account.

    ``refresh(seen, this)`` makes the map of processes younger than ``seen``, if it may. ``wake`` is called after a turn
    that outlived its pass. ``ask_nvml`` is set when a turn needs a newer answer.
    """

    def __init__(
        self,
        known: KnownRegions,
        names: ContainerNames,
        reader: TenantReader,
        writing: Writing,
        refresh: Callable[[float, Pass], Awaitable[bool]],
        wake: Callable[[], None],
        counters: Counter[str],
        journal: Journal,
    ) -> None:
        self.going: dict[str, asyncio.Task[None]] = {}
        self.names, self._reader, self.ask_nvml = names, reader, asyncio.Event()
        self._known, self._writing, self._refresh, self._wake = known, writing, refresh, wake
        self._counters, self._journal = counters, journal
        self._rounds = Rounds()
        self._failure: BaseException | None = None  # of a turn, until a pass raises it

    async def take(self, busy: Mapping[str, list[RegionRepairs]], this: Pass) -> None:
        """Start each container's turn; wait for all, or briefly in a patient pass."""
        for account, regions in busy.items():
            task = self.going[account] = asyncio.create_task(self._alone(account, regions, this))
            task.add_done_callback(partial(self._ended, account))
        if busy:
            begun = [self.going[account] for account in busy]
            _, late = await asyncio.wait(begun, timeout=_PASS_SECONDS if this.patient else None)
            for task in late:
                task.add_done_callback(lambda _: self._wake())
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Cancel all turns."""
        for task in self.going.values():
            task.cancel()
        self.going.clear()

    def _ended(self, account: str, task: asyncio.Task[None]) -> None:
        self.going.pop(account, None)
        if not task.cancelled():
            self._failure = task.exception() or self._failure

    async def _alone(self, account: str, regions: list[RegionRepairs], this: Pass) -> None:
        """Run one turn; an internal error ends only this turn."""
        try:
            await Metered(self._turn(account, regions, this), partial(this.charge, account), self._rounds)
        except Exception as error:
            if shortage_of(getattr(error, "errno", None)) in (Shortage.DESCRIPTORS, Shortage.MEMORY):
                raise  # this concerns all containers
            # A defect, or something that a tenant made the kernel refuse: shown, counted, and survived.
            self._counters[CounterName.INTERNAL_ERRORS] += 1
            container = regions[0].ownership.container
            self._journal.record("internal_error", level="exception", container=container, step="pass")
            for repairs in regions:
                self._known.put_off(repairs, this, None)

    async def _turn(self, account: str, regions: list[RegionRepairs], this: Pass) -> None:
        pause = Slices().yield_if_due
        for repairs in regions:
            if this.over(account) and not repairs.closed:
                self._known.put_off(repairs, this)
            elif await self._known.read(repairs, this):
                await self._find_owners(repairs, this, pause)
                await self._repair(repairs, this, pause)
            await pause()

    async def _find_owners(self, repairs: RegionRepairs, this: Pass, pause: Pause) -> None:
        due = repairs.slots.due(this.now + this.ahead)  # taken from its end
        # The map has to be younger than the sight of the slots: then a process that is not in it does not exist.
        if due and not await self._refresh(repairs.seen_at, this):
            return
        while due and not repairs.closed and not this.over(repairs.ownership.account):
            await self._search(repairs, due.pop(), this.now, pause)
            await pause()

    async def _search(self, repairs: RegionRepairs, index: int, now: float, pause: Pause) -> None:
        slots, payer = repairs.slots, repairs.ownership.account
        ns_pid, hostpid, _ = slots.at(index)
        owner = await self._known.finder.owner(repairs.proof, repairs.shown, ns_pid, payer, hostpid, pause)
        if repairs.closed:
            if isinstance(owner, ProcessHandle):
                owner.close()
            return
        *_, state = slots.at(index)
        if state is not None:
            if slots.keeps_owner(state, owner):
                return
            self._known.owners.unwatch(state)
        if isinstance(owner, ProcessHandle):
            self._own(repairs, slots.own(index, owner))
        else:
            slots.unowned.not_found(index, owner, now)
            self._not_found(repairs, index, owner)

    def _not_found(self, repairs: RegionRepairs, index: int, why: UnresolvedReason) -> None:
        """Decide if the slot is dead or the file may be abandoned."""
        unowned = repairs.slots.unowned
        dead = unowned.called_dead(index)
        undecided = why is UnresolvedReason.OVER_BUDGET and not dead
        if why is UnresolvedReason.OTHER_CONTAINER and repairs.proof.open:
            unowned.call_dead(index, dead=False)  # one of the same pod uses a file that it can reach, too
        elif why is UnresolvedReason.NO_SUCH_PROCESS and not dead and unowned.missed_again(index):
            ns_pid, *_ = repairs.slots.at(index)
            dead = self._known.finder.vacant(repairs.proof, ns_pid)
            unowned.call_dead(index, dead=dead)
            undecided = not dead
        if undecided:
            self._known.abandoned.suspect(repairs)

    def _own(self, repairs: RegionRepairs, state: OwnedSlot) -> None:
        """Watch a slot's owner and remember its container: the directory may name an init container."""
        ownership = repairs.ownership
        self._known.owners.watch(repairs, state, "" if ownership.claim else ownership.container)
        container = self._known.owners.container(state.owner.process.host_pid)
        self.names.refresh()
        name = self.names.of(container.container_id)
        state.named(container.pod_uid or "", name.container if name else "")

    async def _read_variables(self, repairs: RegionRepairs, now: float) -> None:
        """Read HAMi's settings from new owners' environments, once; a tenant can make that fail for a while."""
        payer = repairs.ownership.account
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

    async def _repair(self, repairs: RegionRepairs, this: Pass, pause: Pause) -> None:
        """Plan, write and report: begun work ends somehow, to give a result for its cost."""
        account = repairs.ownership.account
        await self._read_variables(repairs, this.now)
        inputs = Inputs(this.now, this.policy, this.joined, this.settings.write_utilization)
        orders, more, over = repairs.plan(inputs), True, False
        while more and not repairs.closed:
            over = this.over(account)
            more = await self._write(repairs, orders, this) and not over
            await pause()
        if repairs.closed:
            return
        unsure = any(state.evidence.unsure() for state in repairs.slots.distinguished())
        if unsure and this.now - this.joined.answered >= TWO_TICKS:  # else a tenant would set the pace
            self.ask_nvml.set()
        self._log_conflicts(repairs)
        if not this.settings.dry_run:
            corrected = await self._writing.hold(repairs, [] if over else repairs.held)
            this.charge(account, corrected * ORDER_SECONDS)
            self._log_stuck(repairs, this)
            repairs.note_finding(this.now, this.joined.refused)
        self._known.finish(repairs, this)
        if over:
            self._known.put_off(repairs, this)

    async def _write(self, repairs: RegionRepairs, orders: Iterator[Order | None], this: Pass) -> bool:
        """Send one batch to the writer; True if more may follow."""
        batch: list[Order] = []
        slices = Slices()
        for order in orders:
            if order is not None:
                batch.append(order)
                if len(batch) == slot_writer.MAX_ORDERS:
                    break
            elif slices.over():
                await slices.yield_now()
                if repairs.closed:
                    return False
        more = len(batch) == slot_writer.MAX_ORDERS
        if this.settings.dry_run:
            for order in batch:
                self._writing.would_write(repairs, order)
        elif batch:
            this.charge(repairs.ownership.account, len(batch) * ORDER_SECONDS)
            more = await self._writing.carry_out(repairs, batch) and more
        return more

    def _log_conflicts(self, repairs: RegionRepairs) -> None:
        for state, wait in repairs.conflicts:
            self._counters[CounterName.CONFLICTS] += 1
            self._journal.record(
                "conflict",
                level="warning",
                **of_slot(repairs, state),
                hostpid=state.slot.hostpid,
                why="another writer changed hostpid back",
                times=state.conflicts,
                next_try_seconds=wait,
            )

    def _log_stuck(self, repairs: RegionRepairs, this: Pass) -> None:
        """Log values that do not stay right, once per process."""
        blind, uuids = repairs.blind(this.joined.refused), repairs.view.uuids
        for state in repairs.slots.distinguished():
            if state.explain(this.policy, this.now, uuids, blind):
                if disputed := state.evidence.disputed():
                    self._counters[CounterName.ZEROS_DISPUTED] += 1
                else:
                    self._counters[CounterName.SLOTS_STUCK] += 1
                kind = "nvml_contradicts_watchers" if disputed else "slot_stuck"
                self._journal.record(kind, level="warning", **of_slot(repairs, state), why=state.stuck)
