"""Device values and XID errors, read in the NVML worker.

A missing value is None; ``failed`` has reasons of failures. A lost device has an ``error``. Units are NVML's, but
watts and joules.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from functools import partial

TYPE_CHECKING = False  # typing itself is half a MiB
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: Instances of one GPU. NVML says seven at most; a number from a broken driver must not become a long loop.
_MOST_INSTANCES = 64
#: NVML_GPU_VIRTUALIZATION_MODE_*, in order.
_MODES = "none", "passthrough", "vgpu", "host_vgpu", "host_vsga"
_NVLINKS = 36  # the highest number of links in NVML
#: Seconds between two polls of NVML's events, and most events in one; the rest waits for the next poll.
_LOOK_SECONDS, _AT_ONCE = 1.0, 64
_BUS_ID = re.compile(r"([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})\.([0-7])")


def error_name(error: Any) -> str:
    """NVML's name of an error: ``GpuIsLost``."""
    return type(error).__name__.removeprefix("NVMLError_") or "Unknown"


class DeviceReader:
    """Reads devices; ``broken`` if the library needs a restart."""

    def __init__(self, pynvml: Any) -> None:
        self._nvml = pynvml
        self.broken = False
        self._events: Any = None  # without a set no XID is reported
        self._watched: set[str] = set()
        self._next_look = 0.0
        self._absent = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        self._device_is_gone = {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED}
        self._library_is_gone = {
            pynvml.NVML_ERROR_UNINITIALIZED,
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        }
        #: Errors after which NVML has to be shut down and started again before it answers anything.
        self.fatal = self._device_is_gone | self._library_is_gone

    def read(self, index: int) -> dict[str, Any]:
        """Read a `resolver.gpu.inventory.DeviceAnswer`. Raises NVMLError if the library fails."""
        nvml = self._nvml
        identity: dict[str, Any] = {"device_index": index, "uuid": ""}
        failed: dict[str, str] = {}
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            identity["uuid"] = nvml.nvmlDeviceGetUUID(handle)
            values = self._values(handle).items()
            gpu = identity | {name: self.value(name, read, failed) for name, read in values}
            gpu["name"] = gpu["name"] or ""
            gpu["memory_total"], gpu["memory_used"] = gpu.pop("memory") or (None, None)
            gpu["utilization"], gpu["memory_utilization"] = gpu.pop("rates") or (None, None)
            self._watch(handle, gpu["uuid"])
            gpu |= place_of(gpu["pci_address"])
            if gpu["mig"]:
                instances = self.value("mig_instances", lambda: self._instances(handle), failed)
                gpu["mig_instances"] = instances or []
        except nvml.NVMLError as error:
            if error.value in self._library_is_gone:
                raise
            self.broken = self.broken or error.value in self._device_is_gone
            return {"gpu": identity, "error": error_name(error), "text": str(error)}
        return {"gpu": gpu, "failed": failed}

    def _watch(self, handle: Any, uuid: str) -> None:
        """Register a GPU's XID errors, unless NVML refuses."""
        nvml = self._nvml
        if uuid not in self._watched:
            self._watched.add(uuid)  # once: support doesn't change
            with suppress(nvml.NVMLError):
                if nvml.nvmlDeviceGetSupportedEventTypes(handle) & nvml.nvmlEventTypeXidCriticalError:
                    self._events = self._events or nvml.nvmlEventSetCreate()
                    nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)

    def xids(self) -> list[list[Any]]:
        """``[UUID, XID, count]`` of errors since the last look."""
        now, counts = time.monotonic(), dict[tuple[str, int], int]()
        if self._events is None or now < self._next_look:
            return []
        self._next_look = now + _LOOK_SECONDS
        nvml = self._nvml
        try:
            for _ in range(_AT_ONCE):
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                key = nvml.nvmlDeviceGetUUID(event.device), event.eventData
                counts[key] = counts.get(key, 0) + 1
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_TIMEOUT:
                self.close()  # e.g. a GPU is lost; recreated with the next reading of GPUs
        return [[uuid, xid, count] for (uuid, xid), count in counts.items()]

    def close(self) -> None:
        """Free the set of events, before the library's shutdown."""
        events, self._events = self._events, None
        self._watched.clear()
        if events is not None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(events)

    def _values(self, handle: Any) -> dict[str, Callable[[], Any]]:
        nvml = self._nvml
        uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return {
            "name": lambda: nvml.nvmlDeviceGetName(handle),
            "minor": lambda: nvml.nvmlDeviceGetMinorNumber(handle),
            "pci_address": lambda: pci_address(nvml.nvmlDeviceGetPciInfo(handle).busId),
            "mig": lambda: self._in_mig_mode(handle),
            "nvlinks": lambda: self._nvlinks(handle),
            "virtualization": lambda: self._virtualization(handle),
            "memory": lambda: self._memory(handle),
            "rates": lambda: self._rates(handle),
            "temperature": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "power": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "ecc_uncorrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, volatile),
        }

    def value(self, name: str, read: Callable[[], Any], failed: dict[str, str]) -> Any:
        """Read a value; None if that fails, with its reason in ``failed`` unless the device has none."""
        try:
            return read()
        except self._nvml.NVMLError as error:
            if error.value in self.fatal:
                raise
            if error.value not in self._absent:
                failed[name] = f"{error} ({error_name(error)})"
            return None

    def _memory(self, handle: Any) -> list[int]:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        return [memory.total, memory.used]

    def _rates(self, handle: Any) -> list[int]:
        """Share of the time in which the GPU, and its memory controller, were busy; per cent."""
        rates = self._nvml.nvmlDeviceGetUtilizationRates(handle)
        return [rates.gpu, rates.memory]

    def _virtualization(self, handle: Any) -> str | None:
        mode = self._nvml.nvmlDeviceGetVirtualizationMode(handle)
        return _MODES[mode] if 0 <= mode < len(_MODES) else None

    def _nvlinks(self, handle: Any) -> dict[str, int]:
        """Count the active NVLinks by the PCI address at their other end: a GPU's, or a switch's."""
        nvml, counts = self._nvml, dict[str, int]()
        for link in range(_NVLINKS):
            try:
                if nvml.nvmlDeviceGetNvLinkState(handle, link):
                    place = nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)
                    address = pci_address(place.busId) or "unknown"
                    counts[address] = counts.get(address, 0) + 1
            except (nvml.NVMLError_InvalidArgument, nvml.NVMLError_NotSupported):
                if not link:
                    raise
                break  # that was the last one
        return counts

    def _in_mig_mode(self, handle: Any) -> bool:
        nvml = self._nvml
        try:
            current, _pending = nvml.nvmlDeviceGetMigMode(handle)
        except nvml.NVMLError as error:
            if error.value in self._absent:
                return False  # GPUs and drivers from before MIG
            raise
        return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)

    def _instances(self, handle: Any) -> list[dict[str, Any]]:
        nvml = self._nvml
        instances = []
        for index in range(min(nvml.nvmlDeviceGetMaxMigDeviceCount(handle), _MOST_INSTANCES)):
            try:
                instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            except nvml.NVMLError_NotFound:
                continue  # no instance at this index; the next one may exist
            total, used = self.value("memory", partial(self._memory, instance), {}) or (None, None)
            name = self.value("name", partial(nvml.nvmlDeviceGetName, instance), {}) or ""
            instances.append(
                {
                    "uuid": nvml.nvmlDeviceGetUUID(instance),
                    "gpu_instance": nvml.nvmlDeviceGetGpuInstanceId(instance),
                    "compute_instance": nvml.nvmlDeviceGetComputeInstanceId(instance),
                    "memory_total": total,
                    "memory_used": used,
                    # Its name is the GPU's, and the profile: "NVIDIA A100-SXM4-40GB MIG 1g.5gb".
                    "profile": name.partition(" MIG ")[2],
                }
            )
        return instances


