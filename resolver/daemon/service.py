"""Daemon: passes over the slots and collections from NVML on one event loop."""

import asyncio
import contextlib
import math
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from functools import partial
from typing import Any

from resolver import api
from resolver.api import ApiSockets
from resolver.base.counters import CounterByReason, Shortage
from resolver.base.event_log import EventLog
from resolver.base.journal import Journal, setup_logging
from resolver.base.reasons import BrokerRefusal
from resolver.base.source_records import SourceName
from resolver.base.version import VERSION
from resolver.config import OFF, Reloading, Settings, changed
from resolver.containers.known_namespaces import KnownNamespaces
from resolver.daemon.hostpid_decision import Decision
from resolver.daemon.notify import Systemd
from resolver.daemon.pace import Alarm, Pace
from resolver.daemon.rights import Rights
from resolver.daemon.snapshots import Snapshots
from resolver.linux.procfs import Procfs
from resolver.lookup.cached import LiveLookup
from resolver.pids.ladder import Ladder, open_source
from resolver.pids.pidmap import PidMap
from resolver.pids.scan import ScanSource
from resolver.pids.source import close as close_source
from resolver.repair.repairer import Repairer
from resolver.usage.gpu_users import GpuUsers
from resolver.usage.running_containers import Census
from resolver.workers.lanes import Lanes
from resolver.workers.means import Shortages, shortage_of

#: Intervals between two checks of a working source; a failing source is checked at once.
_TEND_INTERVALS = 5


