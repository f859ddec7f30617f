"""NVML worker: the only program that loads the driver's library. If a call hangs there, the daemon kills the worker.

One JSON object each way on descriptor 0 (SOCK_SEQPACKET)::

    {"call": "devices", "details": bool} -> {"driver_version": str, "devices": [...]}, see `nvml_devices`
    {"call": "several", "devices": [[uuid, with samples: bool], ...]} -> {"answers": [...]}, in order; at least one,
        fewer than requested if long. Each is
           {"status": "ok", "samples": [[pid, us, sm], ...] of the last second, "now": us by the driver's clock,
            "text": `LEGACY_REFUSED` if the driver refuses the call that HAMi before 2.10 makes, or "",
            "idle": bool, the device's own samples show no load in that second,
            "periods": [[us, per cent | null], ...] | null, the device's own since the last answer, oldest first; each
            begins at the stamp before, the first at "start": us, or 0; null: it has none,
            "shares": [[pid, sm], ...] of the time since "start",
            "processes": [[pid, bytes | null], ...] | null, "power": watts | null, "mps": [pid, ...] | null,
            "count": number of devices, "xids": [[uuid, XID, count], ...], of any device, only if there are any}
         | {"status": "unsupported" | "failed", "text": str, ...} for the samples; no status and samples without them
    any failure -> {"error": NVML's name, "code": int, "text": str}

``us`` of a process is only a hint: it can be older than its newest sample. A process's per cent are the sum of its own
periods over the number of periods in which any process was active; a device's are shares of the time.
"""

from __future__ import annotations

import json
import sys

from resolver.workers.nvml_devices import DeviceReader, error_name, text
from resolver.workers.nvml_events import XidWatch
from resolver.workers.nvml_samples import ClockUnknownError, Samples

TYPE_CHECKING = False  # typing itself is half a MiB
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LEGACY_REFUSED = (
    "the driver refuses nvmlDeviceGetProcessUtilization, the only call that HAMi before 2.10 makes"
)
#: A list can grow between the call that asks its size and the call that fetches it.
_SIZE_RETRIES = 5
#: Most numbers in one answer before the remaining devices are left out.
_MANY_NUMBERS = 6000
#: The list of processes has had several shapes. From 535.43.02 to 535.98 entries of ``_v3`` have 32 bytes, and
#: nvidia-ml-py reads 24: all but the first would be false. Those of ``_v2`` have 24 in every driver.
_LIST_VERSIONS = ("_v2", "_v3")


def main() -> int:
    """Answer until the socket closes."""
    import _socket  # without the module around it
    import os

    import pynvml

    from resolver.linux import seccomp

    seccomp.forbid_dangerous()  # which calls the driver's library needs, only its maker knows
    channel = _socket.socket(fileno=os.dup(0))
    nvml = Nvml(pynvml)

    calls = {"devices": nvml.devices, "several": nvml.several}
    while message := channel.recv(1 << 16):
        request = json.loads(message)
        try:
            answer = calls[request["call"]](request)
        except pynvml.NVMLError as error:
            answer = nvml.failed(error)
        channel.send(json.dumps(answer, separators=(",", ":")).encode())
    return 0


