"""Utilization samples of one device: of its processes in the last second, and of the device since the last answer.

A process in NVML's answer to "since T" was busy after T. That is all the call promises: its stamps are those of the
last sample in the ring's order of places, up to ten seconds old. The device's own samples have true stamps, in any
order. They show the driver's clock, which may differ from the machine's, and both can be set. Times are microseconds.
"""

from __future__ import annotations

import struct
import time

from resolver.workers.nvml_devices import error_name

TYPE_CHECKING = False  # typing itself is half a MiB
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping
    from typing import Any

    Fetch = Callable[..., list[Any]]

SECOND = 1_000_000
#: Largest age of the newest period while the driver takes samples, one each 139 ms, in older drivers 167 ms.
_NEWEST_AGE = 300_000
#: A stamp is useless if it differs more from both the machine's clock and the driver's known clock.
_PLAUSIBLE = 60 * SECOND
_MOST = 100  # per cent
#: A period (`c_nvmlSample_t`) as stamp and value: unpacking is six times as fast as reading its fields.
_PERIOD = struct.Struct("QI4x")
_SIZE_RETRIES = 5
LEGACY_REFUSED = (
    "the driver refuses nvmlDeviceGetProcessUtilization, the only call that HAMi before 2.10 makes"
)


def fetch(nvml: Any, call: Fetch, *arguments: Any) -> list[Any]:
    """Call for a list that can grow between the call that asks its size and the call that fetches it."""
    for _attempt in range(_SIZE_RETRIES):
        try:
            return call(*arguments)
        except nvml.NVMLError_InsufficientSize:
            continue
    raise nvml.NVMLError(nvml.NVML_ERROR_INSUFFICIENT_SIZE)


class ClockUnknownError(Exception):
    """The driver's clock is unknown: no answer shows the samples of the last second."""


class DeviceClock:
    """The driver's clock, from one device's own periods."""

    def __init__(self) -> None:
        self._ring: Mapping[int, int] | None = None  # of the last answer: per cent by stamp
        self._ahead = 0  # of the monotonic clock

    def read(self, ring: Mapping[int, int], wall: int, monotonic: int) -> tuple[int, dict[str, Any]]:
        """Take the device's whole ring; return the time, and the answer's fields about it. Raises ClockUnknownError."""
        before, late = self._ring, wall if self._ring is None else monotonic + self._ahead
        near = {
            at: load
            for at, load in ring.items()
            if -_PLAUSIBLE <= at - wall <= _PLAUSIBLE or -_PLAUSIBLE <= at - late <= _PLAUSIBLE
        }
        off = max(ring) - max(wall, late)
        if not near or off > _PLAUSIBLE:
            raise ClockUnknownError(
                f"the driver dates its samples {off / SECOND:+.0f} s from this machine's clock: their age is unknown"
            )
        self._ring = near
        new = sorted(near.keys() - (before or {}).keys())
        if before is None:
            self._ahead = wall - monotonic
            if (age := wall - new[-1]) > SECOND:
                # It sleeps, or its clock is late: the next answer shows whether there are new ones.
                raise ClockUnknownError(f"the device's newest sample is {age / SECOND:.1f} s old")
        if new:
            newest = new[-1] - monotonic
            self._ahead = min(max(self._ahead, newest), newest + _NEWEST_AGE)
        now = monotonic + self._ahead
        if max(ring) > now + _NEWEST_AGE:
            raise ClockUnknownError(
                "the driver's clock was set back: for ten seconds its samples are of two times"
            )
        recent = [load for at, load in near.items() if at > now - SECOND]
        start = max((at for at in (before or {}) if at <= now), default=0)
        periods = [[at, near[at] if near[at] <= _MOST else None] for at in new if at > start > 0]
        return now, {"idle": bool(recent) and not any(recent), "start": start, "periods": periods}


class Samples:
    """All devices' samples, through NVML."""

    def __init__(self, pynvml: Any, fatal: Container[int]) -> None:
        self._nvml, self._fatal = pynvml, fatal
        self._clocks: dict[str, DeviceClock] = {}
        self._refused = set[str]()  # UUIDs of devices that answer only the newer call

    def read(self, uuid: str, handle: Any) -> dict[str, Any]:
        """Return the answer's fields about a device's samples. Raises NVMLError."""
        nvml, why = self._nvml, ""
        # The second call: 550 and later; with 580 and on Blackwell the only one that answers.
        calls = [nvml.nvmlDeviceGetProcessUtilization, nvml.nvmlDeviceGetProcessesUtilizationInfo]
        for call in calls[uuid in self._refused :]:
            try:
                answer = self._read(call, uuid, handle)
            except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound) as error:
                why = why or str(error)
            except ClockUnknownError as error:
                return {"status": "failed", "why": str(error)}
            except nvml.NVMLError as error:
                if error.value in self._fatal:
                    raise
                return {"status": "failed", "why": f"{error} ({error_name(error)})"}
            else:
                if why:
                    self._refused.add(uuid)
                return {"status": "ok", "why": LEGACY_REFUSED if uuid in self._refused else "", **answer}
        return {"status": "unsupported", "why": why}

    def _read(self, call: Fetch, uuid: str, handle: Any) -> dict[str, Any]:
        clock = self._clocks.setdefault(uuid, DeviceClock())
        ring = self._ring(handle)
        wall, monotonic = time.time_ns() // 1000, time.monotonic_ns() // 1000
        now, reading = clock.read(ring, wall, monotonic)
        start = reading["start"]
        newest = self._processes(call, handle, now - SECOND)
        shares = self._processes(call, handle, start) if start else {}
        return reading | {"newest": newest, "shares": shares}

    def _ring(self, handle: Any) -> dict[int, int]:
        """Return the device's own periods: per cent by stamp."""
        nvml = self._nvml
        try:
            _kind, ring = nvml.nvmlDeviceGetSamples(handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, 0)
        except nvml.NVMLError_NotFound:
            ring = []
        if not ring:
            raise ClockUnknownError("the device has no samples of its own, which date those of processes")
        return dict(map(_PERIOD.unpack, ring))

    def _processes(self, call: Fetch, handle: Any, since: int) -> dict[int, int]:
        nvml = self._nvml
        try:
            return {sample.pid: sample.smUtil for sample in fetch(nvml, call, handle, since)}
        except nvml.NVMLError as error:
            # nvidia-ml-py raises even on success if the call for the size finds nothing.
            if error.value in (nvml.NVML_SUCCESS, nvml.NVML_ERROR_NOT_FOUND):
                return {}
            raise
