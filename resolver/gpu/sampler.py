"""NVML's utilization samples, read through the NVML worker.

A failed or unsupported device is a state with a reason, never a zero.
"""

import asyncio
import sysconfig
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec import MsgspecError, Struct, json
from msgspec.structs import replace

from resolver.base.errors import WorkerFailed
from resolver.base.reasons import STARTING, DriverError
from resolver.gpu.inventory import NONE, DeviceAnswer, Gpu, Inventory
from resolver.gpu.kept_inventory import InventoryKeeper
from resolver.workers.supervisor import WorkerProcess

DEVICES_EVERY = 60.0
INCOMPLETE_SECONDS = 2.0  # each time, a lost GPU makes the worker restart the library
CALL_SECONDS = 5.0
_IN_ONE_CALL = 8  # devices that share that time; more devices get more
_TICKS = 20
#: Starting the library opens every GPU, which takes seconds each without a persistence daemon.
_START_SECONDS = 30.0
#: Errors that only a new worker resolves: a loaded library outlives an upgrade of the driver, and the dynamic linker
#: remembers missing directories.
_OLD_VIEW = ("LibRmVersionMismatch", "LibraryNotFound")
_RESTART_SECONDS = 10.0

#: NVML's values are of the last second, like those that HAMi's watcher reads.
SAMPLE_SECONDS = 1.0
_MOST = 100  # per cent; drivers have reported more, and PID 0

OK, UNSUPPORTED, FAILED = "ok", "unsupported", "failed"


class DeviceSamples(Struct, frozen=True):
    """The NVML worker's answer about one device's processes; NVML's PIDs may be threads'.

    ``newest`` has each process with a sample in the last second: its SM utilization in per cent, the sum of its periods
    over the number of periods with an active process. ``dropped`` are PIDs with an unknown value: an impossible
    sample, or a client of an MPS server (``mps``, None if unknown), which has its samples. ``memory`` is in bytes, None
    without a list. ``power`` is the device's, in watts. ``idle``: the device's own samples show no load in that second.

    ``periods`` are the device's own samples since the answer before, oldest first: a time stamp (microseconds by the
    driver's clock), and the utilization until then (per cent of the time; None: impossible). Each period begins at the
    stamp before it, the first at ``start``. Empty in the first answer.
    ``shares`` are as ``newest``, since ``start``.
    """

    status: str
    why: str = ""
    newest: dict[int, int] = {}
    dropped: frozenset[int] = frozenset()
    memory: dict[int, int | None] | None = None
    power: float | None = None
    idle: bool = False
    start: int = 0
    periods: tuple[tuple[int, int | None], ...] = ()
    shares: dict[int, int] = {}
    mps: tuple[int, ...] | None = None

    @property
    def quiet(self) -> float:
        """Return the seconds without load at the end of its periods."""
        busy = (at for at, load in self.periods if load != 0)
        return (self.periods[-1][0] - max(busy, default=self.start)) / 1e6 if self.periods else 0.0

    @property
    def legacy_call_refused(self) -> bool:
        """Whether HAMi-core before 2.10 can't read the device's samples."""
        return self.status == OK and bool(self.why)


class _Answer(Struct):
    """The worker's answer to ``devices`` or ``several``."""

    error: str = ""
    text: str = ""
    driver_version: str = ""
    devices: list[DeviceAnswer] = []
    answers: list[DeviceSamples] = []
    count: int | None = None
    xids: list[tuple[str, int, int]] = []


class Collection(NamedTuple):
    """All devices at Unix time ``at``. With an ``error`` nothing is known, and ``inventory`` is older."""

    at: float
    error: str
    devices: Mapping[str, DeviceSamples]
    inventory: Inventory = NONE


