"""Words that the slot writer keeps right, because watchers set them wrong at each tick."""

import asyncio
import mmap
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from resolver.repair.plan import Order, encode
from resolver.repair.region import REPORT_SECONDS, RegionRepairs
from resolver.workers import slot_writer
from resolver.workers.supervisor import WorkerProcess

#: An order's parts that its hold depends on.
_effect = attrgetter("owner", "guard_offset", "guard", "target_offset", "new")
#: Changes allowed per second, of a word and of a file: a watcher changes a word at most twice per 120 ms tick.
_CHANGES, _MOST_CHANGES = 20, 2000


class HeldRegion(NamedTuple):
    """One region's held words; ``starts`` identifies the writer that holds them."""

    repairs: RegionRepairs
    orders: list[Order]
    starts: int
    at: float


class Holds:
    """Held words by region. The writer notes in shared memory which file it touches."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.by_region: dict[int, HeldRegion] = {}
        self.any = asyncio.Event()  # some words are held
        self._worker = worker
        self._fd = -1
        self._note: mmap.mmap | None = None

    def culprit(self) -> RegionRepairs | None:
        """Return the region with the held words that the writer touched when it ended, and forget its hold."""
        if self._note is None:
            return None
        key, self._note[:8] = int.from_bytes(self._note[:8], "little"), bytes(8)
        held = self.by_region.pop(key, None)
        return held.repairs if held is not None else None

    def to_renew(self, over: Callable[[str], bool]) -> Iterator[tuple[RegionRepairs, list[Order]]]:
        """Yield regions and their words to hold again, no words if a container is ``over`` its budget."""
        running = self._running()
        for held in [*self.by_region.values()]:
            gone = held.repairs.closed or over(held.repairs.ownership.account)
            if gone or held.starts != running:
                yield held.repairs, [] if gone else held.orders
        if not self.by_region:
            self.any.clear()

    def _running(self) -> int | None:
        return self._worker.starts if self._worker.host_pid is not None else None

    async def hold(self, repairs: RegionRepairs, orders: list[Order]) -> int:
        """Replace the words held in a file; return the number of corrections of the earlier words."""
        held, now, starts = self.by_region.get(id(repairs)), time.monotonic(), self._worker.starts
        orders = [order for order in orders if order.stands() and not repairs.closed][
            : slot_writer.MAX_ORDERS
        ]
        if held is None and not orders:
            return 0
        recent = held is not None and held.starts == self._running() and now - held.at < REPORT_SECONDS
        if recent and held is not None and [*map(_effect, held.orders)] == [*map(_effect, orders)]:
            return 0
        if self._note is None:
            self._fd = os.memfd_create("resolver-holds", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, mmap.PAGESIZE)
            self._note = mmap.mmap(self._fd, mmap.PAGESIZE)
        for order in orders:
            if (word := order.value()) is not None:
                word.hold(order.new)
        processes = len({id(order.owner) for order in orders})
        allowed = min(_MOST_CHANGES, _CHANGES * processes * len(orders))
        message, handles = encode(orders, repairs.region.layout, (id(repairs), allowed))
        answer = await self._worker.request(
            message, [repairs.region.fd, self._fd, *handles] if orders else []
        )
        self.by_region.pop(id(repairs), None)
        if orders:
            self.by_region[id(repairs)] = HeldRegion(repairs, orders, self._worker.starts, now)
            self.any.set()
        if held is None or len(answer) == 1 or not held.starts == starts == self._worker.starts:
            return 0
        return sum(map(partial(_report, held), held.orders, slot_writer.REPORT.iter_unpack(answer)))

    def close(self) -> None:
        if self._note is not None:
            self._note.close()
            os.close(self._fd)
            self._note = None


def _report(held: HeldRegion, order: Order, report: tuple[int, int, int]) -> int:
    """Take a held word's report; return its corrections."""
    outcome, corrections, foreign = report
    now, word = time.monotonic(), order.value()
    if outcome == slot_writer.TOO_OFTEN:
        held.repairs.let_go(now)
    if word is None:
        return corrections
    if corrections:
        word.see(foreign, now)
        word.wrote(order.new)
    elif outcome == slot_writer.DONE and now - held.at >= REPORT_SECONDS:
        word.undisturbed()
    return corrections
