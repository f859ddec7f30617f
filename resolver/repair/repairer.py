"""A pass over the slots: find regions, read them, find owners, have the slot writer repair what is wrong."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from typing import TYPE_CHECKING

from resolver.budget import Account, Budgets, Rests, Shares, Slices, give_back_memory
from resolver.containers.known_namespaces import KnownNamespaces
from resolver.containers.log_names import ContainerNames
from resolver.counters import CounterByReason, CounterName
from resolver.errors import RegionRejected, no_descriptors
from resolver.hami.directory_finder import DirectoryFinder
from resolver.hami.discovery import PodFile
from resolver.hami.mapping_finder import MappingFinder
from resolver.hami.placements import AUTO, KNOWN_DIRS
from resolver.hami.slot_owner import OwnerFinder
from resolver.hami.watches import Watches
from resolver.linux.inotify import MODIFY, OF_A_FILE
from resolver.linux.procfs import ProcessHandle, Procfs
from resolver.reasons import RegionReason, SampleReason, UnresolvedReason
from resolver.repair.abandoned import Abandoned
from resolver.repair.attention import QUIET_INTERVALS, Attention
from resolver.repair.hami_counts import CountsOfRegions
from resolver.repair.orders import ORDER_SECONDS, Writing, directory_of, of_slot
from resolver.repair.owner_watch import Owners
from resolver.repair.plan import RegionRepairs
from resolver.repair.region_report import region_report
from resolver.workers import slot_writer

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator

    from resolver.config import Settings
    from resolver.gpu.attribution import Joined
    from resolver.hami.discovery import Discovery, FoundRegion
    from resolver.hami.hostpid_policy import HostpidPolicy
    from resolver.hami.region import RegionView, SharedRegion
    from resolver.log.journal import Journal
    from resolver.pids.pidmap import PidMap
    from resolver.repair.plan import Order
    from resolver.repair.slot_states import SlotState
    from resolver.state import RegionReport

#: Seconds after which every directory is listed anew; and where the kernel reports what is new in all of them.
_DISCOVER_EVERY, _DISCOVER_WATCHED = 1.0, 120.0
#: Memory goes back when so many slots and namespaces are gone, and nobody is shown them any more; and once again, as a
#: busy machine is late with that.
_MANY_UNUSED, _UNUSED_SECONDS = 1024, (1.5, 5.0)
#: CPU seconds after which a container's turn in a pass goes to the next one, and after which a pass ends.
_TURN_SECONDS, _PASS_SECONDS = 0.01, 0.1
#: Seconds, by the clock, after which no more rounds of turns are begun in a pass, and who had no turn yet waits for the
#: next one; but not for more than so many in a row.
_ROUNDS_SECONDS, _MOST_PASSED_OVER = 0.1, 4
#: CPU seconds that no container is charged for a region that was only read: a thousandth of what it may cost meanwhile.
_TRIFLE_SECONDS = 5e-5
#: What is due so soon is done at once: one pass for all is cheaper than one for each.
_TOGETHER_SECONDS = 0.005
#: Regions that are read before what they say is looked at, as long as that is nothing new.
_READ_TOGETHER = 16


class _Pass(Account):
    """One pass: what it is made with, and what it has cost so far."""

    def __init__(
        self, policy: HostpidPolicy, joined: Joined, budgets: Budgets, *, patient: bool, everything: bool
    ) -> None:
        self.now = time.monotonic()
        self.policy = policy
        self.joined = joined
        self.patient = patient
        self.everything = everything
        self.ahead = _TOGETHER_SECONDS  # what is due within so many seconds is done now
        self.slices = Slices()
        self.spent = 0.0  # CPU seconds
        self.long = False  # it has gone on for long, whoever had the CPU
        self._budgets = budgets

    def spend(self, container: str, seconds: float) -> None:
        """Charge so many seconds to a container, and to the pass."""
        self.spent += seconds
        self._budgets.spend(container, seconds)

    def spend_if_any(self, container: str, seconds: float) -> None:
        """The same; what is next to nothing is nobody's in particular."""
        if seconds < _TRIFLE_SECONDS:
            self.spent += seconds
        else:
            self.spend(container, seconds)

    def over(self, container: str) -> bool:
        """Whether this container has to wait for a later pass."""
        return self.patient and self._budgets.over(container)

    def ends(self, part: float = 1.0) -> bool:
        """Whether the pass, or this part of it, has taken all that it may: what was not begun is the next one's."""
        return self.patient and (self.long or self.spent >= _PASS_SECONDS * part)


