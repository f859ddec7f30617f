"""The NVML worker: the only program that loads the driver's library.

A child of the daemon (`resolver.workers.child`; standard library and nvidia-ml-py only). A call that hangs in the
driver costs this process, which the daemon kills after its time limit, and nothing else.

One JSON object each way over the SOCK_SEQPACKET socket on descriptor 0::

    {"call": "devices", "details": bool} -> {"driver_version": str, "devices": [...]}, see `nvml_devices`
    {"call": "samples", "uuid": str, "since": us | null}
        -> {"status": "ok", "samples": [[pid, us, sm], ...], "dropped": [[pid, us, sm], ...],
            "processes": [[pid, bytes | null], ...] | null, "mps": [pid, ...] | null, "count": number of devices,
            "xids": [[uuid, XID, how often], ...], of any device, and only if there are any}
         | the same with {"status": "unsupported" | "failed", "text": str} for the samples; without, if none are wanted
    {"call": "several", "devices": [[uuid, since], ...]} -> {"answers": [...]}, each as of "samples", in order; at least
        one, and fewer than were asked for if they are long
    the same with {"wait": seconds, "every": seconds}: while that is what was answered last, nothing is answered before
        the time is up; then {"unchanged": true}. So often NVML is asked for what changes when anything happens on a
        GPU, a fraction of the whole, and for the whole when it did
    {"call": "now"} -> nothing; who waits answers now
    anything that fails -> {"error": NVML's name of it, "code": int, "text": str}

Time stamps are NVML's: microseconds since the epoch. Percentages as NVML gives them.
"""

from __future__ import annotations

import json
import sys
import time
from struct import Struct

from resolver.lean import lean
from resolver.workers.nvml_devices import DeviceReader, error_name, text
from resolver.workers.nvml_events import XidWatch

TYPE_CHECKING = False  # typing itself is half a MiB
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: A list can grow between the call that asks its size and the call that fetches it.
_SIZE_RETRIES = 5
#: Numbers in one answer after which no further device is asked for it: a message has its limits.
_MANY_NUMBERS = 6000
#: The list of processes has had three shapes. nvidia-ml-py's call without a suffix knows the last one only.
_LIST_VERSIONS = ("_v3", "_v2")
#: One of its entries (nvmlProcessInfo_v2_t): PID, bytes of memory, and instances. All ones: the driver doesn't know.
_ENTRY, _NOT_TOLD = Struct("=I4xQ8x"), 2**64 - 1
_ROOM = 64  # entries that a list is first fetched with


def main() -> int:
    """Answer until the daemon closes the socket."""
    import _socket  # without the module around it
    import os

    with lean("pynvml"):
        import pynvml

    from resolver.linux import seccomp

    seccomp.forbid(seccomp.DANGEROUS)  # which calls the driver's library needs, only its maker knows
    channel = _socket.socket(fileno=os.dup(0))
    nvml = Nvml(pynvml)

    def spoken_to(seconds: float) -> bool:
        """Wait so long at most; whether there is something to read."""
        channel.settimeout(seconds)
        try:
            channel.recv(1, _socket.MSG_PEEK)
        except TimeoutError:
            return False
        finally:
            channel.settimeout(None)
        return True

    calls: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
        "devices": nvml.devices,
        "samples": nvml.samples,
        "several": lambda request: (
            nvml.news(request, spoken_to) if "wait" in request else nvml.several(request)
        ),
        "now": lambda _request: None,
    }
    while message := channel.recv(1 << 16):
        request = json.loads(message)
        try:
            answer = calls[request["call"]](request)
        except pynvml.NVMLError as error:
            answer = nvml.failed(error)
        if answer is not None:
            channel.send(json.dumps(answer, separators=(",", ":")).encode())
    return 0