def pci_address(bus_id: str) -> str | None:
    """Convert NVML's ``00000000:3B:00.0`` to ``0000:3b:00.0``; None if malformed."""
    match = _BUS_ID.fullmatch(bus_id)
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    return f"{int(domain, 16):04x}:{bus.lower()}:{device.lower()}.{function}"


def place_of(address: str | None, sysfs: str = "/sys") -> dict[str, str | int | None]:
    """Return a device's NUMA node, PCI root complex and CPU socket, from sysfs; None if unknown."""
    if address is None:
        return {"numa_node": None, "pcie_root": None, "cpu_socket": None}
    directory = f"{sysfs}/bus/pci/devices/{address}"
    return {
        "numa_node": _numa_node(directory, sysfs),
        "pcie_root": _pcie_root(directory),
        "cpu_socket": _cpu_socket(directory, sysfs),
    }


def _numa_node(directory: str, sysfs: str) -> int | None:
    """NUMA node; -1 ("unknown") with a single node is 0."""
    node = _number(_read(f"{directory}/numa_node"))
    if node == -1 and _read(f"{sysfs}/devices/system/node/online") == "0":
        return 0
    return node if node is not None and node >= 0 else None


def _pcie_root(directory: str) -> str | None:
    """``pci0000:3a``: the link leads through it, ``../../../devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0``."""
    try:
        parts = os.readlink(directory).split("/")
    except OSError:
        return None
    return next((part for part in parts if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", part)), None)


def _cpu_socket(directory: str, sysfs: str) -> int | None:
    """Return the CPUs' socket; None for several."""
    sockets = set()
    for cpu in re.findall(r"\d+", _read(f"{directory}/local_cpulist")):  # both ends of each range
        sockets.add(_number(_read(f"{sysfs}/devices/system/cpu/cpu{cpu}/topology/physical_package_id")))
    socket = sockets.pop() if len(sockets) == 1 else None
    return socket if socket is not None and socket >= 0 else None


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(4096).strip()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None
