"""The daemon: passes over the slots, collections from NVML, and what both need to live side by side.

One thread, one event loop. A pass reads every region (some microseconds each), looks up owners that are not
known yet, and sends what has to change to the slot writer. NVML is asked beside it; a driver that hangs delays
no repair.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from resolver import __version__, api
from resolver.config import OFF, HostpidNamespace, SourceName, changed
from resolver.containers.known_namespaces import KnownNamespaces
from resolver.containers.log_names import ContainerNames
from resolver.containers.pod_names import PodNames
from resolver.counters import CounterByReason, CounterName
from resolver.daemon.decision import Decision
from resolver.daemon.driver_measurement import DriverMeasurement
from resolver.daemon.gpu_users import GpuUsers
from resolver.daemon.notify import Systemd
from resolver.daemon.pace import Pace
from resolver.daemon.reloading import Reloading
from resolver.daemon.rights import Rights
from resolver.daemon.running_containers import Census
from resolver.daemon.snapshots import Snapshots
from resolver.daemon.source_upkeep import SourceUpkeep
from resolver.gpu.sampler import LONGEST_WAIT
from resolver.linux.procfs import Procfs
from resolver.log.event_log import EventLog
from resolver.log.journal import Journal, setup_logging
from resolver.lookup.cached import LiveLookup
from resolver.pids.ladder import Ladder, open_source
from resolver.pids.listing import Listing
from resolver.pids.pidmap import PidMap
from resolver.pids.scan import ScanSource
from resolver.pids.source import close as close_source
from resolver.reasons import BrokerRefusal
from resolver.repair.repairer import Repairer

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping

    from resolver.api import ApiSockets
    from resolver.config import Settings

#: A source that fails is tended at once; one that works need not be so often.
_TEND_INTERVALS = 5
_FOLLOW_EVERY = 0.01  # seconds between two reads of values that a watcher makes wrong every 120 ms


class Service:
    """The daemon's life: it makes the parts, runs them, and ends them."""

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

        ``origins`` says where each setting comes from. ``holder`` is the PID of the daemon that
        writes on this node: nothing is written, and the API not served, until `take_over`.
        """
        _raise_descriptor_limit()
        self.reloading = Reloading(settings, origins or {})
        self.events = EventLog()
        self.journal = Journal(self.events)
        self.counters: Counter[str] = Counter()
        self.procfs = procfs or Procfs()
        self.pidmap = PidMap(Listing(ScanSource(self.procfs)))
        namespaces = KnownNamespaces(self.procfs, self.pidmap)
        self.repairer = Repairer(
            settings, self.procfs, self.pidmap, self.counters, self.journal, namespaces=namespaces
        )
        self.live = LiveLookup(self.procfs, self.pidmap, namespaces)
        self.ladder = Ladder(
            settings.source,
            self.procfs,
            settings.map_size,
            self.pidmap.use,
            self.journal.record,
            partial(open_source, run_dir=settings.run_dir),
        )
        self.source = SourceUpkeep(self.ladder, self.pidmap, self.journal)
        measurement = DriverMeasurement(
            settings.run_dir, self.repairer.owners, self.procfs, self.pidmap, self.counters, self.journal
        )
        if in_charge:
            measurement.enable(wanted=settings.hostpid_namespace is HostpidNamespace.AUTO)
        self.decision = Decision(settings.hostpid_namespace, measurement, self.journal)
        names = ContainerNames(settings.container_logs_dir, settings.pod_logs_dir)
        pods = PodNames(settings.pod_logs_dir)
        census = Census(self.procfs, self.pidmap, self.live, pods, self.journal, names)
        self.gpus = GpuUsers(
            self.procfs,
            self.pidmap,
            self.repairer,
            census,
            self.counters,
            self.journal,
            details=settings.gpu_details,
        )
        self.snapshots = Snapshots(
            self.reloading,
            self.pidmap,
            self.ladder,
            self.decision,
            self.gpus,
            self.repairer,
            self.counters,
            holder,
        )
        self._pace = Pace(self.counters, self.journal, self._out_of_descriptors)
        self._rights = Rights(settings, self.ladder.steps, self.journal) if in_charge else None
        self._sockets: ApiSockets | None = None
        self._contested = asyncio.Event()  # some tenant's watcher writes wrong values
        self._hurry = asyncio.Event()  # the next pass is not to wait for its time
        self._alarm: asyncio.TimerHandle | None = None  # for that
        self._made = 0  # passes before this one
        self._watch_fd = -1  # of which the loop hears
        self._our_turn = asyncio.Event()
        if not holder:
            self._our_turn.set()

    @property
    def settings(self) -> Settings:
        """Those in force."""
        return self.reloading.settings

    # -- life ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until `stop` is called. `CannotKnow` if the source that was asked for does not work here."""
        if self._rights is not None:
            self._sockets = api.make_sockets(self.settings, self.journal)  # nobody can reach them yet
            self._give_up_rights()
        if self.settings.source != SourceName.AUTO:
            try:
                await self._pace.unless_stopped(self.start_source())
            except BaseException:
                self.close()
                raise
        self.journal.log.info(
            "started",
            version=__version__,
            settings=changed(self.reloading.described),
        )
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
        """All that goes on side by side."""
        yield self._pace.every(self._nvml_interval, self.collect_once, self.gpus.ask_again, "nvml_interval")
        yield self._passes()
        yield self._tend_source()
        yield self._follow()
        if self._rights is not None:
            yield from self._servers()
            if (systemd := Systemd.from_environment()) is not None:
                yield systemd.keep_informed(self.snapshots.shown, self._standstill, self.settings.socket_path)

    def _standstill(self) -> str:
        return self.snapshots.shown().standstill(self.settings.interval)

    def _nvml_interval(self) -> float:
        return self.settings.nvml_interval

    def _tend_interval(self) -> float:
        return _TEND_INTERVALS * self.settings.nvml_interval

    async def _passes(self) -> None:
        holder = self.snapshots.holder
        if holder:
            self.journal.log.info("waiting", holder=holder, why="another daemon writes on this node")
        await self._our_turn.wait()
        loop = asyncio.get_running_loop()
        self._listen()
        try:
            await self._pace.whenever(self._next_pass, self._due_pass, self._hurry, "interval")
        finally:
            loop.remove_reader(self.repairer.owners.fd)
            if self._watch_fd >= 0:
                loop.remove_reader(self._watch_fd)

    async def _due_pass(self) -> None:
        await self.pass_once(everything=False)
        self._listen()

    def _listen(self) -> None:
        """Hear of the end of the next owner; only after a pass can there be a next one, or a first watch."""
        loop, watch_fd = asyncio.get_running_loop(), self.repairer.watches.fd
        loop.add_reader(self.repairer.owners.fd, self._owner_ended)
        if self._watch_fd != watch_fd:
            self._watch_fd = watch_fd
            loop.add_reader(watch_fd, self._on_watch_events)

    def _owner_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self.repairer.owners.fd)
        self._alarm_at(self.repairer.not_before)

    def _on_watch_events(self) -> None:
        """A tenant did something with its files: the next pass may be sooner."""
        self.repairer.take_events()
        self._alarm_at(self.repairer.next_pass())

    def _next_pass(self) -> float:
        self._alarm_at(math.inf)
        made, self._made = self._made, self.snapshots.passes
        if made == self._made:  # it failed: not again at once
            return time.monotonic() + self.settings.interval
        tend_at = max(self.pidmap.source.tend_at, time.monotonic() + self.settings.interval)
        return min(self.repairer.next_pass(), tend_at)

    def _alarm_at(self, when: float) -> None:
        """Hurry at this time; a later one than that which is set changes nothing, but for infinity, which unsets it."""
        if self._alarm is not None:
            if self._alarm.when() <= when < math.inf:
                return
            self._alarm.cancel()
            self._alarm = None
        if when < math.inf:
            self._alarm = asyncio.get_running_loop().call_at(when, self._hurry.set)

    async def _tend_source(self) -> None:
        if (
            self.settings.source == SourceName.AUTO
        ):  # nothing waits for the best one: the scan does until it is there
            await self.start_source()
        await self._pace.every(self._tend_interval, self.source.tend, self.source.failed, "nvml_interval")

    async def _follow(self) -> None:
        """Between the passes, only while some tenant's watcher writes wrong values: put them right after its ticks."""
        while True:
            await self._contested.wait()
            with contextlib.suppress(
                OSError
            ):  # no descriptors left, say: the next pass meets it too, and logs it
                await self.repairer.follow()
            await asyncio.sleep(_FOLLOW_EVERY)

    async def _serve(self) -> None:
        if self._sockets is not None:
            api.load()  # a daemon that waits has the time; after the take-over others would wait for it
        await self._our_turn.wait()  # the socket is the other daemon's as long
        if self._sockets is not None:
            from resolver.api.context import View

            view = View(
                snapshot=self.snapshots.shown,
                live=self.live,
                procfs=self.procfs,
                events=self.events,
                inventories=self.snapshots.inventories,
            )
            await api.serve(view, self.settings, self.journal, self._sockets)

    def _servers(self) -> Iterator[Coroutine[Any, Any, None]]:
        """Who answers others. Imported late: without them the daemon weighs a third less."""
        yield self._serve()
        if self.settings.metrics_addr != OFF:
            from resolver import metrics

            yield metrics.serve(self.snapshots.shown, self.settings, self.journal)
        if self.settings.broker:
            from resolver.daemon import broker

            for reason in BrokerRefusal:
                # There from the start, for a rate to start from.
                self.counters[CounterByReason.BROKER_REFUSED.of(reason)] += 0
            yield broker.serve(
                self.settings,
                self.procfs,
                self.pidmap,
                lambda: self.decision.policy,
                self.journal,
                self.counters,
            )

    def take_over(self) -> None:
        """The daemon that wrote on this node has ended: begin."""
        self.journal.log.info("took_over", holder=self.snapshots.holder)
        self.snapshots.holder = ""
        self._our_turn.set()

    def stop(self) -> None:
        """End `run` now."""
        self._pace.stop()

    def reload(self, settings: Settings, origins: Mapping[str, str] | None = None) -> None:
        """Take over new settings at the next pass."""
        self.reloading.want(settings, origins or {})
        self._hurry.set()

    def close(self) -> None:
        """Give everything back: children, handles, files."""
        self.gpus.sampler.stop()
        self.decision.measurement.close()
        self.repairer.close()
        close_source(self.pidmap.source)
        if self._sockets is not None:
            self._sockets.close()

    # -- the steps ----------------------------------------------------------------------------------

    async def start_source(self) -> None:
        """Find the best source, then give up the rights that only its first start took."""
        await self.ladder.start()
        if self._rights is not None:
            self._rights.source_started()
        self._give_up_rights()

    async def collect_once(self) -> None:
        """Ask NVML, join what it says, and see what the driver's version means for ``hostpid``."""
        collection = await self.gpus.collect(self.settings.nvml_interval, self._wait_for_news())
        self._decide()
        self.decision.consider(collection)
        await self.gpus.count_containers()
        self.gpus.expect_idleness(collection)
        if self.repairer.is_news(self.gpus.joined):
            self._hurry.set()
        else:
            self.snapshots.after_collection()

    def _wait_for_news(self) -> float:
        """Seconds that NVML's answer may wait for news where nothing runs: until the next pass, to be woken once."""
        if self.repairer.restless:
            return 0.0
        left = self.repairer.next_pass() - time.monotonic()
        return left if self.settings.nvml_interval < left < LONGEST_WAIT else LONGEST_WAIT

    async def pass_once(self, *, patient: bool = True, everything: bool = True) -> None:
        """One pass over the slots, or those that are due, and a new snapshot."""
        self._take_new_settings()
        self.source.keep_up()
        began = time.perf_counter()
        await self.repairer.pass_once(
            self.decision.policy, self.gpus.joined, patient=patient, everything=everything
        )
        seconds = time.perf_counter() - began
        if self.repairer.contested():
            self._contested.set()
        else:
            self._contested.clear()
        news = everything or self.repairer.take_news()
        self.snapshots.after_pass(seconds, news=news)
        if news or self.repairer.restless:
            self.gpus.sampler.hurry()

    def _take_new_settings(self) -> None:
        names = self.reloading.take()
        if names is not None:
            self.repairer.use(self.settings)
            setup_logging(self.settings.log_format, self.settings.log_level)
            self._decide()
            self.gpus.sampler.hurry()
            self.journal.log.info("settings_reloaded", **names)

    def _decide(self) -> None:
        version = self.gpus.sampler.driver_version
        if self.decision.decide(self.settings.hostpid_namespace, version):
            self._hurry.set()
        if self.decision.measured(version):
            self._give_up_rights()

    def _give_up_rights(self) -> None:
        if self._rights is not None:
            self._rights.give_up(self.decision.measurement.rights)

    def _out_of_descriptors(self) -> None:
        self.counters[CounterName.OUT_OF_DESCRIPTORS] += 1
        self.repairer.shed()
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        why = f"all {limit} descriptors are in use, so some regions are not repaired: raise the limit (ulimit -n)"
        self.journal.trouble("descriptors", why, "out_of_descriptors", "")


def _raise_descriptor_limit() -> None:
    """A descriptor per region and per process: take what the system allows."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
