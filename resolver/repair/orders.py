"""Execution of orders by the slot writer in batches, and their outcomes."""

import asyncio
import contextlib
import errno
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from resolver.base.counters import CounterByReason, CounterName, Shortage
from resolver.base.errors import WorkerFailed
from resolver.base.journal import Journal
from resolver.base.reasons import UnresolvedReason
from resolver.gpu.attribution import Joined
from resolver.hami.hostpid_policy import HostpidPolicy
from resolver.repair.holds import Holds
from resolver.repair.plan import Order, encode
from resolver.repair.region import RegionRepairs
from resolver.repair.slots import OwnedSlot
from resolver.workers import slot_writer
from resolver.workers.means import shortage_of
from resolver.workers.supervisor import WorkerProcess

WRITER_SECONDS = 1.0
#: Seconds between two checks of the writer and its holds.
_CHECK_SECONDS, _UNKNOWN_END_SECONDS = 0.5, 0.02
#: Seconds after which a read-only directory makes the daemon not ready: a remount takes a moment.
_READ_ONLY_SECONDS = 10.0
#: CPU seconds that an order costs the slot writer, which maps a page and reads the process.
ORDER_SECONDS = 30e-6


class Writing:
    """Carries out orders through the slot writer."""

    def __init__(self, counters: Counter[str], journal: Journal) -> None:
        self.worker = WorkerProcess(
            # A tenant's umask may deny writing to others, and root without this capability is one of them.
            "slot writer",
            "resolver.workers.writer_child",
            timeout=WRITER_SECONDS,
            rights=frozenset({"DAC_OVERRIDE"}),
        )
        self.holds = Holds(self.worker)
        # Utilization has a separate queue: a `hostpid` waits for one batch at most.
        self._one_at_a_time, self._utilization = asyncio.Lock(), asyncio.Lock()
        self._read_only: dict[str, tuple[float, float]] = {}  # by directory: first and last seen so
        self._counters = counters
        self._journal = journal
        #: Called with each `hostpid` that a dry run would write, if set.
        self.on_would_repair: Callable[[RegionRepairs, OwnedSlot, Order], None] | None = None

    def read_only(self) -> str:
        """Return the directories that have been read-only for too long, in a sentence; empty without any."""
        now = time.monotonic()
        lasting = [
            directory
            for directory, (since, seen) in self._read_only.items()
            if seen - since >= _READ_ONLY_SECONDS and now - seen < _READ_ONLY_SECONDS
        ]
        if not lasting:
            return ""
        meaning, fix = UnresolvedReason.NOT_WRITABLE.for_terminal()
        return f"{', '.join(sorted(lasting))}: {meaning}: {fix}"

    async def carry_out(self, repairs: RegionRepairs, orders: list[Order]) -> bool:
        """Send up to `slot_writer.MAX_ORDERS` orders; True if the writer answered."""
        urgent = any(order.device is None for order in orders)
        async with contextlib.nullcontext() if urgent else self._utilization, self._one_at_a_time:
            # Meanwhile a region or an owner's handle may be closed: its descriptor may then be another file's.
            orders = [order for order in orders if order.stands() and not repairs.closed]
            return bool(orders) and await self._carry_out(repairs, orders)

    async def hold(self, repairs: RegionRepairs, orders: list[Order]) -> int:
        """Hold these words of the region and no others; return the corrections since the last call."""
        async with self._one_at_a_time:
            self._bury()
            try:
                corrected = await self.holds.hold(repairs, orders)
            except WorkerFailed as error:
                self._failed(repairs, error)
                return 0
        self._counters[CounterName.UTILIZATION_WRITES] += corrected
        return corrected

    async def keep_holds(self, over: Callable[[str], bool]) -> None:
        """Renew the holds when the writer has ended, and release those of containers ``over`` their budget."""
        while True:
            await self.holds.any.wait()
            self._bury()
            for repairs, orders in self.holds.to_renew(over):
                with contextlib.suppress(OSError):  # no descriptors left: the writer has counted it
                    await self.hold(repairs, orders)
            await self._until_writer_ends()

    async def _until_writer_ends(self) -> None:
        """Wait until the writer ends, for at most `_CHECK_SECONDS`."""
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        try:
            fd = os.pidfd_open(self.worker.host_pid or 0)
        except OSError:  # before Linux 5.3, or the writer has ended
            await asyncio.sleep(_UNKNOWN_END_SECONDS)
            return
        loop.add_reader(fd, ended.set)
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _CHECK_SECONDS)
        finally:
            loop.remove_reader(fd)
            os.close(fd)

    def _bury(self) -> None:
        """Note the end of a writer that only held words."""
        if (error := self.worker.ended_idle()) is not None:
            self._failed(None, error)

    async def _carry_out(self, repairs: RegionRepairs, orders: list[Order]) -> bool:
        region = repairs.region
        self._bury()
        message, handles = encode(orders, region.layout)
        try:
            answer = await self.worker.request(message, [region.fd, *handles])
            if len(answer) != slot_writer.RESULT.size * len(orders):
                raise self.worker.malformed("answered something malformed")
        except WorkerFailed as error:
            self._failed(repairs, error)
            return False
        repairs.record.answered()
        if all(outcome != slot_writer.NO_MEANS for outcome, _ in slot_writer.RESULT.iter_unpack(answer)):
            self.worker.means.recovered()
        zeroed: list[int] = []  # a dead slot's index for each zeroed word
        for order, (outcome, word) in zip(orders, slot_writer.RESULT.iter_unpack(answer), strict=True):
            self._written(repairs, order, outcome, word)
            if outcome == slot_writer.DONE and order.state is None:
                zeroed.append(order.slot)
        if zeroed:
            container, slots = repairs.ownership.container, len(set(zeroed))
            self._journal.record(
                "dead_slots_zeroed", container=container, path=region.path, slots=slots, words=len(zeroed)
            )
        return True

    def _failed(self, asked: RegionRepairs | None, error: WorkerFailed) -> None:
        """Quarantine the region to blame, else let the next writer retry. ``asked`` is the requested region."""
        if error.waiting:
            return
        self._counters[CounterName.WRITER_FAILURES] += 1
        repairs, why = self.holds.culprit() or asked, str(error)
        if repairs is None or (not error.own_fault and not error.late):
            if not self.worker.means.short():
                self._journal.record("writer_failed", level="warning", why=why)
            return
        now, container = time.monotonic(), repairs.ownership.container
        seconds = repairs.record.died(now, guilty=error.own_fault)
        if seconds:
            self.worker.forget_failures()  # other containers' orders do not wait for it
            self._counters[CounterName.QUARANTINES] += 1
            self._journal.record(
                "region_quarantined", level="warning", container=container, why=why, seconds=seconds
            )
        else:
            self._journal.record("writer_failed", level="warning", container=container, why=why)

    def _written(self, repairs: RegionRepairs, order: Order, outcome: int, word: int) -> None:
        state, why = order.state, None
        if outcome in (slot_writer.DONE, slot_writer.NOT_WRITABLE):
            self._writable(repairs, word if outcome == slot_writer.NOT_WRITABLE else None)
        if outcome == slot_writer.DONE and state is not None and order.reason is not None:
            # It counts as written once, even if another writer changed the word before it was read back.
            self._counters[CounterByReason.REPAIRS.of(order.reason)] += 1
            state.wrote(order.new >> 32, order.slot, order.reason, changed=word != order.new)
            if state.conflicts < 2:  # else `log` has a line for each conflict
                self._journal.record("repair", **_about(repairs, order, state))
        elif outcome == slot_writer.DONE:
            self._counters[CounterName.UTILIZATION_WRITES] += 1
            if (value := order.value()) is not None:
                value.wrote(order.new)
        elif outcome == slot_writer.NO_MEANS:
            lacks = shortage_of(word) or Shortage.MEMORY
            self.worker.means.refused(lacks, f"the slot writer could not work: {os.strerror(word)}")
            why = UnresolvedReason.WRITE_FAILED
        elif outcome in (slot_writer.OWNER_GONE, slot_writer.MOVED):
            self._counters[CounterName.WRITES_UNDONE] += 1
            why = UnresolvedReason.GONE if outcome == slot_writer.OWNER_GONE else None
        elif outcome == slot_writer.NOT_WRITABLE:
            read_only = word == errno.EROFS
            why = UnresolvedReason.NOT_WRITABLE if read_only else UnresolvedReason.WRITE_FAILED
            repairs.unwritable(why)
        elif order.device is None:
            self._counters[CounterName.WRITES_MISSED] += 1
            why = UnresolvedReason.CHANGED
        if why is not None and state is not None:
            state.waits(why)

    def _writable(self, repairs: RegionRepairs, error: int | None) -> None:
        """Log once when a file becomes unwritable with this ``error``, or writable again (None)."""
        path, why, now = repairs.region.path, "", time.monotonic()
        directory = os.path.dirname(os.path.dirname(path))
        if error == errno.EROFS:  # no tenant can cause it
            self._read_only[directory] = self._read_only.get(directory, (now, now))[0], now
        else:
            self._read_only.pop(directory, None)
        if error is not None:
            why = f"it cannot be opened for writing ({os.strerror(error)}); mount the containers directory read-write"
        if error == errno.EAGAIN:
            why = "it cannot be opened for writing: a process holds a lease on it"
        about = directory_of(path)
        self._journal.trouble(path, why, "write_failed", "write_works_again", about=about, path=path)

    def would_write(self, repairs: RegionRepairs, order: Order) -> None:
        """Announce the ``hostpid`` that a dry run would write, once per generation."""
        state = order.state
        if state is None or order.reason is None or not state.would_write(order.new):
            return
        self._counters[CounterByReason.WOULD_REPAIR.of(order.reason)] += 1
        self._journal.record("would_repair", **_about(repairs, order, state))
        if self.on_would_repair is not None:
            self.on_would_repair(repairs, state, order)

    def log(
        self, repairs: RegionRepairs, policy: HostpidPolicy, joined: Joined, now: float, *, dry_run: bool
    ) -> None:
        """Log other writers of a ``hostpid``, and values that do not stay right, once per process."""
        for state in repairs.conflicts:
            about = {
                "hostpid": state.slot.hostpid,
                "times": state.conflicts,
                "next_try_seconds": state.backoff(),
            }
            why = "another writer changed hostpid back"
            self._warn(repairs, state, CounterName.CONFLICTS, "conflict", why, **about)
        blind, uuids = repairs.blind(joined.refused), repairs.view.uuids
        for state in () if dry_run else repairs.slots.distinguished():
            if state.explain(policy, now, uuids, blind):
                counter, event = CounterName.SLOTS_STUCK, "slot_stuck"
                if state.evidence.disputed():
                    counter, event = CounterName.ZEROS_DISPUTED, "nvml_contradicts_watchers"
                self._warn(repairs, state, counter, event, state.stuck)

    def _warn(
        self,
        repairs: RegionRepairs,
        state: OwnedSlot,
        counter: CounterName,
        event: str,
        why: str,
        **more: Any,
    ) -> None:
        self._counters[counter] += 1
        self._journal.record(event, level="warning", **of_slot(repairs, state), why=why, **more)


def directory_of(path: str) -> str:
    """Return the key for limits on log lines: a file's directory, or a mapped file's container id."""
    return os.path.dirname(path) if path.startswith("/") else path.partition(":")[0]


def _about(repairs: RegionRepairs, order: Order, state: OwnedSlot) -> dict[str, Any]:
    """Return log fields about a ``hostpid``."""
    return {
        **of_slot(repairs, state),
        "slot": order.slot,
        "reason": order.reason,
        "before": state.slot.hostpid,
        "after": order.new >> 32,
    }


def of_slot(repairs: RegionRepairs, state: OwnedSlot) -> dict[str, Any]:
    """Return event fields of a slot and its owner."""
    ownership = repairs.ownership
    return {
        "container": ownership.container,
        "pod_uid": ownership.pod_uid or state.names[0],
        "container_name": state.names[1] or ownership.container_name,
        "slot": state.slot.index,
        "ns_pid": state.slot.pid,
        "host_pid": state.owner.process.host_pid,
    }
