"""NVML's utilization samples, asked of the NVML worker, with a watermark per device.

Devices are identified by UUID. A device that fails or is unsupported is a state with its reason, not a zero.

While no device has a sample the worker asks by itself, as often as the daemon would, and answers when there is
something new: so nothing is seen later, and the daemon sleeps.
"""

from __future__ import annotations

import asyncio
import json
import sysconfig
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from resolver.errors import WorkerFailed
from resolver.gpu.inventory import NONE, Inventory
from resolver.gpu.kept_inventory import Stock
from resolver.workers.supervisor import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resolver.gpu.inventory import GpuReport

#: A sample speaks for this long; then the process is idle. HAMi's own watcher asks for the last second too.
SAMPLE_SECONDS = 1.0
#: So long the worker may be silent where nothing runs, in seconds: as long as a cache file is where all is right.
LONGEST_WAIT = 4.0
_ON_ITS_WAY = 0.1  # its answer takes a moment more, for which nobody is to be woken
_DEVICES_EVERY, _DETAILS_EVERY = 60.0, 10.0
_INCOMPLETE_SECONDS = 2.0  # a lost GPU makes the worker start the library anew, each time
_CALL_SECONDS = 5.0
_IN_ONE_CALL = 8  # devices that are asked together within that time; more have more of it
_TICKS = 20
#: Starting the library opens every GPU: seconds for each, where no persistence daemon holds them open.
_START_SECONDS = 30.0
#: What a person can do about an error, by NVML's name of it.
_HINTS = {
    "LibraryNotFound": ": libnvidia-ml.so.1 is not there; is the driver installed, and mounted into this container?",
    "DriverNotLoaded": ": load the kernel module, or start nvidia-persistenced",
}
#: What a process may answer for ever: a library stays loaded when the driver is replaced, and the dynamic linker
#: remembers which directories it did not find. A new worker looks anew.
_OLD_VIEW = ("LibRmVersionMismatch", "LibraryNotFound")
_RESTART_SECONDS = 10.0

_NO_WAIT: Mapping[str, float] = {}

OK, UNSUPPORTED, FAILED = "ok", "unsupported", "failed"


class DeviceSamples(NamedTuple):
    """One device's samples of the last second.

    ``newest`` maps the PID as NVML gave it (maybe a thread's) to its time stamp (us since the epoch) and SM
    utilization (per cent). ``dropped`` are PIDs that are not idle but unknown: their value cannot be, or they are
    clients of an MPS server, whose PID stands for them in the samples. ``memory`` is NVML's list of processes, MPS
    clients with it: PID as NVML gave it to bytes, None where it does not report them; None as a whole without a list.
    """

    status: str
    why: str
    newest: Mapping[int, tuple[int, int]]
    dropped: frozenset[int]
    memory: Mapping[int, int | None] | None = None


class Collection(NamedTuple):
    """All devices at one time. ``error`` is empty, or says why nothing is known; ``at`` is Unix time.

    ``inventory`` is what was last known of the GPUs; with an ``error`` it is of some time before.
    """

    at: float
    error: str
    driver_version: str | None
    devices: Mapping[str, DeviceSamples]
    inventory: Inventory = NONE


def _answered(samples: DeviceSamples) -> tuple[bool, bool]:
    """Whether a device's samples, and its processes, could be read."""
    return samples.status == OK, samples.memory is not None


