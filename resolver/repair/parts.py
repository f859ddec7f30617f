"""Shared parts of a repair: regions, agenda, budgets, owners, writer, reader and reports."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from resolver.base.budget import Budgets, Slices
from resolver.base.counters import CounterName
from resolver.base.reasons import UnresolvedReason
from resolver.containers.log_names import ContainerNames
from resolver.hami.watches import Watches
from resolver.repair.agenda import Agenda
from resolver.repair.orders import Writing
from resolver.repair.owner_watch import Owners
from resolver.repair.region_report import region_report
from resolver.workers.lanes import Direct, Lanes

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from resolver.base.journal import Journal
    from resolver.config import Settings
    from resolver.gpu.attribution import Joined
    from resolver.hami.hostpid_policy import HostpidPolicy
    from resolver.linux.procfs import Procfs
    from resolver.pids.pidmap import PidMap
    from resolver.repair.plan import RegionRepairs
    from resolver.state import RegionReport
    from resolver.workers.lanes import TenantReader

#: Seconds that no container is charged for: a region was only read.
_TRIFLE_SECONDS = 5e-5
#: Work that is due so soon is done at once.
_TOGETHER_SECONDS = 0.005


class Pass:
    """One pass's inputs and cost so far."""

    def __init__(
        self, policy: HostpidPolicy, joined: Joined, budgets: Budgets, *, patient: bool, everything: bool
    ) -> None:
        self.now = time.monotonic()
        self.policy = policy
        self.joined = joined
        self.patient = patient
        self.everything = everything
        self.ahead = _TOGETHER_SECONDS  # work due within so many seconds is done now
        self.slices = Slices()
        self.spent = 0.0  # seconds on the loop
        self.answered = 0.0  # when NVML's answer was first seen
        self._budgets = budgets

    def charge(self, container: str, seconds: float) -> None:
        """Charge the pass and, unless negligible, the container."""
        self.spent += seconds
        if seconds >= _TRIFLE_SECONDS:
            self._budgets.spend(container, seconds)

    def over(self, container: str) -> bool:
        """Check if this container must wait."""
        return self.patient and self._budgets.over(container)


class Parts:
    """Shared parts: ``reports`` by path."""

    def __init__(
        self,
        settings: Settings,
        procfs: Procfs,
        pidmap: PidMap,
        counters: Counter[str],
        journal: Journal,
        reader: TenantReader | None = None,
    ) -> None:
        self.settings = settings
        self.procfs, self.pidmap = procfs, pidmap
        self.counters, self.journal = counters, journal
        self.regions: dict[str, RegionRepairs] = {}
        self.reports: dict[str, RegionReport] = {}
        #: Called when the next pass may be sooner.
        self.wake: Callable[[], None] = lambda: None
        self.budgets = Budgets()
        self.agenda = Agenda()
        self.watches = Watches(self.budgets, counters)
        self.owners = Owners(procfs, pidmap)
        self.names = ContainerNames(settings.container_logs_dir, settings.pod_logs_dir)
        self.writing = Writing(counters, journal)
        self.reader = reader or Direct(procfs)
        if isinstance(self.reader, Lanes):
            self.reader.budgets = self.budgets

    def is_here(self, repairs: RegionRepairs) -> bool:
        """Check that the region survived an await."""
        return self.regions.get(repairs.region.path) is repairs

    def looked(self, repairs: RegionRepairs, now: float, quiet_until: float) -> None:
        """Schedule the region's next read."""
        path, watched = repairs.region.path, repairs.region.path in self.watches
        self.agenda.looked(
            path, now, self.settings.interval, watched=watched, quiet_until=quiet_until, right=repairs.right
        )

    def report(self, repairs: RegionRepairs, joined: Joined) -> None:
        """Update the region's report."""
        report = region_report(repairs, joined, self.owners.container_id, time.monotonic())
        self.reports[repairs.region.path] = report

    def put_off(
        self, repairs: RegionRepairs, this: Pass, why: UnresolvedReason = UnresolvedReason.OVER_BUDGET
    ) -> None:
        """Delay due work: its container is over budget or makes the kernel wait."""
        if why is UnresolvedReason.OVER_BUDGET:
            self.counters[CounterName.OVER_BUDGET] += 1
        self.agenda.put_off(repairs.region.path, time.monotonic() + self.settings.interval)
        if repairs.put_off(this.now, why):
            self.report(repairs, this.joined)