class Service:
    """The daemon: makes the parts, runs them, and ends them."""

    def __init__(
        self,
        settings: Settings,
        procfs: Procfs | None = None,
        *,
        in_charge: bool = False,
        origins: Mapping[str, str] | None = None,
        holder: str = "",
    ) -> None:
        """Set ``in_charge`` if the whole process is this daemon: it drops capabilities and serves the API.

        ``holder`` is the PID of the node's writing daemon: this one writes and serves after `take_over`.
        """
        _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):  # regions and processes take a descriptor each
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.reloading = Reloading(settings, origins or {})
        self.events = EventLog()
        self.journal = journal = Journal(self.events)
        self.counters = counters = Counter[str]()
        self.procfs = procfs = procfs or Procfs(careful=True)
        self.pidmap = pidmap = PidMap(ScanSource(procfs))
        self.lanes = lanes = Lanes(counters=counters)
        namespaces = KnownNamespaces(procfs, pidmap)
        self.repairer = Repairer(
            settings, procfs, pidmap, counters, journal, lanes, namespaces, wake=self._on_news
        )
        self.live = LiveLookup(procfs, pidmap, namespaces)
        opener = partial(open_source, run_dir=settings.run_dir)
        self.ladder = Ladder(settings.source, procfs, settings.map_size, pidmap.use, journal.record, opener)
        self.decision = Decision(settings.hostpid_namespace, journal)
        census = Census(procfs, pidmap, namespaces, self.repairer.names, journal, lanes)
        self.gpus = GpuUsers(procfs, pidmap, self.repairer, census, lanes, counters, journal)
        self.snapshots = Snapshots(
            self.reloading, self.ladder, pidmap, self.decision, self.gpus, self.repairer, counters, journal
        )
        self.snapshots.holder = holder
        self._pace = Pace(counters, journal, self.snapshots.means, self._short_of)
        self._connections = Shortages("connections")
        self.snapshots.means.append(self._connections)
        self._rights = Rights(self.ladder.steps, journal) if in_charge else None
        self.sockets: ApiSockets | None = None
        self._hurry = Alarm()  # starts the next pass early
        self._made = 0  # passes before this one
        self._watch_fd, self._hears_ends = -1, False  # the descriptors that the loop watches
        self._our_turn = asyncio.Event()
        if not holder:
            self._our_turn.set()

    @property
    def settings(self) -> Settings:
        return self.reloading.settings

    async def run(self) -> None:
        """Work until `stop`. Raises `CannotKnow` if the requested source does not work here."""
        if self._rights is not None:
            self.sockets = api.make_sockets(self.settings, self.journal)  # not listening yet
            self._rights.give_up()
        if self.settings.source != SourceName.AUTO:
            try:
                await self._pace.run([self.start_source()])
            except BaseException:
                self.close()
                raise
        self.journal.log.info("started", version=VERSION, settings=changed(self.reloading.described))
        try:
            await self._pace.run(self._loops())
        finally:
            source, counted = self.pidmap.source.name, dict(self.pidmap.counters())
            self.close()
        self.journal.log.info(
            "stopped",
            passes=self.snapshots.passes,
            source=source,
            **{f"source_{name}": number for name, number in counted.items() if number},
            **{name: number for name, number in self.counters.items() if number},
        )

    def _loops(self) -> Iterator[Coroutine[Any, Any, None]]:
        yield self._every_nvml_interval(1, self.collect_once, self.gpus.ask_again, "nvml_interval")
        yield self._passes()
        yield self._tend_source()
        yield self.repairer.writing.keep_holds(self.repairer.budgets.over)
        if self._rights is not None:
            yield from self._servers()
            if (systemd := Systemd.from_environment()) is not None:
                yield systemd.keep_informed(self.snapshots.shown, self.settings.socket_path)

    async def _every_nvml_interval(
        self, times: int, step: Callable[[], Awaitable[None]], hurry: asyncio.Event, name: str
    ) -> None:
        due = lambda: time.monotonic() + times * self.settings.nvml_interval  # noqa: E731
        await self._pace.whenever(due, step, hurry, name)

    async def _passes(self) -> None:
        holder = self.snapshots.holder
        if holder:
            self.journal.log.info("waiting", holder=holder, why="another daemon writes on this node")
        await self._our_turn.wait()
        loop = asyncio.get_running_loop()
        self.listen()
        try:
            await self._pace.whenever(self._next_pass, self._due_pass, self._hurry, "interval")
        finally:
            loop.remove_reader(self.repairer.owners.fd)
            if self._watch_fd >= 0:
                loop.remove_reader(self._watch_fd)

    async def _due_pass(self) -> None:
        await self.pass_once(everything=False)
        self.listen()

    def listen(self) -> None:
        """Listen for owners' ends and file events; call it after each pass, which may add the first watch."""
        loop, watch_fd = asyncio.get_running_loop(), self.repairer.watches.fd
        if not self._hears_ends:
            self._hears_ends = True
            loop.add_reader(self.repairer.owners.fd, self._owner_ended)
        if self._watch_fd != watch_fd:
            self._watch_fd = watch_fd
            loop.add_reader(watch_fd, self._on_watch_events)

    def _on_news(self) -> None:
        self._hurry.at(self.repairer.next_pass())

    def _owner_ended(self) -> None:
        self._hears_ends = False
        asyncio.get_running_loop().remove_reader(self.repairer.owners.fd)
        self._hurry.at(self.repairer.not_before)

    def _on_watch_events(self) -> None:
        self.repairer.found.take_events()
        self._on_news()

    def _next_pass(self) -> float:
        self._hurry.at(math.inf)
        made, self._made = self._made, self.snapshots.passes
        if made == self._made:  # the pass failed: pause first
            return time.monotonic() + self.settings.interval
        tend_at = max(self.pidmap.source.tend_at, time.monotonic() + self.settings.interval)
        return min(self.repairer.next_pass(), tend_at)

    async def _tend_source(self) -> None:
        if self.settings.source == SourceName.AUTO:  # the scan serves until the best source has started
            await self.start_source()
        tend = lambda: self.ladder.tend(self.pidmap.source)  # noqa: E731
        await self._every_nvml_interval(_TEND_INTERVALS, tend, self.ladder.failed, "source")

    async def serve(self) -> None:
        """Serve the API from the take-over on."""
        if self.sockets is not None:
            api.load()  # a waiting daemon has time for it; after the take-over clients would wait
        await self._our_turn.wait()  # until then the socket belongs to the other daemon
        if self.sockets is not None:
            from resolver.api.context import View

            view = View(
                snapshot=self.snapshots.shown,
                live=self.live,
                procfs=self.procfs,
                events=self.events,
                inventories=self.snapshots.inventories,
                refused=self.refused,
            )
            await api.serve(view, self.settings, self.journal, self.sockets)

    def _servers(self) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield the servers. Imported late: without them the daemon weighs a third less."""
        yield self.serve()
        if self.settings.metrics_addr != OFF:
            from resolver import metrics

            yield metrics.serve(self.snapshots.shown, self.settings, self.journal, self.refused)
        if self.settings.broker:
            from resolver.daemon.broker import Broker

            for reason in BrokerRefusal:  # 0 from the start, for a rate
                self.counters[CounterByReason.BROKER_REFUSED.of(reason)] += 0
            policy = lambda: self.decision.policy  # noqa: E731
            broker = Broker(self.procfs, self.pidmap, policy, self.journal, self.counters, self.refused)
            yield broker.serve(self.settings.broker)

    def take_over(self) -> None:
        """Start writing after the previous daemon has ended."""
        self.journal.log.info("took_over", holder=self.snapshots.holder)
        self.snapshots.holder = ""
        self._our_turn.set()

    def stop(self) -> None:
        self._pace.stop()

    def reload(self, settings: Settings, origins: Mapping[str, str] | None = None) -> None:
        self.reloading.want(settings, origins or {})
        self._hurry.set()

    def close(self) -> None:
        self.gpus.sampler.stop()
        self.repairer.close()
        self.lanes.close()
        close_source(self.pidmap.source)
        if self.sockets is not None:
            self.sockets.close()

    async def start_source(self) -> None:
        """Find the best source, then give up the rights for its first start."""
        await self.ladder.start()
        if self._rights is not None:
            self._rights.source_started()

    async def collect_once(self) -> None:
        """Ask NVML, join its answer, and decide on ``hostpid``."""
        collection = await self.gpus.collect(self.settings.nvml_interval)
        self._decide()
        self.decision.weigh(self.repairer.watchers(), self.repairer.numbers())
        await self.gpus.count_containers()
        self.gpus.accounts.note(self.gpus.processes, self.gpus.joined, collection.devices)
        self.gpus.bypasses.note(self.gpus.processes)
        self.gpus.expect_idleness(collection)
        self._hurry.set()  # the next pass uses the answer
        self.snapshots.after_collection()

    async def pass_once(self, *, patient: bool = True, everything: bool = True) -> None:
        """Make one pass over the due slots, and a new snapshot."""
        if (names := self.reloading.take()) is not None:
            self.repairer.reload(self.settings)
            setup_logging(self.settings.log_format, self.settings.log_level)
            self._decide()
            self.journal.log.info("settings_reloaded", **names)
        source = self.pidmap.source
        if not self.ladder.keep_up(source):
            why = source.shortage()
            self.journal.trouble("source", why, "source_incomplete", "source_complete", source=source.name)
        began = time.perf_counter()
        await self.repairer.pass_once(
            self.decision.policy, self.gpus.joined, patient=patient, everything=everything
        )
        self._tell_means()
        seconds = time.perf_counter() - began
        self.snapshots.after_pass(seconds)

    def _decide(self) -> None:
        inventory = self.gpus.inventory
        self.decision.decide(
            self.settings.hostpid_namespace, inventory.driver_version, vgpu=inventory.in_vgpu_guest()
        )

    def _short_of(self, shortage: Shortage) -> None:
        if shortage is Shortage.DESCRIPTORS:
            self.repairer.found.shed()
        self._tell_means()

    def _tell_means(self) -> None:
        for means in self.snapshots.all_means():
            means.tell(self.journal)

    def refused(self, error: OSError) -> None:
        """Count a connection that was not accepted for lack of resources."""
        if lacks := shortage_of(error.errno):
            self._connections.refused(lacks, f"connections are not accepted: {error.strerror}")
