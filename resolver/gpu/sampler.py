"""NVML's utilization samples, asked of the NVML worker, with a watermark per device.

Devices are told apart by UUID. A device that fails or is unsupported is a state with its reason, not a zero.
"""

from __future__ import annotations

import json
import sysconfig
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from resolver.errors import WorkerFailed
from resolver.workers import Worker

if TYPE_CHECKING:
    from collections.abc import Mapping

#: A sample speaks for this long; then the process is idle. HAMi's own watcher asks for the last second too.
SAMPLE_SECONDS = 1.0
_DEVICES_EVERY = 60.0
_CALL_SECONDS = 5.0

OK, UNSUPPORTED, FAILED = "ok", "unsupported", "failed"


class DeviceSamples(NamedTuple):
    """One device's samples of the last second.

    ``newest`` maps the PID as NVML gave it (maybe a thread's) to its time stamp (us since the epoch) and SM
    utilization (per cent). ``dropped`` are PIDs with values that cannot be: not idle, unknown.
    """

    status: str
    why: str
    newest: Mapping[int, tuple[int, int]]
    dropped: frozenset[int]


class Collection(NamedTuple):
    """All devices at one time. ``error`` is empty, or says why nothing is known; ``at`` is Unix time."""

    at: float
    error: str
    driver_version: str | None
    devices: Mapping[str, DeviceSamples]


class Sampler:
    """Collects from every device; owns the NVML worker."""

    def __init__(self) -> None:
        purelib = sysconfig.get_paths()["purelib"]
        self.worker = Worker("nvml worker", "resolver.gpu.nvml_worker", purelib, timeout=_CALL_SECONDS)
        self.driver_version: str | None = None
        self.implausible = 0
        self._devices: list[dict[str, Any]] = []
        self._devices_until = 0.0
        self._watermarks: dict[str, int] = {}
        self._newest: dict[str, dict[int, tuple[int, int]]] = {}

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
        # One device that did not answer is asked again at once, not in a minute.
        complete = len(self._devices) == len(answer["devices"])
        self._devices_until = time.monotonic() + (_DEVICES_EVERY if complete else 0.0)
        uuids = {device["uuid"] for device in self._devices}
        for gone in self._watermarks.keys() - uuids:
            del self._watermarks[gone]
            self._newest.pop(gone, None)

    async def _sample(self, device: dict[str, Any]) -> DeviceSamples:
        uuid = device["uuid"]
        if device["mig"]:
            return DeviceSamples(UNSUPPORTED, "NVML has no process utilization in MIG mode", {}, frozenset())
        now_us = int(time.time() * 1e6)
        oldest = now_us - int(SAMPLE_SECONDS * 1e6)
        since = self._watermarks.get(uuid, oldest)
        try:
            answer = await self._call({"call": "samples", "uuid": uuid, "since": since})
        except _NvmlError as error:
            self._devices_until = 0.0
            return DeviceSamples(FAILED, str(error), {}, frozenset())
        if answer["status"] == UNSUPPORTED:
            return DeviceSamples(UNSUPPORTED, answer["text"], {}, frozenset())
        newest = {p: entry for p, entry in self._newest.get(uuid, {}).items() if entry[0] > oldest}
        for pid, stamp, sm_util in answer["samples"]:
            if stamp > oldest and stamp >= newest.get(pid, (0, 0))[0]:
                newest[pid] = (stamp, sm_util)
            # A time stamp from the future would make every later sample look old.
            self._watermarks[uuid] = max(self._watermarks.get(uuid, 0), min(stamp, now_us))
        self._newest[uuid] = newest
        self.implausible += len(answer["dropped"])
        dropped = frozenset(pid for pid, stamp, _ in answer["dropped"] if stamp > newest.get(pid, (0, 0))[0])
        return DeviceSamples(OK, "", newest, dropped)

    async def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        answer = json.loads(await self.worker.request(json.dumps(request).encode()))
        if "error" in answer:
            raise _NvmlError(f"NVML: {answer['text']} ({answer['error']})")
        return dict(answer)


class _NvmlError(Exception):
    """NVML answered, with an error."""
