"""NVML's utilization samples, read through the NVML worker.

A failed or unsupported device is a state with a reason, never a zero.
"""

from __future__ import annotations

import asyncio
import json
import sysconfig
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from resolver.base.errors import WorkerFailed
from resolver.base.reasons import STARTING, DriverError
from resolver.gpu.inventory import NONE, Inventory
from resolver.gpu.kept_inventory import InventoryKeeper
from resolver.workers.supervisor import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resolver.gpu.inventory import Gpu

_DEVICES_EVERY, _DETAILS_EVERY = 60.0, 10.0
_INCOMPLETE_SECONDS = 2.0  # each time, a lost GPU makes the worker restart the library
_CALL_SECONDS = 5.0
_IN_ONE_CALL = 8  # devices that share that time; more devices get more
_TICKS = 20
#: Starting the library opens every GPU, which takes seconds each without a persistence daemon.
_START_SECONDS = 30.0
#: Errors that only a new worker gets rid of: a loaded library outlives an upgrade of the driver, and the dynamic linker
#: remembers missing directories.
_OLD_VIEW = ("LibRmVersionMismatch", "LibraryNotFound")
_RESTART_SECONDS = 10.0

#: NVML's values are of the last second, like those that HAMi's watcher reads.
SAMPLE_SECONDS = 1.0
_MOST = 100  # per cent; more has been seen, and PID 0

OK, UNSUPPORTED, FAILED = "ok", "unsupported", "failed"


class DeviceSamples(NamedTuple):
    """One device's samples of the last second: PID to SM utilization (per cent) and a monotonic time.

    NVML's PIDs may be threads'. The time is of a sample, perhaps not of the newest. ``dropped`` are PIDs with an
    unknown value: an impossible sample, or a client of an MPS server, which has its samples. ``memory`` maps PIDs to
    bytes or None; None as a whole without a list. ``power`` is the device's, in watts. ``idle``: the device's own
    samples show no load in that second.

    ``periods`` are the device's own samples since the answer before, oldest first: a time stamp (microseconds by the
    driver's clock), and the utilization until then (per cent of the time; None: impossible). Each period begins at the
    stamp before it, the first at ``start``. None if the device has no such samples; empty in the first answer.
    ``shares`` are the processes' values since ``start``: per cent, the sum of a process's own periods over the number
    of periods with an active process.
    """

    status: str
    why: str
    newest: Mapping[int, tuple[int, float]] = MappingProxyType({})
    dropped: frozenset[int] = frozenset()
    memory: Mapping[int, int | None] | None = None
    power: float | None = None
    idle: bool = False
    start: int = 0
    periods: tuple[tuple[int, int | None], ...] | None = None
    shares: Mapping[int, int] = MappingProxyType({})

    @property
    def legacy_call_refused(self) -> bool:
        """Whether HAMi-core before 2.10 can't read the device's samples."""
        return self.status == OK and bool(self.why)


class Collection(NamedTuple):
    """All devices at Unix time ``at``. With an ``error`` nothing is known, and ``inventory`` is older."""

    at: float
    error: str
    devices: Mapping[str, DeviceSamples]
    inventory: Inventory = NONE


def _answered(samples: DeviceSamples) -> tuple[bool, bool]:
    """Return whether a device's samples, and its processes, were read."""
    return samples.status == OK, samples.memory is not None