class Nvml:
    """Library, initialized when needed, and again after fatal errors."""

    def __init__(self, pynvml: Any) -> None:
        self._pynvml = pynvml
        self._xids = XidWatch(pynvml)
        self._initialized = False
        # If broken, a device was lost: it comes back only with a fresh start of the library.
        self._reader = DeviceReader(pynvml, self._xids.watch)
        self._fatal = self._reader.fatal
        self._samples = Samples(pynvml, self._fetch)
        self._refused = set[str]()  # UUIDs of devices that answer only the newer call
        self._absent = (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound)

    def failed(self, error: Any) -> dict[str, Any]:
        """Describe an error; if fatal, shut the library down."""
        if error.value in self._fatal:
            self._shut_down()
        return {"error": error_name(error), "code": error.value, "text": str(error)}

    def _shut_down(self) -> None:
        if not self._initialized:
            return
        self._initialized = self._reader.broken = False
        self._refused.clear()
        self._xids.close()
        self._samples.forget(but=set())
        try:
            self._pynvml.nvmlShutdown()
        except self._pynvml.NVMLError as error:
            sys.stderr.write(f"resolver: NVML could not be shut down: {error}\n")

    def _ensure_initialized(self) -> None:
        if not self._initialized:
            self._pynvml.nvmlInit()
            self._initialized = True

    def devices(self, request: dict[str, Any]) -> dict[str, Any]:
        """The driver's version and all devices, failing ones with an error."""
        if self._reader.broken:
            self._shut_down()
        self._ensure_initialized()
        nvml, details = self._pynvml, request.get("details", False)
        # One lost GPU must not hide the others: they are still asked with the library as it is.
        found = [self._reader.read(index, details=details) for index in range(nvml.nvmlDeviceGetCount())]
        self._samples.forget(but={device["uuid"] for device in found})
        return {"driver_version": text(nvml.nvmlSystemGetDriverVersion()), "devices": found}

    def samples(self, uuid: str, *, utilization: bool) -> dict[str, Any]:
        """A device's processes, and samples."""
        self._ensure_initialized()
        nvml = self._pynvml
        # By UUID: an index is another device's as soon as one falls off the bus, and a handle is when one is added.
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        answer = self._processes(handle) | {"power": self._power(handle)}
        if utilization:
            answer |= self._utilization(uuid, handle)
        if xids := self._xids.fetch():
            answer["xids"] = xids
        return answer

    def _power(self, handle: Any) -> float | None:
        """Watts, or None."""
        try:
            return float(self._pynvml.nvmlDeviceGetPowerUsage(handle)) / 1000
        except self._pynvml.NVMLError as error:
            if error.value in self._fatal:
                raise
            return None

    def several(self, request: dict[str, Any]) -> dict[str, Any]:
        """Several devices' `samples`, or errors."""
        answers: list[dict[str, Any]] = []
        numbers, count = 0, None
        for uuid, utilization in request["devices"]:
            try:
                answer = self.samples(uuid, utilization=utilization)
                count = self._pynvml.nvmlDeviceGetCount() if count is None else count
                answer["count"] = count
            except self._pynvml.NVMLError as error:
                answer = self.failed(error)
            answers.append(answer)
            lists = ("samples", "shares", "periods", "processes", "mps")
            numbers += 3 * sum(len(answer.get(name) or ()) for name in lists)
            if numbers > _MANY_NUMBERS:
                break
        return {"answers": answers}

    def _processes(self, handle: Any) -> dict[str, Any]:
        """Processes with their memory, and MPS clients, which may overlap.

        If NVML refuses one list there is none: half a list would say that others use no memory.
        """
        memory = self._list("nvmlDeviceGetComputeRunningProcesses", handle, without=None)
        clients = self._list("nvmlDeviceGetMPSComputeRunningProcesses", handle, without={})
        both = None
        if memory is not None and clients is not None:
            both = memory | {pid: used for pid, used in clients.items() if memory.get(pid) is None}
        return {
            "processes": None if both is None else list(both.items()),
            "mps": None if clients is None else list(clients),
        }

    def _list(
        self, name: str, handle: Any, without: dict[int, int | None] | None
    ) -> dict[int, int | None] | None:
        """PID to bytes of memory (None: not reported), or None if it fails.

        ``without`` is the answer of a driver without such a list.
        """
        nvml = self._pynvml
        for version in _LIST_VERSIONS:
            try:
                found = self._fetch(getattr(nvml, name + version), handle)
            except nvml.NVMLError_FunctionNotFound:
                continue
            except nvml.NVMLError_NotSupported:
                break
            except nvml.NVMLError as error:
                if error.value in self._fatal:
                    raise
                return None
            memory: dict[int, int | None] = {}
            for entry in found:
                if entry.pid > 0:  # drivers sometimes list PID 0
                    known, used = memory.get(entry.pid, 0), entry.usedGpuMemory
                    # In MIG mode a process is listed once for each of its instances.
                    memory[entry.pid] = None if known is None or used is None else known + used
            return memory
        return without

    def _utilization(self, uuid: str, handle: Any) -> dict[str, Any]:
        nvml, why = self._pynvml, ""
        # The second call: 550 and later; with 580 and on Blackwell the only one that answers.
        calls = [nvml.nvmlDeviceGetProcessUtilization, nvml.nvmlDeviceGetProcessesUtilizationInfo]
        for call in calls[uuid in self._refused :]:
            try:
                answer = self._samples.read(call, uuid, handle)
            except ClockUnknownError as error:
                return {"status": "failed", "text": str(error)}
            except self._absent as error:
                why = why or str(error)
            except nvml.NVMLError as error:
                if error.value in self._fatal:
                    raise
                return {"status": "failed", "text": f"{error} ({error_name(error)})"}
            else:
                if why:
                    self._refused.add(uuid)
                return {"status": "ok", "text": LEGACY_REFUSED if uuid in self._refused else "", **answer}
        return {"status": "unsupported", "text": why}

    def _fetch(self, call: Callable[..., list[Any]], *arguments: Any) -> list[Any]:
        nvml = self._pynvml
        for _attempt in range(_SIZE_RETRIES):
            try:
                return call(*arguments)
            except nvml.NVMLError_InsufficientSize:
                continue
        raise nvml.NVMLError(nvml.NVML_ERROR_INSUFFICIENT_SIZE)
