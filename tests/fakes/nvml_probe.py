"""The real nvidia-ml-py in a process of its own: LD_LIBRARY_PATH chooses NVML, and is read at start only.

    with Probe(node.environment()) as nvml:
        nvml("nvmlInit")
        nvml("nvmlDeviceGetUUID", device(0))

Run as a program it is the child: one JSON request per line, one answer per line.
"""

import ctypes
import json
import selectors
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Self

DEVICE_KEY = "device"
_SECONDS = 60


def device(index: int) -> dict[str, int]:
    """As an argument of a call: the handle of the device with this index."""
    return {DEVICE_KEY: index}


class NvmlCallError(Exception):
    """The call raised; the message is the name of nvidia-ml-py's exception, as in `NVMLError_NotFound`."""


class Probe:
    """A child with nvidia-ml-py. `prefix` goes before its command, for example nsenter."""

    def __init__(self, environment: dict[str, str], prefix: Sequence[str] = ()) -> None:
        self._environment, self._prefix = environment, prefix

    def __enter__(self) -> Self:
        self._child = subprocess.Popen(
            [*self._prefix, sys.executable, __file__],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._child.communicate(timeout=60)  # the end of its input is the end of the child
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.communicate()

    def __call__(self, name: str, *arguments: object) -> Any:
        """The answer to a call. Raises NvmlCallError, or TimeoutError when it hangs."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps([name, arguments]) + "\n")
        self._child.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.stdout, selectors.EVENT_READ)
            if not selector.select(_SECONDS):
                raise TimeoutError(f"no answer within {_SECONDS} s")
        answer = json.loads(self._child.stdout.readline())
        if "error" in answer:
            raise NvmlCallError(answer["error"])
        return answer["result"]


def _plain(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, ctypes.Union):
        return value.uiVal
    if isinstance(value, ctypes.Structure):
        return {field[0]: _plain(getattr(value, field[0])) for field in value._fields_}
    if hasattr(value, "__dict__"):
        return {key: _plain(item) for key, item in vars(value).items()}
    return value


def room(pynvml: Any, name: str, handle: Any, places: int, since: int) -> list[int]:
    """Return code and count of a call for samples with a buffer of so many places (0: none)."""
    function = pynvml._nvmlGetFunctionPointer(name)  # nvidia-ml-py asks for the right size only
    if name == "nvmlDeviceGetProcessUtilization":
        count = ctypes.c_uint(places)
        buffer = (pynvml.c_nvmlProcessUtilizationSample_t * places)() if places else None
        return [function(handle, buffer, ctypes.byref(count), ctypes.c_ulonglong(since)), count.value]
    info = pynvml.c_nvmlProcessesUtilizationInfo_v1_t(pynvml.ProcessesUtilizationInfo_v1, places, since)
    buffer = (pynvml.c_nvmlProcessUtilizationInfo_v1_t * places)()
    info.procUtilArray = buffer if places else None
    return [function(handle, ctypes.byref(info)), info.processSamplesCount]


def events(pynvml: Any, handle: Any, types: int, timeout_ms: int) -> list[int]:
    """The codes of registering events, and of waiting for one."""
    made = pynvml.nvmlEventSetCreate()
    register = pynvml._nvmlGetFunctionPointer("nvmlDeviceRegisterEvents")
    wait = pynvml._nvmlGetFunctionPointer("nvmlEventSetWait_v2")
    event = pynvml.c_nvmlEventData_t()
    codes = [register(handle, ctypes.c_ulonglong(types), made), wait(made, ctypes.byref(event), timeout_ms)]
    pynvml.nvmlEventSetFree(made)
    return codes


def _serve() -> None:
    import pynvml

    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            real = [
                pynvml.nvmlDeviceGetHandleByIndex(a[DEVICE_KEY]) if isinstance(a, dict) else a
                for a in arguments
            ]
            if name in ("room", "events"):
                real.insert(0, pynvml)
            call = globals()[name] if name in ("room", "events") else getattr(pynvml, name)
            answer: dict[str, object] = {"result": _plain(call(*real))}
        except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError) as error:
            answer = {"error": type(error).__name__}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