class Sampler:
    """Collector of every device's samples; owns the NVML worker."""

    def __init__(self, *, details: bool = False) -> None:
        """Read optional ``details`` of each GPU, more often."""
        purelib = sysconfig.get_paths()["purelib"]
        self.worker = WorkerProcess("nvml worker", "resolver.workers.nvml", purelib, timeout=_CALL_SECONDS)
        self.implausible = 0
        self._details = details
        self._keeper = InventoryKeeper()
        self._devices_until = 0.0
        self._count = 0  # of the devices, when they were last read
        self._states: dict[str, tuple[bool, bool]] = {}
        self._answered = False  # all of the last collection
        self._complete = False  # every device answered
        self._error = STARTING  # of the last complete collection
        self._pending: asyncio.Task[Collection] | None = None
        self._next_restart = 0.0
        self._clients: dict[str, list[int]] = {}  # of MPS servers, which have their samples, by UUID

    async def collect(self, patience: float = _CALL_SECONDS) -> Collection:
        """Read every device's news. Never raises; failures are in the answer.

        Without an answer within ``patience`` seconds everything is unknown; the next call goes on waiting. The error is
        then the last one while a worker starts, `STARTING` at first.
        """
        if not self._answered:
            patience = max(patience, _CALL_SECONDS)
        pending = self._pending = self._pending or asyncio.create_task(self._collect())
        try:
            await _wait(pending, patience)
        except asyncio.CancelledError:
            self._cancel()
            await asyncio.gather(pending, return_exceptions=True)
            raise
        if not pending.done():
            late = f"the driver did not answer within {patience:g} s"
            return self._collection(
                late if self._answered else self._error, {}
            )  # a worker that starts is no news
        self._pending = None
        collection = pending.result()
        self._answered, self._error = not collection.error, collection.error
        return collection

    def stop(self) -> None:
        """End the worker and its current request."""
        self._cancel()
        self.worker.stop()

    def _cancel(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None

    async def _collect(self) -> Collection:
        try:
            if time.monotonic() >= self._devices_until:
                await self._find_devices()
            devices = await self._ask(self._keeper.answering)
            self._states = {uuid: _answered(samples) for uuid, samples in devices.items()}
            inventory = self._keeper.publish({uuid: samples[:2] for uuid, samples in devices.items()})
        except (WorkerFailed, _NvmlError) as error:
            return self._none(error)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return self._none(self.worker.malformed("answered something malformed"))
        for gpu in inventory.gpus:
            if gpu.uuid and gpu.uuid not in devices:
                devices[gpu.uuid] = DeviceSamples(FAILED, gpu.samples_why or "")
        return self._collection("", devices)

    def _collection(self, error: str, devices: Mapping[str, DeviceSamples]) -> Collection:
        return Collection(time.time(), error, devices, self._keeper.inventory)

    def _none(self, why: Exception) -> Collection:
        """Return an empty answer; the devices are read again next time."""
        self._devices_until, self._complete = 0.0, False
        if "(DriverNotLoaded)" in str(why):
            self._keeper.driver_gone()
        return self._collection(str(why), {})

    async def _find_devices(self) -> None:
        # After an error the worker restarts the library, which may take long.
        limit = None if self._complete else max(_START_SECONDS, self.worker.timeout)
        answer = await self._call({"call": "devices", "details": self._details}, limit)
        self._complete = self._keeper.take(answer, time.time())
        self._count = len(answer["devices"])
        # Soon again after a silent device, and of a driver without devices.
        every = _DETAILS_EVERY if self._details else _DEVICES_EVERY
        wait = every if self._complete and self._count else _INCOMPLETE_SECONDS
        self._devices_until = time.monotonic() + wait
        for gone in self._clients.keys() - {gpu.uuid for gpu in self._keeper.answering}:
            del self._clients[gone]

    async def _ask(self, gpus: tuple[Gpu, ...] | list[Gpu]) -> dict[str, DeviceSamples]:
        """Return each device's samples; after a change, the devices are read again."""
        found: dict[str, DeviceSamples] = {}
        left = list(gpus)
        while left:
            limit = self.worker.timeout * max(1.0, len(left) / _IN_ONE_CALL)
            devices = [[gpu.uuid, not gpu.mig] for gpu in left]
            answer = await self._call({"call": "several", "devices": devices}, limit)
            answers = answer["answers"]
            if not answers:
                raise ValueError("no device answered, not even with an error")
            for gpu, answer in zip(left, answers, strict=False):
                found[gpu.uuid] = samples = self._sample(gpu, answer)
                answered = _answered(samples)
                if not all(answered) and self._states.get(gpu.uuid, answered) != answered:
                    self._devices_until = 0.0
            left = left[len(answers) :]
        return found

    def _sample(self, gpu: Gpu, answer: dict[str, Any]) -> DeviceSamples:
        try:
            self._check(answer)
        except _NvmlError as error:
            self._look_again()
            return DeviceSamples(FAILED, str(error))
        for whose, xid, count in answer.get("xids", ()):
            if self._keeper.reported(whose, int(xid), int(count)):
                self._devices_until = 0.0  # how it is now
        if answer["count"] != self._count:
            self._devices_until = 0.0
        memory = None if answer["processes"] is None else dict(answer["processes"])
        power = answer["power"]
        if gpu.mig:
            why = "NVML has no process utilization in MIG mode"
            return DeviceSamples(UNSUPPORTED, why, memory=memory, power=power)
        if answer["status"] != OK:
            if answer["status"] == FAILED:
                self._look_again()
            return DeviceSamples(answer["status"], answer["text"], memory=memory, power=power)
        return self._samples(gpu.uuid, answer)._replace(memory=memory, power=power)

    def _samples(self, uuid: str, answer: dict[str, Any]) -> DeviceSamples:
        """Return an answer's samples, without those that can't be."""
        asked, driver_now = time.monotonic(), answer["now"]
        newest: dict[int, tuple[int, float]] = {}
        for pid, stamp, sm in answer["samples"]:
            age = min(max((driver_now - stamp) / 1e6, 0.0), SAMPLE_SECONDS)
            newest[pid] = sm, asked - age
        implausible = {pid for pid, (sm, _) in newest.items() if pid <= 0 or sm > _MOST}
        self.implausible += len(implausible)
        for pid in implausible:
            del newest[pid]
        if answer["mps"] is not None:
            self._clients[uuid] = answer["mps"]
        clients = (pid for pid in self._clients.get(uuid, ()) if pid not in newest)
        return DeviceSamples(
            OK,
            answer["text"],
            newest,
            frozenset((*implausible, *clients)),
            idle=answer["idle"],
            start=answer["start"],
            periods=None
            if answer["periods"] is None
            else tuple((at, load) for at, load in answer["periods"]),
            shares={pid: sm for pid, sm in answer["shares"] if pid not in implausible},
        )

    def _look_again(self) -> None:
        """Read the devices again soon, at a limited rate."""
        self._devices_until = min(self._devices_until, time.monotonic() + _INCOMPLETE_SECONDS)

    async def _call(self, request: dict[str, Any], limit: float | None = None) -> dict[str, Any]:
        answer = json.loads(await self.worker.request(json.dumps(request).encode(), limit=limit))
        self.worker.means.sufficed()
        self._check(answer)
        return dict(answer)

    def _check(self, answer: dict[str, Any]) -> None:
        """Raise NVML's error, if it answered with one."""
        if "error" in answer:
            if answer["error"] in _OLD_VIEW and time.monotonic() >= self._next_restart:
                self.worker.stop(0)
                self._next_restart = time.monotonic() + _RESTART_SECONDS
            said = f"{answer['text']} ({answer['error']})"
            known = DriverError.named_in(said)
            raise _NvmlError(said if known is DriverError.OTHER else f"{said}: {known.meaning}")


class _NvmlError(Exception):
    """NVML answered, with an error."""


async def _wait(task: asyncio.Task[Collection], patience: float) -> None:
    """Wait for the task, at most ``patience`` seconds, in ticks that count with their nominal length.

    A longer tick kept this thread from seeing an answer.
    """
    tick = patience / _TICKS
    for _ in range(_TICKS):
        await asyncio.wait({task}, timeout=tick)
        if task.done():
            return
