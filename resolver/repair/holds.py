"""Words that the slot writer holds, because watchers set them wrong at each tick."""

import mmap
import os
import time
from operator import attrgetter
from typing import NamedTuple

from resolver.repair.plan import Order, encode
from resolver.repair.region import REPORT_SECONDS, RegionRepairs
from resolver.workers import slot_writer
from resolver.workers.supervisor import WorkerProcess

#: An order's parts that its hold depends on.
_effect = attrgetter("owner", "guard_offset", "guard", "target_offset", "new")
#: A watcher changes a word at most twice at each tick of 120 ms; a file's changes in a second.
_CHANGES, _MOST_CHANGES = 20, 2000


class HeldRegion(NamedTuple):
    """One region's held words, ``starts``: of the writer that has them."""

    repairs: RegionRepairs
    orders: list[Order]
    starts: int
    at: float


class HeldRegions:
    """Held words by region. The writer notes the file that it touches in memory that both share."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.by_region: dict[int, HeldRegion] = {}
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

    def writer(self) -> int | None:
        """Return the number of the running writer, if any."""
        return self._worker.starts if self._worker.host_pid is not None else None

    def message(self, repairs: RegionRepairs, orders: list[Order]) -> tuple[bytes, list[int]] | None:
        """Return the message to hold these words alone in a file; None if the writer does that already."""
        held, now = self.by_region.get(id(repairs)), time.monotonic()
        if held is None and not orders:
            return None
        recent = held is not None and held.starts == self.writer() and now - held.at < REPORT_SECONDS
        if recent and held is not None and [*map(_effect, held.orders)] == [*map(_effect, orders)]:
            return None
        if self._note is None:
            self._fd = os.memfd_create("resolver-holds", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, mmap.PAGESIZE)
            self._note = mmap.mmap(self._fd, mmap.PAGESIZE)
        for order in orders:
            if order.state and order.device is not None:
                order.state.evidence.word(order.device, order.expected).hold(order.new)
        processes = len({id(order.owner) for order in orders})
        allowed = min(_MOST_CHANGES, _CHANGES * processes * len(orders))
        message, handles = encode(orders, repairs.region.layout, (id(repairs), allowed))
        return message, [repairs.region.fd, self._fd, *handles] if orders else []

    def took(self, repairs: RegionRepairs, orders: list[Order], starts: int, answer: bytes) -> int:
        """Note that ``orders`` are held, and take the reports of those before; returns their corrections.

        ``starts`` is the writer's number before it was asked.
        """
        held, now = self.by_region.pop(id(repairs), None), time.monotonic()
        if orders:
            self.by_region[id(repairs)] = HeldRegion(repairs, orders, self._worker.starts, now)
        if held is None or len(answer) == 1 or not held.starts == starts == self._worker.starts:
            return 0
        corrected = 0
        for order, report in zip(held.orders, slot_writer.REPORT.iter_unpack(answer), strict=False):
            outcome, corrections, foreign = report
            corrected += corrections
            word = order.state.evidence.words.get(order.device or 0) if order.state else None
            if outcome == slot_writer.TOO_OFTEN:
                repairs.let_go(now)
            if word is None:
                continue
            if corrections:
                word.see(foreign, now)
                word.wrote(order.new)
            elif outcome == slot_writer.DONE and now - held.at >= REPORT_SECONDS:
                word.undisturbed()
        return corrected

    def close(self) -> None:
        if self._note is not None:
            self._note.close()
            os.close(self._fd)
            self._note = None