class Sampler:
    """Collector of every device's samples; owns the NVML worker."""

    def __init__(self) -> None:
        purelib = sysconfig.get_paths()["purelib"]
        self.worker = WorkerProcess("nvml worker", "resolver.workers.nvml", purelib, timeout=CALL_SECONDS)
        self.implausible = 0
        self._keeper = InventoryKeeper()
        self.devices_until = 0.0
        self._count = 0  # number of devices at their last reading
        self._well = set[str]()  # UUIDs of devices that answered in full
        self._complete = False  # every device answered
        self._error = STARTING  # of the last complete collection; empty if all answered
        self._pending: asyncio.Task[Collection] | None = None
        self._next_restart = 0.0
        self._clients: dict[str, tuple[int, ...]] = {}  # of MPS servers, which have their samples, by UUID

    async def collect(self, patience: float = CALL_SECONDS) -> Collection:
        """Read every device's news. Never raises; failures are in the answer.

        Without an answer within ``patience`` seconds everything is unknown; the next call goes on waiting. The error is
        then the last one while a worker starts, `STARTING` at first.
        """
        if self._error:
            patience = max(patience, CALL_SECONDS)
        pending = self._pending = self._pending or asyncio.create_task(self._collect())
        try:
            await _wait(pending, patience)
        except asyncio.CancelledError:
            self._cancel()
            await asyncio.gather(pending, return_exceptions=True)
            raise
        if not pending.done():
            late = f"the driver did not answer within {patience:g} s"
            # A starting worker does not change the error.
            return self._collection(self._error or late, {})
        self._pending = None
        collection = pending.result()
        self._error = collection.error
        return collection

    def stop(self) -> None:
        self._cancel()
        self.worker.stop()

    def _cancel(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None

    async def _collect(self) -> Collection:
        try:
            if time.monotonic() >= self.devices_until:
                await self._find_devices()
            devices = await self._ask(self._keeper.answering)
            states = {uuid: (device.status, device.why) for uuid, device in devices.items()}
            inventory = self._keeper.publish(states)
        except (WorkerFailed, _NvmlError) as error:
            return self._none(error)
        except (MsgspecError, ValueError):
            return self._none(self.worker.malformed("answered something malformed"))
        for gpu in inventory.gpus:
            if gpu.uuid and gpu.uuid not in devices:
                devices[gpu.uuid] = DeviceSamples(FAILED, gpu.samples_why or "")
        return self._collection("", devices)

    def _collection(self, error: str, devices: Mapping[str, DeviceSamples]) -> Collection:
        return Collection(time.time(), error, devices, self._keeper.inventory)

    def _none(self, why: Exception) -> Collection:
        """Return an empty answer; the devices are read again next time."""
        self.devices_until, self._complete = 0.0, False
        if "(DriverNotLoaded)" in str(why):
            self._keeper.driver_gone()
        return self._collection(str(why), {})

    async def _find_devices(self) -> None:
        # After an error the worker restarts the library, which may take long.
        limit = None if self._complete else max(_START_SECONDS, self.worker.timeout)
        answer = await self._call({"call": "devices"}, limit)
        self._complete = self._keeper.take(answer.driver_version, answer.devices, time.time())
        self._count = len(answer.devices)
        # Devices are read again soon if one is silent, or the driver has none.
        wait = DEVICES_EVERY if self._complete and self._count else INCOMPLETE_SECONDS
        self.devices_until = time.monotonic() + wait
        for gone in self._clients.keys() - {gpu.uuid for gpu in self._keeper.answering}:
            del self._clients[gone]

    async def _ask(self, gpus: tuple[Gpu, ...]) -> dict[str, DeviceSamples]:
        """Return each device's samples; after a change, the devices are read again."""
        answers: dict[str, DeviceSamples] = {}
        while left := gpus[len(answers) :]:
            limit = self.worker.timeout * max(1.0, len(left) / _IN_ONE_CALL)
            request = {"call": "several", "uuids": [gpu.uuid for gpu in left]}
            answer = await self._call(request, limit)
            if not 0 < len(answer.answers) <= len(left):
                raise ValueError("no device answered, not even with an error")
            for gpu, samples in zip(left, answer.answers, strict=False):
                answers[gpu.uuid] = self._plausible(gpu, samples)
            bad = [self._keeper.reported(*error) for error in answer.xids]
            if any(bad) or answer.count != self._count:
                self.devices_until = 0.0
        well = {uuid for uuid, sample in answers.items() if sample.status == OK and sample.memory is not None}
        if self._well & answers.keys() - well:
            self.devices_until = 0.0
        elif any(sample.status == FAILED for sample in answers.values()):  # at a limited rate
            self.devices_until = min(self.devices_until, time.monotonic() + INCOMPLETE_SECONDS)
        self._well = well
        return answers

    def _plausible(self, gpu: Gpu, samples: DeviceSamples) -> DeviceSamples:
        """Return an answer without samples that can't be."""
        if gpu.mig and samples.status != FAILED:
            why = "NVML has no process utilization in MIG mode"
            return DeviceSamples(UNSUPPORTED, why, memory=samples.memory, power=samples.power)
        if samples.status != OK:
            return replace(samples, why=_explained(samples.why))
        if samples.mps is not None:
            self._clients[gpu.uuid] = samples.mps
        implausible = {pid for pid, sm in samples.newest.items() if pid <= 0 or sm > _MOST}
        self.implausible += len(implausible)
        clients = {pid for pid in self._clients.get(gpu.uuid, ()) if pid not in samples.newest}
        for pid in implausible:
            del samples.newest[pid]
            samples.shares.pop(pid, None)
        return replace(samples, dropped=frozenset(implausible | clients))

    async def _call(self, request: dict[str, Any], limit: float | None = None) -> _Answer:
        """Ask the worker. Raises NVML's error, if it answers with one."""
        answer = json.decode(await self.worker.request(json.encode(request), limit=limit), type=_Answer)
        self.worker.means.recovered()
        if not answer.error:
            return answer
        if answer.error in _OLD_VIEW and time.monotonic() >= self._next_restart:
            self.worker.stop(0)
            self._next_restart = time.monotonic() + _RESTART_SECONDS
        raise _NvmlError(_explained(f"{answer.text} ({answer.error})"))


def _explained(said: str) -> str:
    error = DriverError.named_in(said)
    return said if error is DriverError.OTHER else f"{said}: {error.meaning}"


class _NvmlError(Exception):
    """NVML answered, with an error."""


async def _wait(task: asyncio.Task[Collection], patience: float) -> None:
    """Wait for the task, at most ``patience`` seconds of this thread's time.

    Each tick counts with its nominal length: in a longer one the thread did not run, and could not see an answer.
    """
    tick = patience / _TICKS
    for _ in range(_TICKS):
        await asyncio.wait({task}, timeout=tick)
        if task.done():
            return