class Nvml:
    """The library, initialized when first needed and again after an error that calls for it."""

    def __init__(self, pynvml: Any) -> None:
        self._pynvml = pynvml
        self._xids = XidWatch(pynvml)
        self._initialized = False
        self._renew = False  # a device was lost: it comes back only with a fresh start of the library
        self._told: tuple[object, object] = (
            None,
            None,
        )  # what `several` was last asked, but times; what it answered
        self._asked_at = 0.0  # when NVML was last asked for that, or glanced at
        self._glance: object = None
        self._handles: dict[str, Any] = {}  # by UUID, as of `several`
        self._room = self._entries(_ROOM)
        # Errors after which NVML has to be shut down and started again before it answers anything.
        self._fatal = {
            pynvml.NVML_ERROR_UNINITIALIZED,
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
            pynvml.NVML_ERROR_GPU_IS_LOST,
            pynvml.NVML_ERROR_RESET_REQUIRED,
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        }
        self._absent = (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound)

    def failed(self, error: Any) -> dict[str, Any]:
        """Describe an NVML error; shut the library down if it needs a fresh start."""
        if error.value in self._fatal:
            self._shut_down()
        return {"error": error_name(error), "code": error.value, "text": str(error)}

    def _shut_down(self) -> None:
        if not self._initialized:
            return
        self._initialized = self._renew = False
        self._handles.clear()
        self._xids.close()
        try:
            self._pynvml.nvmlShutdown()
        except self._pynvml.NVMLError as error:
            sys.stderr.write(f"resolver: NVML could not be shut down: {error}\n")

    def _ensure_initialized(self) -> None:
        if not self._initialized:
            self._pynvml.nvmlInit()
            self._initialized = True

    def devices(self, request: dict[str, Any]) -> dict[str, Any]:
        """The driver's version and every device; one that does not answer carries its error."""
        if self._renew:
            self._shut_down()
        self._ensure_initialized()
        nvml, details = self._pynvml, request.get("details", False)
        reader = DeviceReader(nvml, self._xids.watch, details=details)
        # One lost GPU must not hide the others: they are still asked with the library as it is.
        found = [reader.read(index) for index in range(nvml.nvmlDeviceGetCount())]
        self._renew = reader.broken
        return {"driver_version": text(nvml.nvmlSystemGetDriverVersion()), "devices": found}

    def samples(self, request: dict[str, Any]) -> dict[str, Any]:
        """One device's processes, and their utilization samples newer than ``since`` (not asked for if null)."""
        answer = self._samples_of(request["uuid"], request["since"])
        return answer | {"count": self._pynvml.nvmlDeviceGetCount()}

    def _samples_of(self, uuid: str, since: int | None) -> dict[str, Any]:
        self._ensure_initialized()
        nvml = self._pynvml
        # By UUID: an index is another device's as soon as one falls off the bus, and a handle is when one is added.
        handle = self._handles[uuid] = nvml.nvmlDeviceGetHandleByUUID(uuid)
        answer = self._processes(handle)
        if since is not None:
            answer |= self._utilization(handle, since)
        if xids := self._xids.fetch():
            answer["xids"] = xids
        return answer

    def several(self, request: dict[str, Any]) -> dict[str, Any]:
        """`samples` of several devices; one that fails is an answer of its own."""
        answers: list[dict[str, Any]] = []
        numbers, count = 0, None
        for uuid, since in request["devices"]:
            try:
                answer = self._samples_of(uuid, since)
                count = self._pynvml.nvmlDeviceGetCount() if count is None else count
                answer["count"] = count
            except self._pynvml.NVMLError as error:
                answer = self.failed(error)
            answers.append(answer)
            lists = ("samples", "dropped", "processes", "mps")
            numbers += 3 * sum(len(answer.get(name) or ()) for name in lists)
            if numbers > _MANY_NUMBERS:
                break
        self._told, self._asked_at = (_uuids(request), answers), time.monotonic()
        return {"answers": answers}

    def news(self, request: dict[str, Any], spoken_to: Callable[[float], bool]) -> dict[str, Any]:
        """`several` as soon as that is another answer than the last one, or when the time is up."""
        until = time.monotonic() + request["wait"]
        while self._told[0] == _uuids(request):
            pause = min(self._asked_at + request["every"], until) - time.monotonic()
            if pause > 0 and spoken_to(pause):
                return {"unchanged": True}
            over = time.monotonic() >= until
            if not over and not self._stirs(request):
                self._asked_at = time.monotonic()
                continue
            before = self._told
            answer = self.several(request)
            if self._told != before or any(map(_is_news, answer["answers"])):
                return answer
            if over:
                return {"unchanged": True}
        return self.several(request)

    def _stirs(self, request: dict[str, Any]) -> bool:
        """Whether anything may have happened on a GPU since the last time: memory shows who came or went.

        With handles that may be another device's by now: so nothing but that is taken from it.
        """
        handles = [(self._handles.get(uuid), since) for uuid, since in request["devices"]]
        before, self._glance = self._glance, None
        try:
            self._glance = [
                self._pynvml.nvmlDeviceGetCount(),
                *(self._used(each) for each, _since in handles),
            ]
            ran = any(self._ran(each, since) for each, since in handles if since is not None)
            return ran or self._xids.happened() or self._glance != before
        except self._pynvml.NVMLError:
            return True

    def _ran(self, handle: Any, since: int) -> bool:
        """Whether there is a sample newer than ``since``, or that can't be said.

        Where there is none nvidia-ml-py raises an exception, which takes longer than to ask.
        """
        import ctypes

        nvml, count = self._pynvml, ctypes.c_uint(0)
        call = getattr(nvml.nvmlLib, "nvmlDeviceGetProcessUtilization", None)
        result = call(handle, None, ctypes.byref(count), ctypes.c_ulonglong(since)) if call else None
        if result == nvml.NVML_ERROR_NOT_FOUND or (result == nvml.NVML_SUCCESS and not count.value):
            return False
        # A size is room that may be needed, not how many there are; and there is a newer call.
        return _is_news(self._utilization(handle, since))

    def _used(self, handle: Any) -> int:
        """Bytes in use, or the error below 0: a device that can't say so is not asked for everything each time."""
        try:
            return int(self._pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        except self._pynvml.NVMLError as error:
            return -int(error.value)

    def _processes(self, handle: Any) -> dict[str, Any]:
        """Who uses the device, with memory. MPS clients are in a list of their own, and some in both.

        In MIG mode the whole device's list has the processes of all instances. Without one of the lists there is
        none: half a list would say that the others use no memory.
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
        """PID to bytes of memory, None where the driver does not report them; None as a whole if it fails.

        ``without`` is the answer for a driver that has no such list.
        """
        nvml = self._pynvml
        for version in _LIST_VERSIONS:
            try:
                found = self._fetch(self._running, name + version, handle)
            except nvml.NVMLError_FunctionNotFound:
                continue
            except nvml.NVMLError_NotSupported:
                break
            except nvml.NVMLError as error:
                if error.value in self._fatal:
                    raise
                return None
            memory: dict[int, int | None] = {}
            for pid, used in found:
                if pid > 0:  # 0 has been seen, and is nobody
                    known = memory.get(pid, 0)
                    # In MIG mode a process is listed once for each of its instances.
                    memory[pid] = None if known is None or used == _NOT_TOLD else known + used
            return memory
        return without

    def _entries(self, count: int) -> Any:
        return (self._pynvml.c_nvmlProcessInfo_v2_t * count)()

    def _running(self, name: str, handle: Any) -> list[tuple[int, int]]:
        """One of NVML's lists of processes, with their memory.

        It is fetched each second from each GPU: nvidia-ml-py makes two calls for it, and two objects of each process.
        """
        import ctypes

        nvml = self._pynvml
        call = getattr(nvml.nvmlLib, name, None)
        if call is None:
            raise nvml.NVMLError(nvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        count = ctypes.c_uint(len(self._room))
        result = call(handle, ctypes.byref(count), self._room)
        if result == nvml.NVML_ERROR_INSUFFICIENT_SIZE:
            self._room = self._entries(count.value * 2 + 5)  # more can come
        if result != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(result)
        return list(_ENTRY.iter_unpack(memoryview(self._room).cast("B")[: count.value * _ENTRY.size]))

    def _utilization(self, handle: Any, since: int) -> dict[str, Any]:
        """The samples newer than ``since``.

        No sample is not a failure: NVML says NOT_FOUND when nothing ran. Samples with PID 0 or a value above
        100 have been seen from real drivers; they are distinguished, so that such a process is not taken for idle.
        """
        nvml = self._pynvml
        try:
            try:
                raw = self._sample(nvml.nvmlDeviceGetProcessUtilization, handle, since)
            except self._absent as error:
                try:  # 550 and later; on some Blackwell drivers the only one that answers
                    raw = self._sample(nvml.nvmlDeviceGetProcessesUtilizationInfo, handle, since)
                except self._absent:
                    return {"status": "unsupported", "text": str(error)}
        except nvml.NVMLError as error:
            if error.value in self._fatal:
                raise
            return {"status": "failed", "text": f"{error} ({error_name(error)})"}
        kept: list[list[int]] = []
        dropped: list[list[int]] = []
        for sample in raw:
            plausible = sample.pid > 0 and sample.smUtil <= 100
            (kept if plausible else dropped).append([sample.pid, sample.timeStamp, sample.smUtil])
        return {"status": "ok", "samples": kept, "dropped": dropped}

    def _sample(self, call: Callable[..., list[Any]], handle: Any, since: int) -> list[Any]:
        nvml = self._pynvml
        try:
            return self._fetch(call, handle, since)
        except nvml.NVMLError as error:
            # nvidia-ml-py raises even on success when the call that asks the size finds nothing to size.
            if error.value in (nvml.NVML_SUCCESS, nvml.NVML_ERROR_NOT_FOUND):
                return []
            raise

    def _fetch(self, call: Callable[..., list[Any]], *arguments: Any) -> list[Any]:
        nvml = self._pynvml
        for _attempt in range(_SIZE_RETRIES):
            try:
                return call(*arguments)
            except nvml.NVMLError_InsufficientSize:
                continue
        raise nvml.NVMLError(nvml.NVML_ERROR_INSUFFICIENT_SIZE)


def _is_news(answer: dict[str, Any]) -> bool:
    """Whether there is something in an answer that doesn't become old by being the same as in the last one."""
    passing = any(answer.get(name) for name in ("samples", "dropped", "xids"))
    return passing or "error" in answer or answer.get("status") == "failed"


def _uuids(request: dict[str, Any]) -> list[str]:
    return [uuid for uuid, _since in request["devices"]]
