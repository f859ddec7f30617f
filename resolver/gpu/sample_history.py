"""Utilization samples of one GPU in the last second, dated by the monotonic clock.

The driver's clock may differ from the wall clock, and both can be set. So a sample is new if its time stamp is: it was
taken since the last answer. If that contradicts the estimate of the driver's clock, it sets the estimate, and its value
is unknown: NVML's values are means of the time asked for.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

#: A sample holds for this long; then the process is idle. HAMi's watcher reads the last second, too.
SAMPLE_SECONDS = 1.0
_MOST = 100  # per cent; more has been seen, and PID 0


class SampleHistory:
    """SM utilization (per cent) and monotonic time by PID; a process without them is idle or `unknown`."""

    def __init__(self) -> None:
        self.newest: dict[int, tuple[int, float]] = {}
        self._unknown: dict[int, float] = {}  # since when
        self._clients: list[int] = []  # of an MPS server, which has their samples
        self._ahead = time.time() - time.monotonic()  # the driver's clock, as long as no sample contradicts
        self._asked, self._since, self._watermark = 0.0, 0, 0
        self._stamps: dict[int, int] = {}  # by PID, in the last answer

    def since(self) -> int:
        """Return the time stamp from which to ask for samples now."""
        self._asked = time.monotonic()
        self._since = max(self._watermark, int((self._asked + self._ahead - SAMPLE_SECONDS) * 1e6))
        return self._since

    def unknown(self) -> frozenset[int]:
        """Return the PIDs whose value is unknown."""
        return frozenset((*self._unknown, *(pid for pid in self._clients if pid not in self.newest)))

    def take(self, answer: Mapping[str, Any]) -> int:
        """Merge NVML's answer; return its number of implausible samples."""
        stamps = {pid: stamp for pid, stamp, _ in answer["buffer"]}
        new = {pid: stamp for pid, stamp in stamps.items() if self._stamps.get(pid) != stamp}
        implausible = new.keys() & {pid for pid, _, sm in answer["samples"] if pid <= 0 or sm > _MOST}
        dated = {pid: stamp for pid, stamp in new.items() if pid not in implausible}
        inside = {pid: stamp for pid, stamp in dated.items() if stamp > self._since}
        values: dict[int, tuple[int, float]] = {}
        if dated:
            self._watermark = max((inside or dated).values())
            ahead = self._watermark / 1e6 - time.monotonic()  # at least
            late = ahead - self._ahead
            if late > 0 or not inside:
                self._ahead = ahead
            if late < SAMPLE_SECONDS:
                values = {
                    pid: (sm_util, stamp / 1e6 - self._ahead)
                    for pid, stamp, sm_util in answer["samples"]
                    if pid in inside
                }
        unsure, oldest = new.keys() - values.keys(), self._asked - SAMPLE_SECONDS
        held = {pid: load for pid, load in (self.newest | values).items() if load[1] > oldest}
        self.newest = {pid: load for pid, load in held.items() if pid not in unsure}
        still = {pid: at for pid, at in self._unknown.items() if at > oldest and pid not in values}
        self._unknown, self._stamps = still | dict.fromkeys(unsure, self._asked), stamps
        if answer["mps"] is not None:
            self._clients = answer["mps"]
        return len(implausible)
