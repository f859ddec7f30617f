"""NVML worker: the only program that loads the driver's library. If a call hangs there, the daemon kills the worker.

One JSON object each way on descriptor 0 (SOCK_SEQPACKET)::

    {"call": "devices"} -> {"driver_version": str, "devices": [...]}, each an `inventory.DeviceAnswer`
    {"call": "several", "uuids": [...]} -> {"answers": [...], "count": number of devices or null,
        "xids": [[uuid, XID, count], ...] of any device}; each a `sampler.DeviceSamples`, in order; at least one, fewer
        than requested if long
    any failure -> {"error": NVML's name, "text": str}
"""

from __future__ import annotations

import _socket  # without the module around it
import json
import os
import sys

from resolver.linux import seccomp
from resolver.workers.nvml_devices import DeviceReader, error_name
from resolver.workers.nvml_samples import Samples, fetch

TYPE_CHECKING = False  # typing itself is half a MiB
if TYPE_CHECKING:
    from typing import Any

#: Most numbers in one answer before the remaining devices are left out.
_MANY_NUMBERS = 6000
#: The list of processes has had several shapes. From 535.43.02 to 535.98 entries of ``_v3`` have 32 bytes, and
#: nvidia-ml-py reads 24: all but the first would be false. Those of ``_v2`` have 24 in every driver.
_LIST_VERSIONS = ("_v2", "_v3")


def main() -> int:
    """Answer until the socket closes."""
    import pynvml  # this process alone: it loads the driver's library

    seccomp.forbid_dangerous()  # no allow-list: the calls of the driver's library are undocumented
    channel = _socket.socket(fileno=os.dup(0))
    nvml = Nvml(pynvml)
    while message := channel.recv(1 << 16):
        request = json.loads(message)
        try:
            answer = nvml.several(request) if request["call"] == "several" else nvml.devices()
        except pynvml.NVMLError as error:
            nvml.failed(error)
            answer = {"error": error_name(error), "text": str(error)}
        channel.send(json.dumps(answer, separators=(",", ":")).encode())
    return 0


class Nvml:
    """Library, initialized when needed, and again after fatal errors."""

    def __init__(self, pynvml: Any) -> None:
        self._pynvml = pynvml
        self._initialized = False
        self._forget()

    def _forget(self) -> None:
        # A broken library lost a device, which comes back only after a restart of the library.
        self._reader = DeviceReader(self._pynvml)
        self._samples = Samples(self._pynvml, self._reader.fatal)

    def failed(self, error: Any) -> str:
        """Describe an error; if fatal, shut the library down."""
        if error.value in self._reader.fatal:
            self._shut_down()
        return f"{error} ({error_name(error)})"

    def _shut_down(self) -> None:
        if self._initialized:
            self._initialized = False
            self._reader.close()
            self._forget()
            try:
                self._pynvml.nvmlShutdown()
            except self._pynvml.NVMLError as error:
                sys.stderr.write(f"resolver: NVML could not be shut down: {error}\n")

    def _ensure_initialized(self) -> None:
        if not self._initialized:
            self._pynvml.nvmlInit()
            self._initialized = True

    def devices(self) -> dict[str, Any]:
        """Return the driver's version and all devices, failing ones with an error."""
        if self._reader.broken:
            self._shut_down()
        self._ensure_initialized()
        # One lost GPU must not hide the others: they are still asked with the library as it is.
        devices = [self._reader.read(index) for index in range(self._pynvml.nvmlDeviceGetCount())]
        return {"driver_version": self._pynvml.nvmlSystemGetDriverVersion(), "devices": devices}

    def several(self, request: dict[str, Any]) -> dict[str, Any]:
        """Several devices' processes and samples, and all errors since the last request."""
        answers: list[dict[str, Any]] = []
        numbers = 0
        for uuid in request["uuids"]:
            try:
                answer = self._samples_of(uuid)
            except self._pynvml.NVMLError as error:
                answer = {"status": "failed", "why": self.failed(error)}
            answers.append(answer)
            lists = ("newest", "shares", "periods", "memory", "mps")
            numbers += 3 * sum(len(answer.get(name) or ()) for name in lists)
            if numbers > _MANY_NUMBERS:
                break
        count = self._pynvml.nvmlDeviceGetCount() if self._initialized else None
        return {"answers": answers, "count": count, "xids": self._reader.xids()}

    def _samples_of(self, uuid: str) -> dict[str, Any]:
        self._ensure_initialized()
        # By UUID, because an index changes its device when one falls off the bus, a handle when one is added.
        nvml = self._pynvml
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        power = self._reader.value("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000, {})
        return self._processes(handle) | {"power": power} | self._samples.read(uuid, handle)

    def _processes(self, handle: Any) -> dict[str, Any]:
        """Return processes with their memory, and MPS clients, which may overlap.

        If NVML refuses one list there is none: half a list would say that others use no memory.
        """
        memory = self._list("nvmlDeviceGetComputeRunningProcesses", handle, without=None)
        clients = self._list("nvmlDeviceGetMPSComputeRunningProcesses", handle, without={})
        both = None
        if memory is not None and clients is not None:
            both = memory | {pid: used for pid, used in clients.items() if memory.get(pid) is None}
        return {"memory": both, "mps": None if clients is None else list(clients)}

    def _list(
        self, name: str, handle: Any, without: dict[int, int | None] | None
    ) -> dict[int, int | None] | None:
        """PID to bytes of memory (None: not reported), or None if it fails.

        ``without`` is the answer of a driver without such a list.
        """
        nvml = self._pynvml
        for version in _LIST_VERSIONS:
            try:
                entries = fetch(nvml, getattr(nvml, name + version), handle)
            except nvml.NVMLError_FunctionNotFound:
                continue
            except nvml.NVMLError_NotSupported:
                break
            except nvml.NVMLError as error:
                if error.value in self._reader.fatal:
                    raise
                return None
            memory: dict[int, int | None] = {}
            for entry in entries:
                if entry.pid > 0:  # drivers sometimes list PID 0
                    known_memory, used = memory.get(entry.pid, 0), entry.usedGpuMemory
                    # In MIG mode a process is listed once for each of its instances.
                    memory[entry.pid] = None if known_memory is None or used is None else known_memory + used
            return memory
        return without
