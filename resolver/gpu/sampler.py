"""NVML's utilization samples, asked of the NVML worker, with a watermark per device.

Devices are told apart by UUID. A device that fails or is unsupported is a state with its reason, not a zero.
"""

from __future__ import annotations

import json
import sysconfig
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from resolver.errors import WorkerFailed
from resolver.gpu.inventory import NONE, Inventory
from resolver.workers import Worker

if TYPE_CHECKING:
    from collections.abc import Mapping

#: A sample speaks for this long; then the process is idle. HAMi's own watcher asks for the last second too.
SAMPLE_SECONDS = 1.0
_DEVICES_EVERY = 60.0
_INCOMPLETE_SECONDS = 2.0  # a lost GPU makes the worker start the library anew, each time
_CALL_SECONDS = 5.0
#: What a person can do about an error, by NVML's name of it.
_HINTS = {
    "LibraryNotFound": ": libnvidia-ml.so.1 is not there; is the driver installed, and mounted into this container?",
    "DriverNotLoaded": ": load the kernel module, or start nvidia-persistenced",
}
#: What a process may answer for ever: a library stays loaded when the driver is replaced, and the dynamic linker
#: remembers which directories it did not find. A new worker looks anew.
_OLD_VIEW = ("LibRmVersionMismatch", "LibraryNotFound")
_RESTART_SECONDS = 10.0

OK, UNSUPPORTED, FAILED = "ok", "unsupported", "failed"


class DeviceSamples(NamedTuple):
    """One device's samples of the last second.

    ``newest`` maps the PID as NVML gave it (maybe a thread's) to its time stamp (us since the epoch) and SM
    utilization (per cent). ``dropped`` are PIDs with values that cannot be: not idle, unknown. ``memory`` is NVML's
    list of processes: PID as NVML gave it to bytes, None where it does not tell them; None as a whole without a list.
    """

    status: str
    why: str
    newest: Mapping[int, tuple[int, int]]
    dropped: frozenset[int]
    memory: Mapping[int, int | None] | None = None


class Collection(NamedTuple):
    """All devices at one time. ``error`` is empty, or says why nothing is known; ``at`` is Unix time."""

    at: float
    error: str
    driver_version: str | None
    devices: Mapping[str, DeviceSamples]
    inventory: Inventory = NONE


class Sampler:
    """Collects from every device; owns the NVML worker."""

    def __init__(self) -> None:
        purelib = sysconfig.get_paths()["purelib"]
        self.worker = Worker("nvml worker", "resolver.gpu.nvml_worker", purelib, timeout=_CALL_SECONDS)
        self.driver_version: str | None = None
        self.implausible = 0
        self._devices: list[dict[str, Any]] = []
        self._devices_until = 0.0
        self._next_restart = 0.0
        self._watermarks: dict[str, int] = {}
        self._newest: dict[str, dict[int, tuple[int, int]]] = {}
        self._dropped: dict[str, dict[int, int]] = {}  # PID -> time stamp of its last value that cannot be

    async def collect(self) -> Collection:
        """Ask every device for what is new. Never raises; what fails is said in the answer."""
        try:
            if time.monotonic() >= self._devices_until:
                await self._find_devices()
            devices = {}
            for device in self._devices:
                devices[device["uuid"]] = await self._sample(device)
            return Collection(time.time(), "", self.driver_version, devices)
        except (WorkerFailed, _NvmlError) as error:
            self._devices_until = 0.0
            return Collection(time.time(), str(error), self.driver_version, {})

    async def _find_devices(self) -> None:
        answer = await self._call({"call": "devices"})
        self.driver_version = str(answer["driver_version"])
        self._devices = [device for device in answer["devices"] if device["uuid"]]
        # One device that did not answer is asked again soon, not in a minute.
        complete = len(self._devices) == len(answer["devices"])
        self._devices_until = time.monotonic() + (_DEVICES_EVERY if complete else _INCOMPLETE_SECONDS)
        uuids = {device["uuid"] for device in self._devices}
        for known in (self._watermarks, self._newest, self._dropped):
            for gone in known.keys() - uuids:
                del known[gone]

    async def _sample(self, device: dict[str, Any]) -> DeviceSamples:
        uuid = device["uuid"]
        if device["mig"]:
            return DeviceSamples(UNSUPPORTED, "NVML has no process utilization in MIG mode", {}, frozenset())
        now_us = int(time.time() * 1e6)
        oldest = now_us - int(SAMPLE_SECONDS * 1e6)
        watermark = self._watermarks.get(uuid, oldest)
        if not oldest < watermark <= now_us:  # long ago, or the clock was set back
            watermark = oldest
        try:
            answer = await self._call({"call": "samples", "uuid": uuid, "since": watermark})
        except _NvmlError as error:
            self._devices_until = 0.0
            return DeviceSamples(FAILED, str(error), {}, frozenset())
        if answer["status"] == UNSUPPORTED:
            return DeviceSamples(UNSUPPORTED, answer["text"], {}, frozenset())
        newest = {p: entry for p, entry in self._newest.get(uuid, {}).items() if oldest < entry[0] <= now_us}
        dropped = {p: stamp for p, stamp in self._dropped.get(uuid, {}).items() if oldest < stamp <= now_us}
        for pid, told, sm_util in answer["samples"]:
            stamp = min(told, now_us)  # one from the future would make every later sample look old
            if stamp > oldest and stamp >= newest.get(pid, (0, 0))[0]:
                newest[pid] = (stamp, sm_util)
            watermark = max(watermark, stamp)
        for pid, told, _ in answer["dropped"]:
            stamp = min(told, now_us)
            if stamp > oldest:
                dropped[pid] = max(dropped.get(pid, 0), stamp)
            watermark = max(watermark, stamp)
        self.implausible += len(answer["dropped"])
        self._watermarks[uuid], self._newest[uuid], self._dropped[uuid] = watermark, newest, dropped
        unknown = frozenset(pid for pid, stamp in dropped.items() if stamp > newest.get(pid, (0, 0))[0])
        return DeviceSamples(OK, "", newest, unknown)

    async def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        answer = json.loads(await self.worker.request(json.dumps(request).encode()))
        if "error" in answer:
            if answer["error"] in _OLD_VIEW and time.monotonic() >= self._next_restart:
                self.worker.stop()
                self._next_restart = time.monotonic() + _RESTART_SECONDS
            raise _NvmlError(f"{answer['text']} ({answer['error']}){_HINTS.get(answer['error'], '')}")
        return dict(answer)


class _NvmlError(Exception):
    """NVML answered, with an error."""
