"""The NVML worker: the only program that loads the driver's library.

A child of the daemon (`resolver.child`; standard library and nvidia-ml-py only). A call that hangs in the driver
costs this process, which the daemon kills after its time limit, and nothing else.

One JSON object each way over the SOCK_SEQPACKET socket on descriptor 0::

    {"call": "devices"}                            -> {"driver_version": str, "devices": [{"index": int,
                                                       "uuid": str, "name": str, "mig": bool}]}
    {"call": "samples", "uuid": str, "since": us}  -> {"status": "ok", "samples": [[pid, us, sm], ...],
                                                       "dropped": [[pid, us, sm], ...]}
                                                    | {"status": "unsupported", "text": str}
    anything that fails                            -> {"error": NVML's name of it, "code": int, "text": str}

Time stamps are NVML's: microseconds since the epoch. Percentages as NVML gives them.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

#: The list of samples can grow between the call that asks its size and the call that fetches it.
_SIZE_RETRIES = 5


def main() -> int:
    """Answer until the daemon closes the socket."""
    import os
    import socket

    import pynvml

    channel = socket.socket(fileno=os.dup(0))
    nvml = Nvml(pynvml)
    calls: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "devices": nvml.devices,
        "samples": nvml.samples,
    }
    while message := channel.recv(1 << 16):
        request = json.loads(message)
        try:
            answer = calls[request["call"]](request)
        except pynvml.NVMLError as error:
            answer = nvml.failed(error)
        channel.send(json.dumps(answer, separators=(",", ":")).encode())
    return 0


class Nvml:
    """The library, initialized when first needed and again after an error that calls for it."""

    def __init__(self, pynvml: Any) -> None:
        self._pynvml = pynvml
        self._initialized = False
        self._renew = False  # a device was lost: it comes back only with a fresh start of the library
        # Errors after which NVML has to be shut down and started again before it answers anything.
        self._fatal = {
            pynvml.NVML_ERROR_UNINITIALIZED,
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
            pynvml.NVML_ERROR_GPU_IS_LOST,
            pynvml.NVML_ERROR_RESET_REQUIRED,
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        }

    def failed(self, error: Any) -> dict[str, Any]:
        """Describe an NVML error; shut the library down if it needs a fresh start."""
        if error.value in self._fatal:
            self._shut_down()
        name = type(error).__name__.removeprefix("NVMLError_") or "Unknown"
        return {"error": name, "code": error.value, "text": str(error)}

    def _shut_down(self) -> None:
        if not self._initialized:
            return
        self._initialized = self._renew = False
        try:
            self._pynvml.nvmlShutdown()
        except self._pynvml.NVMLError as error:
            sys.stderr.write(f"resolver: NVML could not be shut down: {error}\n")

    def _ensure_initialized(self) -> None:
        if not self._initialized:
            self._pynvml.nvmlInit()
            self._initialized = True

    def devices(self, _request: dict[str, Any]) -> dict[str, Any]:
        """The driver's version and every device that answers; one that does not carries its error."""
        if self._renew:
            self._shut_down()
        self._ensure_initialized()
        nvml = self._pynvml
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                found.append(
                    {
                        "index": index,
                        "uuid": _text(nvml.nvmlDeviceGetUUID(handle)),
                        "name": _text(nvml.nvmlDeviceGetName(handle)),
                        "mig": self._in_mig_mode(handle),
                    }
                )
            except nvml.NVMLError as error:
                # One lost GPU must not hide the others: they are still asked with the library as it is.
                self._renew = self._renew or error.value in self._fatal
                found.append({"index": index, "uuid": "", "name": "", "mig": False, "error": str(error)})
        return {"driver_version": _text(nvml.nvmlSystemGetDriverVersion()), "devices": found}

    def _in_mig_mode(self, handle: Any) -> bool:
        nvml = self._pynvml
        try:
            current, _pending = nvml.nvmlDeviceGetMigMode(handle)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            return False  # GPUs and drivers from before MIG
        return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)

    def samples(self, request: dict[str, Any]) -> dict[str, Any]:
        """One device's utilization samples newer than ``since``.

        No sample is not a failure: NVML says NOT_FOUND when nothing ran. Samples with PID 0 or a value above
        100 have been seen from real drivers; they are told apart, so that nobody takes such a process for idle.
        """
        self._ensure_initialized()
        nvml = self._pynvml
        # By UUID: an index is another device's as soon as one falls off the bus.
        handle = nvml.nvmlDeviceGetHandleByUUID(request["uuid"])
        try:
            raw = self._fetch(nvml.nvmlDeviceGetProcessUtilization, handle, request["since"])
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound) as error:
            try:  # 550 and later; on some Blackwell drivers the only one that answers
                raw = self._fetch(nvml.nvmlDeviceGetProcessesUtilizationInfo, handle, request["since"])
            except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
                return {"status": "unsupported", "text": str(error)}
        kept: list[list[int]] = []
        dropped: list[list[int]] = []
        for sample in raw:
            plausible = sample.pid > 0 and sample.smUtil <= 100
            (kept if plausible else dropped).append([sample.pid, sample.timeStamp, sample.smUtil])
        return {"status": "ok", "samples": kept, "dropped": dropped}

    def _fetch(self, call: Callable[[Any, int], list[Any]], handle: Any, since: int) -> list[Any]:
        nvml = self._pynvml
        for _attempt in range(_SIZE_RETRIES):
            try:
                return call(handle, since)
            except nvml.NVMLError as error:
                # nvidia-ml-py raises even on success when the call that asks the size finds nothing to size.
                if error.value in (nvml.NVML_SUCCESS, nvml.NVML_ERROR_NOT_FOUND):
                    return []
                if error.value != nvml.NVML_ERROR_INSUFFICIENT_SIZE:
                    raise
        raise nvml.NVMLError(nvml.NVML_ERROR_INSUFFICIENT_SIZE)


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
