"""Snapshots of the daemon's knowledge, whole and immutable."""

import time
from collections import Counter

from resolver.base.counters import CounterByReason
from resolver.base.event_log import EventLog
from resolver.base.journal import Journal
from resolver.config import Reloading
from resolver.daemon.hostpid_decision import Decision
from resolver.daemon.pace import Durations
from resolver.pids.ladder import Ladder
from resolver.pids.pidmap import PidMap
from resolver.repair.repairer import Repairer
from resolver.state import Policy, Snapshot, Source, UsageReport, Worker
from resolver.usage.gpu_users import GpuUsers
from resolver.workers.means import Shortages
from resolver.workers.supervisor import WorkerProcess

#: Age in seconds at which a reader gets a new snapshot without a pass.
SHOWN_SECONDS = 0.25


class Snapshots:
    """Latest snapshot for the API and the metrics. ``holder``: PID of the daemon that this one waits for.

    ``inventories`` has an event for each change of the inventory or of NVML's failure.
    """

    def __init__(
        self,
        reloading: Reloading,
        ladder: Ladder,
        pidmap: PidMap,
        decision: Decision,
        gpus: GpuUsers,
        repairer: Repairer,
        counters: Counter[str],
        journal: Journal,
    ) -> None:
        self.latest: Snapshot | None = None  # none since the last pass
        self.passes, self.passed_at = 0, 0.0
        self.holder = ""
        self.inventories = EventLog(1)
        self._known: tuple[int, str] | None = None  # the inventory's version, and NVML's failure
        self.means: list[Shortages] = []  # shortages of the daemon's steps and sockets
        self._reloading, self._ladder, self._pidmap = reloading, ladder, pidmap
        self._decision, self._gpus, self._repairer, self._counters = decision, gpus, repairer, counters
        self._journal = journal
        self._started_at = time.time()
        self._durations = Durations(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
        self._collections = Durations(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.12, 0.25, 1.0, 5.0)

    def after_pass(self, seconds: float) -> None:
        """Count a pass's seconds; the next reader gets a new snapshot."""
        self._durations.add(seconds)
        self.passes, self.passed_at, self.latest = self.passes + 1, time.time(), None

    def after_collection(self) -> None:
        """Count a collection's seconds; publish a change of the inventory, or of NVML's failure."""
        self._collections.add(self._gpus.answer_seconds)
        state = self._gpus.inventory.version, self._gpus.joined.error
        if state != self._known:
            self._known, self.latest = state, None
            self.inventories.publish("inventory", {})

    def shown(self) -> Snapshot:
        if self.latest is None or not 0 <= time.time() - self.latest.at < SHOWN_SECONDS:
            self.latest = self.take()
        return self.latest

    def take(self) -> Snapshot:
        settings, policy = self._reloading.settings, self._decision.policy
        gpus, repairer, ladder = self._gpus, self._repairer, self._ladder
        source, discoveries = self._pidmap.source, repairer.found.discoveries
        workers, means = self._workers(), self.all_means()
        lacking = next(filter(None, (shortage.lacking() for shortage in means)), "")
        counters = self._counters.copy()
        for one in means:
            for shortage, count in one.counts.items():
                counters[CounterByReason.SHORTAGES.of(shortage)] += count
        return Snapshot(
            at=time.time(),
            started_at=self._started_at,
            passes=self.passes,
            passed_at=self.passed_at,
            pass_seconds=self._durations.seen(),
            nvml_seconds=self._collections.seen(),
            source=Source(
                name=source.name,
                not_used=dict(ladder.why_not),
                incomplete=source.shortage() or source.incomplete() or None,
                not_ready=ladder.not_ready(source) or lacking or repairer.writing.read_only() or None,
                processes=len(source),
                map_size=source.room,
                counters=dict(self._pidmap.counters()),
            ),
            policy=Policy(policy.namespace or "unknown", policy.why, policy.origin, repairer.watchers()),
            driver_version=gpus.inventory.driver_version,
            inventory=gpus.inventory,
            regions=repairer.reports(),
            rejected=repairer.found.rejected(),
            missing_dirs=tuple(
                sorted({path for discovery in discoveries for path in discovery.missing_dirs})
            ),
            containers=gpus.containers,
            gpu_processes=gpus.processes,
            joined=gpus.joined,
            collected_at=gpus.collected_at,
            workers=tuple(
                Worker(name=w.name, starts=w.starts, failures=w.failures, last_failure=w.last_failure or None)
                for w in workers
            ),
            counters=counters,
            dry_run=settings.dry_run,
            settings=self._reloading.described,
            holder=self.holder,
            interval=settings.interval,
            standing=self._journal.standing(),
            unwatched=repairer.unwatched(),
            used=self._used,
            hami_counts=repairer.hami_counts(),
            over_budget=repairer.budgets.overdrawn,
        )

    def _workers(self) -> list[WorkerProcess]:
        return [self._gpus.sampler.worker, *self._repairer.workers]

    def all_means(self) -> list[Shortages]:
        """Return the shortages of all parts, children included."""
        return [*self.means, self._repairer.owners.means, *(worker.means for worker in self._workers())]

    def _used(self) -> UsageReport:
        gpus = self._gpus
        return UsageReport(
            gpus.accounts.uses(self._repairer.reports(), gpus.containers),
            gpus.bypasses.report(gpus.processes),
            gpus.accounts.unused_joules,
        )
