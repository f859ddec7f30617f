"""Integral of a GPU's load over time, by the driver's clock, from the device's own periods.

A process's value from NVML is a share of the time in which any process was active, so alone it proves no use: it only
divides the device's integral.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Generic, NamedTuple, TypeVar

from resolver.gpu.sampler import FAILED, OK, DeviceSamples

K = TypeVar("K")
#: Seconds of a device's last samples that the driver still has: NVML's silence for so long leaves no gap.
KEPT_SECONDS: Final = 12.0
#: A longer period has lost samples in it: drivers take one each 139 to 167 ms.
_LONGEST_PERIOD: Final = 1.0


class Window(NamedTuple):
    """Seconds ``covered`` and ``unknown`` since the window before, and the load's integral over the covered ones.

    ``used`` is in seconds of the whole device.
    """

    covered: float
    unknown: float
    used: float

    def split(self, shares: Mapping[K, int]) -> dict[K, float]:
        """Divide the use by NVML's values, in per cent: GPU-seconds, never more than the sum."""
        total = sum(shares.values())
        return {key: self.used * share / total if total else 0.0 for key, share in shares.items()}


class DeviceTime(Generic[K]):
    """End ``at`` (monotonic) of a device's accounted time. The device's load is divided among ``K``."""

    def __init__(self, now: float) -> None:
        self.at = now
        self._stamp = 0  # where its last period ended, by the driver's clock
        self._shares: Mapping[K, int] = {}  # of the last window
        self._kept: Window | None = None  # with a load of no known process

    def take(
        self, device: DeviceSamples, now: float, shares: Mapping[K, int]
    ) -> tuple[Window, dict[K, float]] | None:
        """Return the time since the last window with its use divided; None if a later answer may show more.

        A period counts for the process that is active at its end. So a load without a process is the end of the last
        window's burst, or belongs to a process that a later window shows.
        """
        window = self._window(device, now)
        if window is None:
            return None
        self.at = now
        if self._kept is not None:
            window, self._kept = Window(*map(sum, zip(self._kept, window, strict=True))), None
        before, self._shares = self._shares, {key: share for key, share in shares.items() if share}
        if window.used and not self._shares:
            if not before and device.memory and window.covered < KEPT_SECONDS:
                self._kept = window
                return None
            return window, window.split(before)
        return window, window.split(self._shares)

    def _window(self, device: DeviceSamples, now: float) -> Window | None:
        gap = now - self.at
        if device.status == FAILED or (device.start and not device.periods):
            return None
        if device.status != OK or not device.periods:
            self._stamp = 0
            return Window(0.0, gap, 0.0)
        covered = used = 0.0
        before, continues = device.start, self._stamp in (0, device.start)
        for stamp, load in device.periods:
            seconds, before = (stamp - before) / 1e6, stamp
            if load is not None and seconds <= _LONGEST_PERIOD:
                covered += seconds
                used += seconds * load / 100
        self._stamp = before
        unknown = (before - device.start) / 1e6 - covered if continues else gap - covered
        return Window(covered, min(max(unknown, 0.0), gap), used)
