"""The pictures of what the daemon knows: one after each pass, whole and immutable."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from resolver.log.event_log import EventLog
from resolver.state import PassSeconds, Snapshot, Worker

if TYPE_CHECKING:
    from collections import Counter

    from resolver.daemon.decision import Decision
    from resolver.daemon.gpu_users import GpuUsers
    from resolver.daemon.reloading import Reloading
    from resolver.pids.ladder import Ladder
    from resolver.pids.pidmap import PidMap
    from resolver.repair.repairer import Repairer

#: A picture that nothing was new in is made anew, for its counters and times, for who looks after so many seconds.
_SHOWN_SECONDS = 0.25
#: Of the histogram of passes, in seconds.
BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class Snapshots:
    """``latest`` is what the API and the metrics are shown; ``holder`` the PID of the daemon that is waited for.

    ``inventories`` has an event for each picture with another inventory, or another failure of NVML.
    """

    def __init__(
        self,
        reloading: Reloading,
        pidmap: PidMap,
        ladder: Ladder,
        decision: Decision,
        gpus: GpuUsers,
        repairer: Repairer,
        counters: Counter[str],
        holder: str,
    ) -> None:
        self.latest: Snapshot | None = None
        self.passes = 0
        self._owed = False  # counters or times are others now than in the latest one
        self.holder = holder
        self.inventories = EventLog(1)
        self._reloading, self._pidmap, self._ladder = reloading, pidmap, ladder
        self._decision, self._gpus, self._repairer, self._counters = decision, gpus, repairer, counters
        self._started_at = time.time()
        self._counts = [0] * len(BOUNDS)
        self._seconds = 0.0

    def after_pass(self, seconds: float, *, news: bool = True) -> None:
        """A pass took so long: count it, and show what is known now; without news not before somebody looks."""
        self._seconds += seconds
        for index, bound in enumerate(BOUNDS):
            self._counts[index] += seconds <= bound
        self.passes += 1
        if news or self.latest is None:
            self.renew()
        else:
            self._owed = True

    def after_collection(self) -> None:
        """NVML was asked, and said nothing that a pass is to be made for."""
        if self.latest is None:
            return
        if _inventory_of(self.latest) != (self._gpus.inventory.version, self._gpus.joined.error):
            self.renew()
        else:
            self._owed = True

    def renew(self) -> None:
        """Show what is known now."""
        self._owed = False
        before, self.latest = self.latest, self.take()
        if before is None or _inventory_of(before) != _inventory_of(self.latest):
            self.inventories.publish("inventory", {})

    def shown(self) -> Snapshot:
        """The latest; one that is taken now if there is none, or if what has no news in it is due for others."""
        if self.latest is None:
            return self.take()
        if self._owed and not 0 <= time.time() - self.latest.at < _SHOWN_SECONDS:
            self.renew()
        return self.latest

    def take(self) -> Snapshot:
        """What is known now, as one immutable value."""
        settings, repairer, gpus, policy = (
            self._reloading.settings,
            self._repairer,
            self._gpus,
            self._decision.policy,
        )
        source, discoveries = self._pidmap.source, repairer.discoveries
        workers = [gpus.sampler.worker, repairer.writing.worker, self._decision.measurement.worker]
        workers += [worker for discovery in discoveries for worker in discovery.workers]
        return Snapshot(
            at=time.time(),
            started_at=self._started_at,
            passes=self.passes,
            pass_seconds=PassSeconds(
                bounds=BOUNDS, counts=tuple(self._counts), observations=self.passes, total=self._seconds
            ),
            source=source.name,
            sources_not_used=dict(self._ladder.why_not),
            source_counters=self._pidmap.counters(),
            incomplete=source.shortage() or source.incomplete(),
            not_ready=self._ladder.not_ready(source),
            processes=len(source),
            map_size=getattr(source, "room", settings.map_size),
            policy=policy.namespace or "unknown",
            policy_why=policy.why,
            policy_origin=policy.origin,
            driver_version=gpus.sampler.driver_version,
            inventory=gpus.inventory,
            regions=repairer.reports(),
            rejected=repairer.rejected(),
            missing_dirs=tuple(sorted({path for each in discoveries for path in each.missing_dirs})),
            containers=gpus.census.containers(),
            gpu_processes=gpus.processes,
            joined=gpus.joined,
            collected_at=gpus.collected_at,
            workers=tuple(
                Worker(name=w.name, starts=w.starts, failures=w.failures, last_failure=w.last_failure or None)
                for w in workers
            ),
            counters=dict(self._counters),
            dry_run=settings.dry_run,
            settings=self._reloading.described,
            holder=self.holder,
            unwatched=repairer.unwatched(),
            not_measured=self._decision.not_measured(),
            hami_counts=repairer.hami_counts.known(),
        )


def _inventory_of(snapshot: Snapshot) -> tuple[int, str]:
    return snapshot.inventory.version, snapshot.joined.error
