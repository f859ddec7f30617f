"""Region reads: directly from the page cache, or by a lane if the kernel may have to wait."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

from resolver.base.errors import RegionRejected, TooSlow, WorkerFailed
from resolver.base.reasons import UnresolvedReason
from resolver.linux.inotify import MODIFY, OF_A_FILE
from resolver.repair.hami_counts import CountsOfRegions
from resolver.repair.turns import Work
from resolver.workers.lanes import LATE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from resolver.hami.region import RegionView, SharedRegion
    from resolver.repair.parts import Parts, Pass
    from resolver.repair.plan import RegionRepairs

#: Seconds after which a pass reads no more regions.
_READ_SECONDS = 0.05


class Readings:
    """Reads of due regions, and of HAMi-core's counts in them."""

    def __init__(
        self, parts: Parts, going: Container[str], reject: Callable[[SharedRegion, RegionRejected], None]
    ) -> None:
        """Skip containers in ``going``; call ``reject`` for files that can't be used."""
        self.hami_counts = CountsOfRegions()
        self._parts, self._going, self._reject = parts, going, reject
        self._by_lane: dict[str, tuple[RegionRepairs, asyncio.Task[RegionView]]] = {}

    async def read_due(self, this: Pass) -> dict[str, deque[Work]]:
        """Read every due region; return the work by container, most budget left first."""
        regions, budgets = self._parts.regions, self._parts.budgets
        busy: dict[str, deque[Work]] = {}
        due = self._parts.agenda.due(None if this.everything else this.now + this.ahead)
        waiting = budgets.most_left_first(
            [regions[path] for path in due], lambda each: each.ownership.account
        )
        late = await self._read_some(waiting, this, busy)
        tasks = [self._by_lane[path][1] for path in late if path in self._by_lane]
        if tasks:
            await asyncio.wait(tasks, timeout=LATE_SECONDS if this.patient else None)
            await self._read_some([regions[path] for path in late if path in regions], this, busy)
        return busy

    async def _read_some(
        self, waiting: Iterable[RegionRepairs], this: Pass, busy: dict[str, deque[Work]]
    ) -> list[str]:
        """Read these regions and collect their work in ``busy``; return the paths that a lane reads."""
        parts, late = self._parts, list[str]()
        since = began = time.monotonic()
        for repairs in waiting:
            container = repairs.ownership.account
            if not parts.is_here(repairs):
                continue
            if container in self._going:
                parts.agenda.put_off(repairs.region.path, since + parts.settings.interval)
                continue
            if this.over(container):
                parts.put_off(repairs, this)
                continue
            view = self._read(repairs, this, late)
            if view is not None and await self._look(repairs, view, this):
                busy.setdefault(container, deque()).append(Work(repairs, this.now + this.ahead))
            now = time.monotonic()
            this.charge(container, now - since)
            if this.slices.over():
                if this.patient and now - began >= _READ_SECONDS:
                    break
                await this.slices.give_way()
                now = time.monotonic()
            since = now
        return late

    def _read(self, repairs: RegionRepairs, this: Pass, late: list[str]) -> RegionView | None:
        region, parts = repairs.region, self._parts
        if region.path not in parts.watches.keys:
            self._watch(repairs)
        try:
            view = self._view(repairs)
        except RegionRejected as why:
            self._reject(region, why)
            return None
        except (TooSlow, WorkerFailed):
            parts.put_off(repairs, this, UnresolvedReason.TOO_SLOW)
            return None
        if view is None:
            parts.agenda.put_off(region.path, time.monotonic() + parts.settings.interval)
            late.append(region.path)
        return view

    def _view(self, repairs: RegionRepairs) -> RegionView | None:
        """Return the region's view, or None while a lane reads it.

        Raises `RegionRejected`, `TooSlow` and `WorkerFailed`.
        """
        path = repairs.region.path
        of, task = self._by_lane.get(path, (None, None))
        if task is not None:
            if not task.done():
                return None
            del self._by_lane[path]
            if of is repairs:
                return task.result()
            task.cancelled() or task.exception()
        view = repairs.region.read_at_once()
        if view is None:
            task = asyncio.ensure_future(
                repairs.region.read_by(self._parts.reader, repairs.ownership.account)
            )
            self._by_lane[path] = repairs, task
            task.add_done_callback(lambda _: self._was_read(path))
        return view

    def _was_read(self, path: str) -> None:
        self._parts.agenda.by(path, time.monotonic())
        self._parts.wake()

    async def _look(self, repairs: RegionRepairs, view: RegionView, this: Pass) -> bool:
        """Process a region's view; return True if the region has work."""
        parts, settings, path = self._parts, self._parts.settings, repairs.region.path
        watched = path in parts.watches.keys
        for state in repairs.observe(view, watched=watched):
            parts.owners.unwatch(state)
        if settings.hami_metrics:
            await self.hami_counts.take(parts.reader, repairs, this.now)
        inputs = this.policy, settings.write_utilization, settings.dry_run
        stirs = repairs.stirs(this.now, *inputs, ahead=this.ahead)
        quiet_until = 0.0 if stirs else repairs.quiet_until()
        parts.agenda.looked(path, this.now, settings.interval, watched=watched, quiet_until=quiet_until)
        return stirs

    def _watch(self, repairs: RegionRepairs) -> None:
        """Subscribe to the kernel's events on the file."""
        region, agenda = repairs.region, self._parts.agenda

        def on_event(happened: int) -> None:
            now = time.monotonic()
            if happened & MODIFY:
                repairs.attached()
                agenda.attached(region.path, now)
            else:
                agenda.let_go(region.path, now)

        if self._parts.watches.watch(region.path, repairs.ownership.account, region.fd, OF_A_FILE, on_event):
            repairs.attached()  # maybe, while it was not watched

    def forget(self, path: str) -> None:
        """Cancel the read of a removed region."""
        self.hami_counts.forget(path)
        _, task = self._by_lane.pop(path, (None, None))
        if task is not None:
            task.cancel()

    def close(self) -> None:
        """Cancel all reads."""
        for path in list(self._by_lane):
            self.forget(path)
