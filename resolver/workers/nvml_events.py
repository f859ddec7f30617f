"""XID errors since the last request, from NVML's event set."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

#: Seconds between two polls of NVML, and most events in one; the rest waits for the next poll.
_LOOK_SECONDS, _AT_ONCE = 1.0, 64


class XidWatch:
    """Event set; without one nothing is reported."""

    def __init__(self, pynvml: Any) -> None:
        self._nvml = pynvml
        self._set: Any = None
        self._watched: set[str] = set()
        self._next_look = 0.0

    def watch(self, handle: Any, uuid: str) -> None:
        """Register a GPU's errors, unless NVML refuses."""
        nvml = self._nvml
        if uuid not in self._watched:
            self._watched.add(uuid)  # once: support doesn't change
            with suppress(nvml.NVMLError):
                if nvml.nvmlDeviceGetSupportedEventTypes(handle) & nvml.nvmlEventTypeXidCriticalError:
                    self._set = self._set or nvml.nvmlEventSetCreate()
                    nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._set)

    def fetch(self) -> list[list[Any]]:
        """``[UUID, XID, count]`` of errors since the last fetch."""
        now, found = time.monotonic(), dict[tuple[str, int], int]()
        if self._set is None or now < self._next_look:
            return []
        self._next_look = now + _LOOK_SECONDS
        nvml = self._nvml
        try:
            for _ in range(_AT_ONCE):
                event = nvml.nvmlEventSetWait_v2(self._set, 0)
                key = nvml.nvmlDeviceGetUUID(event.device), event.eventData
                found[key] = found.get(key, 0) + 1
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_TIMEOUT:
                self.close()  # e.g. a GPU is lost; recreated with the next reading of GPUs
        return [[uuid, xid, count] for (uuid, xid), count in found.items()]

    def close(self) -> None:
        """Free it, before the library's shutdown."""
        events, self._set = self._set, None
        self._watched.clear()
        if events is not None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(events)
