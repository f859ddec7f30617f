"""Region reads: from the page cache, or by a lane if the kernel may wait."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

from resolver.base.errors import RegionRejected, TooSlow, WorkerFailed
from resolver.base.reasons import UnresolvedReason
from resolver.hami.layout import parse_used
from resolver.linux.inotify import MODIFY
from resolver.repair.turns import Work
from resolver.state import Counted, HamiCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from resolver.hami.region import RegionView, SharedRegion
    from resolver.repair.parts import Parts, Pass
    from resolver.repair.plan import RegionRepairs
    from resolver.workers.lanes import TenantReader

#: Seconds after which a pass reads no more regions, and waits no more for lanes: the next pass takes their answers.
_READ_SECONDS, _LANE_SECONDS = 0.05, 0.01
_COUNTS_SECONDS = 1.0


class Readings:
    """Reads of due regions and HAMi-core's counts."""

    def __init__(
        self,
        parts: Parts,
        leave_out: Callable[[str, str], bool],
        reject: Callable[[SharedRegion, RegionRejected], None],
    ) -> None:
        """Skip what ``leave_out(container, path)`` says; call ``reject`` for unusable files."""
        self._parts, self._leave_out, self._reject = parts, leave_out, reject

    async def read_due(self, this: Pass) -> dict[str, deque[Work]]:
        """Read due regions; return work by container, most budget left first."""
        regions, budgets = self._parts.regions, self._parts.budgets
        busy: dict[str, deque[Work]] = {}
        due = self._parts.agenda.due(None if this.everything else this.now + this.ahead)
        waiting = budgets.most_left_first(
            [regions[path] for path in due], lambda each: each.ownership.account
        )
        late = await self._read_some(waiting, this, busy)
        tasks = [each.reading for each in late if each.reading is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=_LANE_SECONDS if this.patient else None)
            await self._read_some(late, this, busy)
        return busy

    async def _read_some(
        self, waiting: Iterable[RegionRepairs], this: Pass, busy: dict[str, deque[Work]]
    ) -> list[RegionRepairs]:
        """Read regions and add work to ``busy``; return those that lanes read."""
        parts = self._parts
        late: list[RegionRepairs] = []
        since = began = time.monotonic()
        for repairs in waiting:
            container = repairs.ownership.account
            if not parts.is_here(repairs):
                continue
            if self._leave_out(container, repairs.region.path):
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

    def _read(self, repairs: RegionRepairs, this: Pass, late: list[RegionRepairs]) -> RegionView | None:
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
            late.append(repairs)
        return view

    def _view(self, repairs: RegionRepairs) -> RegionView | None:
        """Return the view; None while a lane reads. Raises `RegionRejected` and `WorkerFailed`."""
        task = repairs.reading
        if task is not None:
            if not task.done():
                return None
            repairs.reading = None
            return task.result()
        region, parts = repairs.region, self._parts
        view = region.read_at_once()
        if view is None:

            def was_read(_: object) -> None:
                parts.agenda.by(region.path, time.monotonic())
                parts.wake()

            reading = region.read_by(parts.reader, repairs.ownership.account)
            repairs.reading = asyncio.ensure_future(reading)
            repairs.reading.add_done_callback(was_read)
        return view

    async def _look(self, repairs: RegionRepairs, view: RegionView, this: Pass) -> bool:
        """Process a region's view; True if it has work."""
        parts, settings = self._parts, self._parts.settings
        for state in repairs.observe(view, watched=repairs.region.path in parts.watches.keys):
            parts.owners.unwatch(state)
        if settings.hami_metrics and this.now >= repairs.counts_due:
            repairs.counts_due = this.now + _COUNTS_SECONDS
            repairs.counts = await _count(parts.reader, repairs)
        inputs = this.policy, settings.write_utilization, settings.dry_run
        stirs = repairs.stirs(this.now, *inputs, ahead=this.ahead)
        parts.looked(repairs, this.now, 0.0 if stirs else repairs.quiet_until())
        return stirs

    def _watch(self, repairs: RegionRepairs) -> None:
        """Subscribe to kernel events on the file."""
        region, agenda = repairs.region, self._parts.agenda

        def on_event(_: int) -> None:
            repairs.attached = True
            agenda.attached(region.path, time.monotonic())

        if self._parts.watches.watch(region.path, repairs.ownership.account, region.fd, MODIFY, on_event):
            repairs.attached = True  # maybe, while it was not watched


async def _count(reader: TenantReader, repairs: RegionRepairs) -> HamiCounts:
    """Read HAMi-core's counts; they are unknown while any slot's owner is."""
    region, view, layout = repairs.region, repairs.view, repairs.region.layout
    owned = [state.slot for state in repairs.distinguished() if state.owner is not None]
    device_num = view.device_num if view is not None else 0
    length = layout.used + device_num * layout.used_size
    places = [(layout.slot_offset(slot.index), length) for slot in owned]
    at = layout.last_kernel_time
    places += [(at, 8)] if at is not None else []
    found = await region.pieces(reader, repairs.ownership.account, places)
    last_kernel = int.from_bytes(found.get(at, b""), "little") if at is not None else 0
    sums = [(0, 0, 0, 0)] * device_num
    unknown = HamiCounts((), last_kernel)
    if view is None or repairs.unclear():
        return unknown
    for slot in owned:
        data = found.get(layout.slot_offset(slot.index), b"")
        if int.from_bytes(data[:4], "little", signed=True) != slot.pid:
            return unknown
        used = parse_used(layout, data, device_num)
        sums = [(a + e, b + f, c + g, d + h) for (a, b, c, d), (e, f, g, h) in zip(sums, used, strict=True)]
    return HamiCounts(tuple(Counted(*each) for each in sums), last_kernel)
