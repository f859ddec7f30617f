"""Containers' turns: owners are found and orders sent for each independently.

All go on at once and share one slice in each round of the loop. Waiting for a child holds nobody up. A long turn may
outlive its pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from functools import partial
from typing import TYPE_CHECKING

from resolver.base.budget import Metered, Rounds, Slices
from resolver.base.counters import CounterName, Shortage
from resolver.base.errors import ResolverError
from resolver.base.reasons import UnresolvedReason
from resolver.hami.process_reads import hami_variables
from resolver.linux.procfs import ProcessHandle
from resolver.repair.orders import ORDER_SECONDS, of_slot
from resolver.repair.reported_values import reordering
from resolver.workers import slot_writer
from resolver.workers.means import shortage_of

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterator, Mapping

    from resolver.hami.owner_check import Pause
    from resolver.hami.slot_owner import OwnerFinder
    from resolver.repair.parts import Parts, Pass
    from resolver.repair.plan import Order, RegionRepairs
    from resolver.repair.slot_states import SlotState

#: Seconds after which a pass waits no more for the turns that it began.
_PASS_SECONDS = 0.01
#: Seconds after which an environment that could not be read is read again.
_READ_AGAIN_SECONDS = 30.0


class Work:
    """A region's work."""

    __slots__ = ("begun", "due", "orders", "repairs")

    def __init__(self, repairs: RegionRepairs, now: float) -> None:
        self.repairs = repairs
        self.due = repairs.due(now)  # taken from its end
        self.orders: Iterator[Order | None] | None = None
        self.begun = False  # it then ends somehow, to give a result for its cost