class _Work:
    """What is to be done for one region in this pass."""

    __slots__ = ("begun", "due", "orders", "repairs")

    def __init__(self, repairs: RegionRepairs, now: float) -> None:
        self.repairs = repairs
        self.due = repairs.due(now)  # taken from its end
        self.orders: Iterator[Order | None] | None = None
        self.begun = False  # then it is brought to some end, so that something comes of what it has cost


class Repairer:
    """Every region of the node and what is known of its slots."""

    def __init__(
        self,
        settings: Settings,
        procfs: Procfs,
        pidmap: PidMap,
        counters: Counter[str],
        journal: Journal,
        namespaces: KnownNamespaces | None = None,
    ) -> None:
        """``namespaces`` are the node's, where look-ups are made in them, too."""
        self.settings = settings
        self.procfs = procfs
        self.pidmap = pidmap
        self.counters = counters
        self.journal = journal
        self.regions: dict[str, RegionRepairs] = {}
        self.owners = Owners(procfs)
        self.budgets = Budgets()
        self.watches = Watches(self.budgets, counters)
        self._attention = Attention()
        self._names = ContainerNames(settings.container_logs_dir, settings.pod_logs_dir)
        self._discoveries = {name: make() for name, make in self._wanted(settings).items()}
        self.writing = Writing(counters, journal)
        self._namespaces = namespaces or KnownNamespaces(procfs, pidmap)
        self._owner_finder = OwnerFinder(procfs, pidmap, names=self._names, known=self._namespaces)
        self._abandoned = Abandoned(procfs)
        self._restless: set[str] = set()  # regions of which something is to be done at their next look
        self._passed_over: dict[str, int] = {}  # containers that had no turn, and for how many passes
        self._next_discovery = 0.0
        self._alone = asyncio.Lock()  # a pass, or what is done between two of them
        self._joined: Joined | None = None
        self._policy: HostpidPolicy | None = None
        self.changes = 1  # how often something that is shown became another
        self._changes_taken = 0
        self._next_refresh = 0.0  # of the discoveries, by the clock
        self._rests = Rests()
        self.not_before = 0.0  # events bring no pass further forward
        self._listed_at = 0.0  # when every directory was listed
        self._lost_at = 0.0  # when everything was, or is to be, checked for want of events
        self._answered = 0.0  # when that was first seen, on the monotonic clock
        self._reports: dict[str, RegionReport] = {}
        self.hami_counts = CountsOfRegions()
        self._unused = 0  # slots and namespaces that memory was needed for and is not any more
        self._unused_since = 0.0
        self._given_back = 0  # how often since then

    async def pass_once(
        self, policy: HostpidPolicy, joined: Joined, *, patient: bool = True, everything: bool = True
    ) -> None:
        """One pass. ``patient=False``: whatever it costs, as this pass is the only one.

        Not ``everything``: only over regions that are due, as `next_pass` says when.

        Containers come in the order of what they have left of their budgets, so that one with nothing expensive about
        it need not wait for those with, and take turns from then on.
        """
        async with self._alone:
            began = time.thread_time()
            await self._pass(_Pass(policy, joined, self.budgets, patient=patient, everything=everything))
            cost, now = time.thread_time() - began, time.monotonic()
            self.not_before = now + min(self._rests.after(cost, now), self.settings.interval)

    async def _pass(self, this: _Pass) -> None:
        self._take_in(this)
        self.budgets.forget_full()
        if gone := self._namespaces.take_gone():
            self._unused, self._unused_since = self._unused + gone, this.now
        if self._unused >= _MANY_UNUSED and this.now - self._unused_since > _UNUSED_SECONDS[self._given_back]:
            give_back_memory()
            self._given_back = (self._given_back + 1) % len(_UNUSED_SECONDS)
            if not self._given_back:
                self._unused = 0
        self.journal.catch_up()
        self.writing.log_zeroed()
        await self._discover(this)
        await this.slices.breathe()
        self._take_in_ends()
        await this.slices.breathe()
        busy = await self._read_all(this)
        # The map has to be younger than the sight of the slots: then a process that is not in it does not exist.
        asked = any(work.due for works in busy.values() for work in works)
        if asked and not await self.pidmap.catch_up(this.slices, unhurried=this.patient):
            for works in busy.values():
                for work in works:
                    del work.due[:]
        elif asked:
            await self._owner_finder.catch_up(
                this.slices, bounded=this.patient
            )  # nobody's cost in particular
        until = time.monotonic() + _ROUNDS_SECONDS
        before, self._passed_over = self._passed_over, {}
        while busy:
            for container, works in list(busy.items()):
                await this.slices.breathe()
                times = before.get(container, 0)
                late = this.patient and time.monotonic() >= until
                if late and not works[0].begun and times < _MOST_PASSED_OVER:
                    # Where the machine is busy a round of many takes seconds, and whose slot is new waits for its end.
                    self._passed_over[container] = times + 1
                    del busy[container]
                elif not await self._turn_alone(container, works, this):
                    del busy[container]
            # Everybody had a turn. The writer takes its time, which is nobody's CPU here, and a slot that is new waits.
            this.long = time.monotonic() >= until

    def _take_in(self, this: _Pass) -> None:
        """What NVML and the kernel have reported since the last pass."""
        if this.joined is not self._joined:
            changed = this.joined.changed(self._joined)
            self._joined, self._answered = this.joined, this.now
            for path, repairs in self.regions.items() if changed is None or changed else ():
                if repairs.values_changed(changed):
                    self._attention.by(path, this.now)
        if this.policy != self._policy:
            self._policy, this.everything = this.policy, True
        self.take_events()
        self.watches.tidy()
        self.journal.trouble("watches", self.watches.why_not, "not_watched", "watched_again")

    def _take_in_ends(self) -> None:
        """Processes that have ended, and files that nobody has open any more."""
        now = time.monotonic()
        for state in self.owners.ended():
            for path, repairs in self.regions.items():
                if repairs.ended(state):
                    self._attention.by(path, now)
        for repairs in self._abandoned.step():
            self._attention.by(repairs.region.path, now)
            self.journal.record(
                "region_abandoned", container=repairs.whose.container, path=repairs.region.path
            )

    def use(self, settings: Settings) -> None:
        """Take over new settings; between two passes only."""
        wanted = self._wanted(settings)
        for name in self._discoveries.keys() - wanted.keys():
            discovery = self._discoveries.pop(name)
            for path in discovery.regions:
                self.drop(path)
            discovery.close()
        self._discoveries = {
            name: self._discoveries[name] if name in self._discoveries else make()
            for name, make in wanted.items()
        }
        self._next_discovery = self._next_refresh = 0.0
        self._attention.everything(0.0)
        self.settings = settings

    def close(self) -> None:
        """Give everything back: the child, handles, files."""
        self.writing.worker.stop()
        for repairs in self.regions.values():
            self._release(repairs)
        self.regions.clear()
        self._reports.clear()
        for discovery in self.discoveries:
            discovery.close()
        self.watches.close()
        self.owners.close()

    # -- regions ------------------------------------------------------------------------------------

    @property
    def discoveries(self) -> tuple[Discovery, ...]:
        """What finds the regions."""
        return tuple(self._discoveries.values())

    def _wanted(self, settings: Settings) -> dict[object, Callable[[], Discovery]]:
        """What makes the discoveries that the settings ask for, each by what distinguishes it from the others."""
        dirs = settings.containers_dir
        wanted: dict[object, Callable[[], Discovery]] = {}
        if settings.mapped_regions:
            wanted["mappings"] = lambda: MappingFinder(
                self.procfs, self._users_without_slot, self.pidmap.arrival, self._in_use
            )
        wanted["directories", dirs] = lambda: DirectoryFinder(
            dirs, self.procfs, budgets=self.budgets, watches=self.watches, names=self._names
        )
        return wanted

    def _users_without_slot(self) -> set[int]:
        """Host PIDs of the processes that NVML lists and no slot is known of."""
        known = (None, SampleReason.PROCESS_ENDED)  # None: it owns a slot
        used = self._joined.used if self._joined else ()
        return {each.host_pid for each in used if each.no_slot not in known}

    def _in_use(self, path: str) -> bool:
        """Whether a slot of that region has a living owner."""
        repairs = self.regions.get(path)
        return repairs is not None and any(state.owner is not None for state in repairs.states.values())

    async def _discover(self, this: _Pass) -> None:
        full = this.now >= self._next_discovery
        by_clock = full or this.everything or this.now >= self._next_refresh
        if full:
            self._listed_at = this.now
        for discovery in self.discoveries:
            if by_clock or this.now >= discovery.wants():
                await self._refresh(discovery, this, full=full)
            if not this.patient and await discovery.settle():
                await self._refresh(discovery, this, full=False)
            for path in discovery.dirs:
                missing = (
                    f"none of {', '.join(KNOWN_DIRS)} exists; waiting for one"
                    if path == AUTO
                    else "it does not exist; waiting for it"
                )
                trouble = missing if path in discovery.missing_dirs else ""
                self.journal.trouble(
                    f"dir {path}", trouble, "containers_dir_missing", "containers_dir_found", path=path
                )
        if by_clock:
            watched = all(discovery.watched for discovery in self.discoveries)
            if full:
                self._next_discovery = this.now + (_DISCOVER_WATCHED if watched else _DISCOVER_EVERY)
            pause = self.settings.interval * (QUIET_INTERVALS if watched else 1)
            self._next_refresh = this.now + pause
            if not this.everything:
                # All that is due before the next such pass: each region would wake us at a time of its own.
                this.ahead = pause

    async def _refresh(self, discovery: Discovery, this: _Pass, *, full: bool) -> None:
        changes = discovery.refresh(full=full)
        for region in changes.removed:
            self.drop(region.path)
        for found in changes.added:
            await this.slices.breathe()
            with this.charge(found.whose.account):
                self._add(discovery, found)
        for path, why in changes.rejected:
            self._count_rejected(path, why)

    def _add(self, discovery: Discovery, found: FoundRegion) -> None:
        region, whose = found
        try:
            location = discovery.locate(region)
        except RegionRejected as why:
            self._count_rejected(region.path, why)
            discovery.reject(region, why)  # and tried again later
            return
        blame = self.writing.blame(whose.account)
        self.changes += 1
        age = max(0.0, time.time() - region.mtime_ns / 1e9)  # since a process attached: it writes a byte
        self._attention.found(region.path, time.monotonic() - age)
        self.regions[region.path] = RegionRepairs(region, whose, location, blame)
        self.journal.record(
            "region_found",
            about=directory_of(region.path),
            container=whose.container,
            path=region.path,
            layout=region.layout.name,
        )

    def _reject(self, region: SharedRegion, why: RegionRejected) -> None:
        for discovery in self.discoveries:
            discovery.reject(region, why)  # those that do not know it do nothing

    def rejected(self) -> dict[str, RegionReason]:
        """What is skipped now, and why, by path."""
        return {path: why for each in self.discoveries for path, why in each.rejected.items()}

    def _count_rejected(self, path: str, why: RegionRejected) -> None:
        self.changes += 1
        self.counters[CounterByReason.REJECTED.of(why.reason)] += 1
        self.journal.record(
            "region_rejected",
            level="warning",
            about=directory_of(path),
            path=path,
            reason=why.reason,
            why=why.detail,
        )

    def drop(self, path: str) -> None:
        """Give up a region that is gone; nothing happens if it is not known."""
        repairs = self.regions.pop(path, None)
        self._reports.pop(path, None)
        self.changes += 1
        self.hami_counts.forget(path)
        if repairs is not None:
            self._unused += len(repairs.view.slots) if repairs.view is not None else 0
            self._unused_since = time.monotonic()
            self._release(repairs)
            self._owner_finder.forget(repairs.place)
            self._abandoned.forget(path)
            self._restless.discard(path)
            self._attention.forget(path)
            self.watches.forget(path)
            self.writing.forget(path)
            self.journal.record(
                "region_gone", about=directory_of(path), container=repairs.whose.container, path=path
            )

    def shed(self) -> None:
        """Descriptors ran out: give up half of the regions, so that there are some for the work on the others."""
        why = RegionRejected(RegionReason.IO_ERROR, "it was given up, all descriptors are in use")
        for discovery in self.discoveries:
            regions = list(discovery.regions.values())
            discovery.max_regions = max(1, len(regions) // 2)
            for region in regions[discovery.max_regions :]:
                discovery.reject(region, why)
                self.drop(region.path)

    def _release(self, repairs: RegionRepairs) -> None:
        for state in repairs.states.values():
            self.owners.unwatch(state)
        repairs.close()

    # -- one pass -----------------------------------------------------------------------------------

    async def _read_all(self, this: _Pass) -> dict[str, deque[_Work]]:
        """Read every region; returns what is to be done, by container, who has most left of its budget first."""
        # On a quiet node this is where a pass ends: nothing changed since all was right. So nothing is done for each
        # region but what has to be, and the clock is read once.
        busy: dict[str, deque[_Work]] = {}
        until = math.inf if this.everything else this.now + this.ahead
        due = [self.regions[path] for path in self._attention.due(until)]
        shares = Shares(this.spend_if_any)
        waiting, more = iter(self.budgets.most_left_first(due, _account)), True
        while more:
            read, more = self._read_some(waiting, this, shares)
            for repairs, view in read:
                container = repairs.whose.account
                if self._look(repairs, view, this):
                    busy.setdefault(container, deque()).append(_Work(repairs, this.now + this.ahead))
                shares.took(container)
            if this.slices.over():
                shares.settle()
                if this.ends(0.5):
                    break
                await this.slices.give_way()
                waiting = iter([repairs for repairs in waiting if self._is_here(repairs)])
                shares.begin()
        shares.settle()
        return busy

    def _read_some(
        self, waiting: Iterator[RegionRepairs], this: _Pass, shares: Shares
    ) -> tuple[list[tuple[RegionRepairs, RegionView]], bool]:
        """Read regions up to the first one of which there is news; what they say, and whether there are more.

        What a region says pushes all else out of the processor's caches, so several are read before any is looked at.
        """
        read: list[tuple[RegionRepairs, RegionView]] = []
        watched, spenders, took = self.watches.keys, self.budgets.spenders, shares.took
        for repairs in waiting:
            container, region = repairs.whose.account, repairs.region
            if container in spenders and this.over(container):
                self._put_off(repairs, this)
                took(container)
                return read, True
            if region.path not in watched:
                self._watch(repairs)
            try:
                view = region.read()
            except RegionRejected as why:
                self._count_rejected(region.path, why)
                self._reject(region, why)
                self.drop(region.path)
                took(container)
                return read, True
            read.append((repairs, view))
            took(container)
            if view is not repairs.view or len(read) == _READ_TOGETHER:
                return read, True
        return read, False

    def _look(self, repairs: RegionRepairs, view: RegionView, this: _Pass) -> bool:
        """Take in what a region says; whether anything is to be done for it."""
        now, settings, path = this.now, self.settings, repairs.region.path
        watched = path in self.watches.keys
        for state in repairs.observe(view):
            self.owners.unwatch(state)
        if settings.hami_metrics:
            self.hami_counts.take(repairs, now)
        inputs = this.policy, settings.write_utilization, settings.dry_run
        stirs = repairs.stirs(now, *inputs, ahead=this.ahead)
        quiet_until = 0.0 if stirs else repairs.quiet_until()
        (self._restless.discard if quiet_until else self._restless.add)(path)
        self._attention.looked(path, now, settings.interval, watched=watched, quiet_until=quiet_until)
        return stirs

    def _is_here(self, repairs: RegionRepairs) -> bool:
        """Whether the region was not given up while others had their turn."""
        return self.regions.get(repairs.region.path) is repairs

    def _watch(self, repairs: RegionRepairs) -> None:
        """Have the kernel report what happens to the file."""
        region, whose = repairs.region, repairs.whose

        def on_event(happened: int) -> None:
            now = time.monotonic()
            if happened & MODIFY:
                repairs.attached()
                self._attention.attached(region.path, now)
            else:
                self._attention.let_go(region.path, now)

        self.watches.watch(region.path, whose.account, region.fd, OF_A_FILE, on_event)

    def _put_off(self, repairs: RegionRepairs, this: _Pass) -> None:
        """Its container is over its budget."""
        self.counters[CounterName.OVER_BUDGET] += 1
        self._attention.put_off(repairs.region.path, this.now + self.settings.interval)
        if repairs.put_off(this.now):
            self._report(repairs, this.joined)

    async def _turn_alone(self, container: str, works: deque[_Work], this: _Pass) -> bool:
        """The same as `_turn`; a defect in it ends this container's turn, and nobody else's."""
        try:
            return await self._turn(container, works, this)
        except Exception as error:
            if no_descriptors(error):  # that is everybody's trouble
                raise
            # A defect, or something that a tenant made the kernel refuse: shown, counted, and survived.
            self.counters[CounterName.INTERNAL_ERRORS] += 1
            whom = works[0].repairs.whose.container if works else container
            self.journal.record("internal_error", level="exception", container=whom, step="pass")
            return False

    async def _turn(self, container: str, works: deque[_Work], this: _Pass) -> bool:
        """One container's turn; whether there is more to be done for it in this pass."""
        began = this.spent
        while works:
            work = works[0]
            over = this.over(container)
            later = over or this.ends()
            if not self._is_here(work.repairs):
                works.popleft()
            elif later and not work.begun:
                works.popleft()
                if over:
                    with this.charge(container):
                        self._put_off(work.repairs, this)
            elif this.spent - began >= _TURN_SECONDS:
                return True
            elif work.due and not later:
                work.begun = True
                with this.charge(container):
                    self._find_owner(work.repairs, work.due.pop(), this.now)
            elif await self._write(work, this) and not later:
                return True
            else:
                works.popleft()
                with this.charge(container):
                    self._finish(work, this)
                    if over:
                        self._put_off(work.repairs, this)
            await this.slices.breathe()
        return False

    def _find_owner(self, repairs: RegionRepairs, index: int, now: float) -> None:
        state = repairs.at(index)
        mtime_ns = repairs.region.mtime_ns
        found = self._owner_finder.owner(repairs.place, repairs.shown, state.slot.pid, mtime_ns)
        state.found(found, now, watched=repairs.region.path in self.watches)
        if found is UnresolvedReason.OTHER_CONTAINER and isinstance(repairs.place, PodFile):
            state.dead = False  # one of the same pod uses a file that it can reach, too
        if isinstance(found, ProcessHandle):
            self.owners.watch(state, found)
            host_pid, whose = found.process.host_pid, repairs.whose
            # A claim is no container: its processes are in any.
            container = self.owners.container_id(host_pid) if whose.claim else whose.container
            self.pidmap.name_container(host_pid, container)
        elif found is UnresolvedReason.NO_SUCH_PROCESS and state.looks > 1 and not state.dead:
            state.dead = self._owner_finder.vacant(repairs.place, state.slot.pid)
            if not state.dead:
                self._abandoned.suspect(repairs)
        repairs.put_back(state)

    async def _write(self, work: _Work, this: _Pass) -> bool:
        """One batch for the writer; whether there may be more."""
        repairs, container = work.repairs, work.repairs.whose.account
        work.begun = True
        if work.orders is None:
            work.orders = self._plan(repairs, this)
        batch: list[Order] = []
        more = True
        while more and len(batch) < slot_writer.MAX_ORDERS:
            await this.slices.breathe()
            if not self._is_here(repairs):
                return False
            with this.charge(container):
                more = _collect(work.orders, batch)
        if self.settings.dry_run:
            with this.charge(container):
                for order in batch:
                    self.writing.would_write(repairs, order)
        elif batch:
            this.spend(container, len(batch) * ORDER_SECONDS)
            more = await self.writing.carry_out(repairs, batch) and more
        return more

    def _plan(self, repairs: RegionRepairs, this: _Pass) -> Iterator[Order | None]:
        def conflict(state: SlotState, wait: float) -> None:
            self.counters[CounterName.CONFLICTS] += 1
            self.journal.record(
                "conflict",
                level="warning",
                container=repairs.whose.container,
                slot=state.slot.index,
                ns_pid=state.slot.pid,
                hostpid=state.slot.hostpid,
                why="another writer changed hostpid back",
                times=state.conflicts,
                next_try_seconds=wait,
            )

        writes, actual = self.settings.write_utilization, this.joined.utilization
        return repairs.plan(this.now, this.policy, actual, writes, conflict, self._answered)

    def _finish(self, work: _Work, this: _Pass) -> None:
        """All that could be done for a region in this pass was."""
        repairs, joined = work.repairs, this.joined
        if not self._is_here(repairs):
            return
        if not self.settings.dry_run:
            self._log_stuck(repairs, this)
        repairs.rest()
        path, quiet_until = repairs.region.path, repairs.quiet_until()
        (self._restless.discard if quiet_until else self._restless.add)(path)
        watched, interval = path in self.watches, self.settings.interval
        self._attention.looked(path, this.now, interval, watched=watched, quiet_until=quiet_until)
        self._report(repairs, joined)

    def _log_stuck(self, repairs: RegionRepairs, this: _Pass) -> None:
        """Values that do not stay right: once for each process in a slot."""
        for state in repairs.planned():
            if state.evidence is None:
                continue
            state.stuck = state.evidence.why(state.slot.hostpid, this.policy, this.now)
            if state.stuck and not state.evidence.logged:
                state.evidence.logged = True
                self.counters[CounterName.SLOTS_STUCK] += 1
                self.journal.record("slot_stuck", level="warning", **of_slot(repairs, state), why=state.stuck)

    # -- between two passes -------------------------------------------------------------------------

    def lingering(self) -> Iterator[tuple[int, str]]:
        """Owners and devices whose value nobody will zero when they idle, as far as is known."""
        for repairs in self.regions.values():
            yield from repairs.lingering()

    def contested(self) -> bool:
        """Whether some tenant's watcher writes wrong values, so that `follow` has something to do."""
        return not self.settings.dry_run and any(repairs.contested for repairs in self.regions.values())

    async def follow(self) -> None:
        """Put right what some tenants' watchers make wrong at each of their ticks, at their containers' expense."""
        async with self._alone:
            for repairs in [each for each in self.regions.values() if each.contested]:
                container = repairs.whose.account
                if self.budgets.over(container):
                    continue
                with self.budgets.charge(container):
                    orders = list(repairs.follow(repairs.region.word, time.monotonic()))
                if orders:
                    self.budgets.spend(container, len(orders) * ORDER_SECONDS)
                    await self.writing.carry_out(repairs, orders)

    # -- when ----------------------------------------------------------------------------------------

    def take_events(self) -> None:
        """Read some of the kernel's events about tenants' files; `next_pass` may be sooner then."""
        if self.watches.take():
            # What was lost is unknown: check everything, but not all the time if tenants make it so.
            now = time.monotonic()
            when = max(now, self._lost_at + self.settings.interval)
            self._lost_at = when
            self._attention.everything(when)
            self._next_refresh = min(self._next_refresh, when)
            self._next_discovery = min(self._next_discovery, max(when, self._listed_at + _DISCOVER_EVERY))

    def next_pass(self) -> float:
        """When there is something to do next, on the monotonic clock, as far as is known."""
        now, interval = time.monotonic(), self.settings.interval
        wait = interval if self.owners.polled else max(interval, self._abandoned.wait())
        clock = min(self._next_refresh, self._next_discovery, now + wait)
        events = min(self._attention.next(), *(each.wants() for each in self.discoveries))
        return max(min(clock, events), self.not_before)

    @property
    def restless(self) -> bool:
        """Whether something is not as it should be, so that NVML's next answer may be waited for."""
        return bool(self._restless)

    def is_news(self, joined: Joined) -> bool:
        """Whether it says something else of a process than what the last pass went by."""
        changed = joined.changed(self._joined)
        return changed is None or bool(changed)

    def take_news(self) -> bool:
        """Whether a region came or went, or a report changed, since the last call."""
        taken, self._changes_taken = self._changes_taken, self.changes
        return taken != self.changes

    def unwatched(self) -> int:
        """How many regions are read by the clock alone, since the kernel does not report their changes."""
        return sum(path not in self.watches for path in self.regions)

    # -- the picture --------------------------------------------------------------------------------

    def _report(self, repairs: RegionRepairs, joined: Joined) -> None:
        report = region_report(repairs, joined, self.owners.container_id, time.monotonic())
        self.changes += self._reports.get(repairs.region.path) != report
        self._reports[repairs.region.path] = report

    def reports(self) -> tuple[RegionReport, ...]:
        """Every region and slot as of the last time that it was its turn."""
        return tuple(self._reports.values())


def _account(repairs: RegionRepairs) -> str:
    return repairs.whose.account


def _collect(orders: Iterator[Order | None], batch: list[Order]) -> bool:
    """Fill up a batch for the slot_writer, for a slice of time; whether there may be more."""
    slices = Slices()
    for order in orders:
        if order is not None:
            batch.append(order)
            if len(batch) == slot_writer.MAX_ORDERS:
                return True
        elif slices.over():
            return True
    return False