class Sampler:
    """Collects from every device; owns the NVML worker."""

    def __init__(self, *, details: bool = False) -> None:
        """``details``: read what only some want of each GPU, too, and that more often."""
        purelib = sysconfig.get_paths()["purelib"]
        self.worker = WorkerProcess("nvml worker", "resolver.workers.nvml", purelib, timeout=_CALL_SECONDS)
        self.driver_version: str | None = None
        self.implausible = 0
        self._details = details
        self._stock = Stock()
        self._devices_until = 0.0
        self._count = 0  # of the devices, when they were last read
        self._states: dict[str, tuple[bool, bool]] = {}
        self._answered = False  # all of the last collection
        self._last = Collection(at=0.0, error="", driver_version=None, devices={})
        self._quiet = False  # all answered, and no device had a sample
        self._waits = self._hurried = False  # for something new; not any more
        self._complete = False  # every device answered
        self._pending: asyncio.Task[Collection] | None = None
        self._next_restart = 0.0
        self._watermarks: dict[str, int] = {}
        self._newest: dict[str, dict[int, tuple[int, int]]] = {}
        self._clients: dict[str, list[int]] = {}  # of MPS servers
        self._dropped: dict[str, dict[int, int]] = {}  # PID -> time stamp of its last value that cannot be

    async def collect(
        self, patience: float = _CALL_SECONDS, *, wait: float = 0.0, every: float = SAMPLE_SECONDS
    ) -> Collection:
        """Ask every device for what is new. Never raises; what fails is said in the answer.

        If no device had a sample last time the answer comes when there is something new, after ``wait`` seconds or by
        `hurry`; the driver is asked ``every`` so many seconds meanwhile.

        A driver that answered before and does not within ``patience`` (seconds) leaves everything unknown from then
        on. It is asked nothing else meanwhile: the next call goes on waiting, until the worker's time limit.
        """
        if not self._answered:
            patience = max(patience, _CALL_SECONDS)
        try:
            if self._pending is None:
                wait = self._may_wait(wait, every)
                self._pending = asyncio.create_task(
                    self._collect({"wait": wait, "every": every} if wait else {})
                )
                if wait:
                    await asyncio.wait({self._pending}, timeout=wait + _ON_ITS_WAY)
            await _wait(self._pending, patience)
        except asyncio.CancelledError:
            await self._abandon()
            raise
        if not self._pending.done():
            why = f"the driver did not answer within {patience:g} s"
            return Collection(
                at=time.time(),
                error=why,
                driver_version=self.driver_version,
                devices={},
                inventory=self._stock.inventory,
            )
        done, self._pending = self._pending, None
        collection = done.result()
        self._answered = not collection.error
        return collection

    def stop(self) -> None:
        """End the worker, and what it is being asked."""
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        self.worker.stop()

    def hurry(self) -> None:
        """Have the collection that goes on, or the next one, wait for nothing."""
        if self._waits and not self._hurried:
            self.worker.tell(b'{"call":"now"}')
        self._hurried = True

    def _may_wait(self, wait: float, every: float) -> float:
        wait = min(wait, self._devices_until - time.monotonic())
        return wait if self._quiet and not self._hurried and wait > every else 0.0

    async def _abandon(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)

    async def _collect(self, waiting: dict[str, float]) -> Collection:
        try:
            looked = time.monotonic() >= self._devices_until
            if looked:
                await self._find_devices()
            devices = await self._ask(self._stock.answering, waiting)
            if devices is self._last.devices:
                return self._last._replace(at=time.time())
            if self._devices_until == 0.0 and not looked:  # something is not as it was: see it at once
                await self._find_devices()
                new = [gpu for gpu in self._stock.answering if gpu.uuid not in devices]
                devices = {**devices, **await self._ask(new)}
            known = {gpu.uuid: gpu for gpu in self._stock.answering}
            devices = {uuid: samples for uuid, samples in devices.items() if uuid in known}
            self._states = {uuid: _answered(samples) for uuid, samples in devices.items()}
            inventory = self._stock.publish({uuid: samples[:2] for uuid, samples in devices.items()})
        except (WorkerFailed, _NvmlError) as error:
            return self._none(error)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return self._none(self.worker.malformed("answered something malformed"))
        finally:
            self._waits = self._hurried = False
        for gpu in inventory.gpus:
            if gpu.uuid and gpu.uuid not in devices:
                devices[gpu.uuid] = DeviceSamples(
                    status=FAILED, why=gpu.samples_why or "", newest={}, dropped=frozenset()
                )
        self._quiet = (
            not any(self._newest.values())
            and not any(self._dropped.values())
            and all(samples.status != FAILED for samples in devices.values())
        )
        self._last = Collection(
            at=time.time(), error="", driver_version=self.driver_version, devices=devices, inventory=inventory
        )
        return self._last

    def _none(self, why: Exception) -> Collection:
        """Nothing was answered, and the devices are read anew next time."""
        self._devices_until, self._complete, self._quiet = 0.0, False, False
        if "(DriverNotLoaded)" in str(why):
            self._stock.driver_gone()
        return Collection(
            at=time.time(),
            error=str(why),
            driver_version=self.driver_version,
            devices={},
            inventory=self._stock.inventory,
        )

    async def _find_devices(self) -> None:
        # After an error the worker starts the library anew, and it is not known how long that takes.
        limit = None if self._complete else max(_START_SECONDS, self.worker.timeout)
        answer = await self._call({"call": "devices", "details": self._details}, limit)
        self._complete = self._stock.take(answer, time.time())
        self.driver_version = str(answer["driver_version"])
        self._count = len(answer["devices"])
        # One device that did not answer is asked again soon, not in a minute; and so is a driver without any.
        every = _DETAILS_EVERY if self._details else _DEVICES_EVERY
        wait = every if self._complete and self._count else _INCOMPLETE_SECONDS
        self._devices_until = time.monotonic() + wait
        uuids = {gpu.uuid for gpu in self._stock.answering}
        for known in (self._watermarks, self._newest, self._dropped, self._clients):
            for gone in known.keys() - uuids:
                del known[gone]

    async def _ask(
        self, gpus: tuple[GpuReport, ...] | list[GpuReport], waiting: Mapping[str, float] = _NO_WAIT
    ) -> Mapping[str, DeviceSamples]:
        """Each one's samples; a change makes the devices be read again.

        ``waiting`` is how long, and how often, the worker asks for itself: then they are those of the last collection,
        the very same object, if nothing is new.
        """
        found: dict[str, DeviceSamples] = {}
        left = list(gpus)
        while left:
            now_us = int(time.time() * 1e6)
            asked = [[gpu.uuid, None if gpu.mig else self._since(gpu.uuid, now_us)] for gpu in left]
            limit = self.worker.timeout * max(1.0, len(left) / _IN_ONE_CALL)
            request = {"call": "several", "devices": asked, **waiting}
            self._waits = bool(waiting)
            answer = await self._call(request, limit + waiting.get("wait", 0.0))
            if "unchanged" in answer:
                return self._last.devices
            answers = answer["answers"]
            if not answers:
                raise ValueError("no device answered, not even with an error")
            if waiting:
                now_us = int(time.time() * 1e6)
            for gpu, answer in zip(left, answers, strict=False):
                found[gpu.uuid] = samples = self._sample(gpu, answer, now_us)
                answered = _answered(samples)
                if not all(answered) and self._states.get(gpu.uuid, answered) != answered:
                    self._devices_until = 0.0
            left = left[len(answers) :]
        return found

    def _since(self, uuid: str, now_us: int) -> int:
        """The time stamp from which on samples are new."""
        oldest = now_us - int(SAMPLE_SECONDS * 1e6)
        watermark = self._watermarks.get(uuid, oldest)
        if not oldest < watermark <= now_us:  # long ago, or the clock was set back
            watermark = oldest
        return watermark

    def _sample(self, gpu: GpuReport, answer: dict[str, Any], now_us: int) -> DeviceSamples:
        uuid = gpu.uuid
        try:
            self._check(answer)
        except _NvmlError as error:
            self._look_again()
            return DeviceSamples(status=FAILED, why=str(error), newest={}, dropped=frozenset())
        for whose, xid, count in answer.get("xids", ()):
            if self._stock.reported(whose, int(xid), int(count)):
                self._devices_until = 0.0  # how it is now
        if answer["count"] != self._count:
            self._devices_until = 0.0
        memory = None if answer["processes"] is None else dict(answer["processes"])
        if gpu.mig:
            why = "NVML has no process utilization in MIG mode"
            return DeviceSamples(status=UNSUPPORTED, why=why, newest={}, dropped=frozenset(), memory=memory)
        if answer["status"] != OK:
            if answer["status"] == FAILED:
                self._look_again()
            return DeviceSamples(
                status=answer["status"], why=answer["text"], newest={}, dropped=frozenset(), memory=memory
            )
        newest, dropped = self._merge(uuid, answer, self._since(uuid, now_us), now_us)
        unknown = {pid for pid, stamp in dropped.items() if stamp > newest.get(pid, (0, 0))[0]}
        if answer["mps"] is not None:
            self._clients[uuid] = answer["mps"]
        unknown.update(pid for pid in self._clients.get(uuid, ()) if pid not in newest)
        return DeviceSamples(status=OK, why="", newest=newest, dropped=frozenset(unknown), memory=memory)

    def _look_again(self) -> None:
        """Soon, but not each time: a device that fails for ever would be read each second."""
        self._devices_until = min(self._devices_until, time.monotonic() + _INCOMPLETE_SECONDS)

    def _merge(
        self, uuid: str, answer: dict[str, Any], watermark: int, now_us: int
    ) -> tuple[dict[int, tuple[int, int]], dict[int, int]]:
        """What is known of the last second, with what the driver answered now: (newest, dropped)."""
        oldest = now_us - int(SAMPLE_SECONDS * 1e6)
        newest = {p: entry for p, entry in self._newest.get(uuid, {}).items() if oldest < entry[0] <= now_us}
        dropped = {p: stamp for p, stamp in self._dropped.get(uuid, {}).items() if oldest < stamp <= now_us}
        for pid, taken_us, sm_util in answer["samples"]:
            stamp = min(taken_us, now_us)  # one from the future would make every later sample look old
            if stamp > oldest and stamp >= newest.get(pid, (0, 0))[0]:
                newest[pid] = (stamp, sm_util)
            watermark = max(watermark, stamp)
        for pid, taken_us, _ in answer["dropped"]:
            stamp = min(taken_us, now_us)
            if stamp > oldest:
                dropped[pid] = max(dropped.get(pid, 0), stamp)
            watermark = max(watermark, stamp)
        self.implausible += len(answer["dropped"])
        self._watermarks[uuid], self._newest[uuid], self._dropped[uuid] = watermark, newest, dropped
        return newest, dropped

    async def _call(self, request: dict[str, Any], limit: float | None = None) -> dict[str, Any]:
        answer = json.loads(await self.worker.request(json.dumps(request).encode(), limit=limit))
        self._check(answer)
        return dict(answer)

    def _check(self, answer: dict[str, Any]) -> None:
        """Raise what NVML said, if that is an error."""
        if "error" in answer:
            if answer["error"] in _OLD_VIEW and time.monotonic() >= self._next_restart:
                self.worker.stop()
                self._next_restart = time.monotonic() + _RESTART_SECONDS
            raise _NvmlError(f"{answer['text']} ({answer['error']}){_HINTS.get(answer['error'], '')}")


class _NvmlError(Exception):
    """NVML answered, with an error."""


async def _wait(task: asyncio.Task[Collection], patience: float) -> None:
    """Wait for the task, ``patience`` seconds at most.

    In ticks, each of which counts for no more than its length: what it took longer, this thread was busy with
    something else or had no CPU, and could not have seen an answer.
    """
    tick = patience / _TICKS
    for _ in range(_TICKS):
        await asyncio.wait({task}, timeout=tick)
        if task.done():
            return