class Turns:
    """Turns in progress: ``going``, by container."""

    def __init__(
        self,
        parts: Parts,
        owner_finder: OwnerFinder,
        suspect: Callable[[RegionRepairs], None],
    ) -> None:
        """Call ``suspect`` for possibly abandoned regions."""
        self.owner_finder = owner_finder
        self.going: dict[str, asyncio.Task[None]] = {}
        self._parts, self._suspect = parts, suspect
        self._left_out: dict[str, set[str]] = {}  # paths that passes did not read meanwhile, by container
        self._rounds = Rounds()
        self._failure: BaseException | None = None  # of a turn, until a pass raises it

    async def take(self, busy: Mapping[str, deque[Work]], this: Pass) -> None:
        """Start each container's turn; wait for all, or briefly in a patient pass."""
        tasks: list[asyncio.Task[None]] = []
        for container, works in busy.items():
            task = self.going[container] = asyncio.create_task(self._alone(container, works, this))
            task.add_done_callback(partial(self._ended, container))
            tasks.append(task)
        if tasks:
            await asyncio.wait(tasks, timeout=_PASS_SECONDS if this.patient else None)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def leave_out(self, container: str, path: str) -> bool:
        """Return True while a turn of that container goes on; a pass reads the region after it."""
        if container not in self.going:
            return False
        self._left_out.setdefault(container, set()).add(path)
        return True

    def close(self) -> None:
        """Cancel all turns."""
        for task in self.going.values():
            task.cancel()
        self.going.clear()

    def _ended(self, container: str, task: asyncio.Task[None]) -> None:
        self.going.pop(container, None)
        if task.cancelled():
            return
        self._failure = task.exception() or self._failure
        if left_out := self._left_out.pop(container, None):
            for path in left_out:
                self._parts.agenda.by(path, time.monotonic())
            self._parts.wake()

    async def _alone(self, container: str, works: deque[Work], this: Pass) -> None:
        """Run one turn; an internal error ends only this turn."""
        parts = self._parts
        try:
            await Metered(self._turn(container, works, this), partial(this.charge, container), self._rounds)
        except Exception as error:
            if shortage_of(getattr(error, "errno", None)) in (Shortage.DESCRIPTORS, Shortage.MEMORY):
                raise  # this concerns all containers
            # A defect, or something that a tenant made the kernel refuse: shown, counted, and survived.
            parts.counters[CounterName.INTERNAL_ERRORS] += 1
            whom = works[0].repairs.ownership.container if works else container
            parts.journal.record("internal_error", level="exception", container=whom, step="pass")
            works.clear()

    async def _turn(self, container: str, works: deque[Work], this: Pass) -> None:
        parts, pause = self._parts, Slices().breathe
        while works:
            work = works[0]
            over = this.over(container)
            if not parts.is_here(work.repairs):
                works.popleft()
            elif over and not work.begun:
                works.popleft()
                parts.put_off(work.repairs, this)
            elif work.due and not over:
                work.begun = True
                await self._find_owner(work.repairs, work.due.pop(), this.now, pause)
            elif not await self._write(work, this) or over:
                works.popleft()
                await self._hold(work.repairs, this, over=over)
                self._finish(work, this)
                if over:
                    parts.put_off(work.repairs, this)
            await pause()

    async def _find_owner(self, repairs: RegionRepairs, index: int, now: float, pause: Pause) -> None:
        parts, proof = self._parts, repairs.proof
        state = repairs.at(index)
        slot, payer = state.slot, repairs.ownership.account
        found = await self.owner_finder.owner(proof, repairs.shown, slot.pid, payer, slot.hostpid, pause)
        if not parts.is_here(repairs):
            if isinstance(found, ProcessHandle):
                found.close()
            return
        if state.owner is not None:
            if state.keeps_owner(found):
                return
            parts.owners.unwatch(state)
            state.disowned()
        state.found(found, now)
        if isinstance(found, ProcessHandle):
            self._own(repairs, state, found)
        else:
            self._not_found(repairs, state, found)
        repairs.put_back(state)

    def _not_found(self, repairs: RegionRepairs, state: SlotState, why: UnresolvedReason) -> None:
        """Decide if the slot is dead or the file may be abandoned."""
        finder, proof, undecided = self.owner_finder, repairs.proof, False
        if why is UnresolvedReason.OVER_BUDGET:
            undecided = not state.dead
        elif why is UnresolvedReason.OTHER_CONTAINER and proof.open:
            state.dead = False  # one of the same pod uses a file that it can reach, too
        elif why is UnresolvedReason.NO_SUCH_PROCESS and state.looks > 1 and not state.dead:
            state.dead = finder.vacant(proof, state.slot.pid)
            undecided = not state.dead
        if undecided:
            self._suspect(repairs)

    def _own(self, repairs: RegionRepairs, state: SlotState, owner: ProcessHandle) -> None:
        """Watch a slot's owner and remember its container: the directory may name an init container."""
        parts, host_pid, ownership = self._parts, owner.process.host_pid, repairs.ownership
        parts.owners.watch(state, owner, "" if ownership.claim else ownership.container)
        container = parts.owners.container(host_pid)
        parts.names.refresh()
        name = parts.names.of(container.container_id)
        state.names = container.pod_uid or "", name.container if name else ""

    async def _read_variables(self, repairs: RegionRepairs, now: float) -> None:
        """Read what new owners' environments tell HAMi's library, once; a tenant can make that fail for a while."""
        parts, payer = self._parts, repairs.ownership.account
        for state in repairs.distinguished():
            if state.owner is None or now < state.read_again:
                continue
            owner, state.read_again = state.owner.process, now + _READ_AGAIN_SECONDS
            about = parts.owners.container_id(owner.host_pid) or payer
            with contextlib.suppress(ResolverError, OSError):
                found = await parts.reader.ask(payer, about, hami_variables, owner.host_pid, owner.start_time)
                if state.owner is not None and state.owner.process == owner:
                    state.variables, state.read_again = (found[0], found[1]), math.inf

    async def _write(self, work: Work, this: Pass) -> bool:
        """Send one batch to the writer; True if more may follow."""
        parts, repairs = self._parts, work.repairs
        work.begun = True
        if work.orders is None:
            await self._read_variables(repairs, this.now)
            if not parts.is_here(repairs):
                return False
            work.orders = self._plan(repairs, this)
        batch: list[Order] = []
        slices = Slices()
        for order in work.orders:
            if order is not None:
                batch.append(order)
                if len(batch) == slot_writer.MAX_ORDERS:
                    break
            elif slices.over():
                await slices.give_way()
                if not parts.is_here(repairs):
                    return False
        more = len(batch) == slot_writer.MAX_ORDERS
        if parts.settings.dry_run:
            for order in batch:
                parts.writing.would_write(repairs, order)
        elif batch:
            this.charge(repairs.ownership.account, len(batch) * ORDER_SECONDS)
            more = await parts.writing.carry_out(repairs, batch) and more
        return more

    async def _hold(self, repairs: RegionRepairs, this: Pass, *, over: bool) -> None:
        if not self._parts.settings.dry_run:
            corrected = await self._parts.writing.hold(repairs, [] if over else repairs.held)
            this.charge(repairs.ownership.account, corrected * ORDER_SECONDS)

    def _plan(self, repairs: RegionRepairs, this: Pass) -> Iterator[Order | None]:
        parts = self._parts

        def conflict(state: SlotState, wait: float) -> None:
            parts.counters[CounterName.CONFLICTS] += 1
            parts.journal.record(
                "conflict",
                level="warning",
                **of_slot(repairs, state),
                hostpid=state.slot.hostpid,
                why="another writer changed hostpid back",
                times=state.conflicts,
                next_try_seconds=wait,
            )

        writes, joined = parts.settings.write_utilization, this.joined
        return repairs.plan(
            this.now, this.policy, joined.utilization, writes, conflict, this.answered, joined.idle
        )

    def _finish(self, work: Work, this: Pass) -> None:
        """End a region's work in this pass."""
        parts, repairs = self._parts, work.repairs
        if not parts.is_here(repairs):
            return
        if not parts.settings.dry_run:
            self._log_stuck(repairs, this)
            repairs.note_finding(this.now, this.joined.refused)
        repairs.rest()
        parts.looked(repairs, this.now, repairs.quiet_until())
        parts.report(repairs, this.joined)

    def _log_stuck(self, repairs: RegionRepairs, this: Pass) -> None:
        """Log values that do not stay right, once per process."""
        parts, blind = self._parts, repairs.blind(this.joined.refused)
        for state in repairs.distinguished():
            evidence = state.evidence
            if evidence is None:
                continue
            visible = state.variables[1] if state.variables else ""
            order = reordering(visible, repairs.view.uuids if repairs.view else ())
            state.stuck = evidence.why(state.slot.hostpid, this.policy, this.now, order, blind)
            if state.stuck and not evidence.logged:
                evidence.logged = True
                if disputed := evidence.disputed():
                    parts.counters[CounterName.ZEROS_DISPUTED] += 1
                else:
                    parts.counters[CounterName.SLOTS_STUCK] += 1
                kind = "nvml_contradicts_watchers" if disputed else "slot_stuck"
                parts.journal.record(kind, level="warning", **of_slot(repairs, state), why=state.stuck)
