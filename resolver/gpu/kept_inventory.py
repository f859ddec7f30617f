"""Keeps the inventory of GPUs over failures of the NVML worker, and judges their health."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from resolver.base.reasons import GpuReason
from resolver.gpu.inventory import NONE, DeviceAnswer, Gpu, Illness, Inventory, Xid

#: A GPU with one of these answers nothing.
SILENT = frozenset((GpuReason.LOST, GpuReason.RESET_REQUIRED, GpuReason.UNREACHABLE))
#: A GPU is too hot above `HOT`, until it is below `COOL`; degrees Celsius.
HOT, COOL = 95, 90
_BY_VALUE = {
    "memory": GpuReason.MEMORY_QUERY_FAILED,
    "temperature": GpuReason.TOO_HOT,
    "ecc_uncorrected": GpuReason.ECC_UNCORRECTED,
}
_BY_ERROR = {"GpuIsLost": GpuReason.LOST, "ResetRequired": GpuReason.RESET_REQUIRED}
#: XID errors, the driver's numbers for errors of a GPU, that make it unhealthy: NVIDIA's catalogue requires a reset or
#: a hardware check. Programs cause most others.
BROKEN = {
    48: "a memory error of two bits, which cannot be corrected",
    62: "its internal controller halted",
    64: "a broken row of memory could not be replaced",
    79: "it fell off the bus",
    95: "an uncontained memory error",
    119: "its system processor does not answer",
    120: "its system processor failed",
    140: "a memory error that was not recovered from",
}
#: XIDs caused by programs.
OF_PROGRAMS = {
    13: "a fault of a program in the graphics engine",
    31: "a program accessed memory that it does not have",
    43: "a program stopped because of an error",
    45: "work was removed after an earlier error, or when its program ended",
    68: "a fault of a program in the video decoder",
    94: "a contained memory error: the programs that used it ended",
    109: "a context switch took too long",
}
#: Values that are unknown while a GPU is silent.
_MEASURED = "memory_used", "utilization", "memory_utilization", "temperature", "power", "ecc_uncorrected"


class InventoryKeeper:
    """The inventory, and which of its GPUs answer."""

    def __init__(self) -> None:
        self.inventory: Inventory = NONE
        self.answering: tuple[Gpu, ...] = ()  # GPUs with a known UUID
        self._read: tuple[Gpu, ...] = ()  # as last read, without their samples
        self._read_at = 0.0
        self._xids: dict[str, Counter[int]] = {}  # by UUID, since the daemon started
        self._broken: dict[str, set[int]] = {}  # by UUID: errors that require a reset, until the reset

    def reported(self, uuid: str, xid: int, count: int) -> bool:
        """Count an XID error; return True if it makes that GPU unhealthy."""
        self._xids.setdefault(uuid, Counter())[xid] += count
        if xid not in BROKEN:
            return False
        self._broken.setdefault(uuid, set()).add(xid)
        return True

    def driver_gone(self) -> None:
        """Forget XIDs: unloading the driver resets every GPU."""
        self._broken.clear()

    def take(self, driver_version: str, devices: Sequence[DeviceAnswer], now: float) -> bool:
        """Take the worker's answer to ``devices``. False if a device did not answer in full."""
        old = self.inventory
        # At once: `hostpid` depends on it, even if no samples can be read.
        if driver_version != old.driver_version:
            self.inventory = old._replace(version=old.version + 1, driver_version=driver_version)
        self._read_at = now
        previous = {gpu.uuid or gpu.device_index: gpu for gpu in self._read}
        read = []
        for device, uuid in zip(devices, self._identify([device.gpu for device in devices]), strict=True):
            before = previous.get(uuid or device.gpu.device_index)
            if before and not device.error and any(illness.reason in SILENT for illness in before.illnesses):
                self._broken.pop(uuid, None)  # it answers again: it was reset
            read.append(_report(device, uuid, before, now, self._broken.get(uuid, ())))
        self._read = tuple(read)
        for gone in self._xids.keys() - {gpu.uuid for gpu in self._read}:
            del self._xids[gone]
            self._broken.pop(gone, None)
        pairs = zip(devices, self._read, strict=True)
        self.answering = tuple(gpu for device, gpu in pairs if not device.error)
        return not any(device.error or "memory" in device.failed for device in devices)

    def publish(self, samples: Mapping[str, tuple[str, str]]) -> Inventory:
        """Return the inventory with each device's sample status; a new version if anything changed."""
        gpus = tuple(_with_news(gpu, samples.get(gpu.uuid), self._xids.get(gpu.uuid)) for gpu in self._read)
        old = self.inventory
        self.inventory = Inventory(old.version + (gpus != old.gpus), self._read_at, old.driver_version, gpus)
        return self.inventory

    def _identify(self, gpus: Sequence[Gpu]) -> list[str]:
        """Return the UUID of each device; empty if unknown.

        A silent device keeps its index's UUID while the others keep theirs: indexes follow the bus.
        """
        places = {gpu.uuid: gpu.device_index for gpu in self._read if gpu.uuid}
        read = {gpu.uuid: gpu.device_index for gpu in gpus if gpu.uuid}
        both = places.keys() & read.keys()
        in_place = all(places[uuid] == read[uuid] for uuid in both)
        if not in_place or not (both or len(gpus) == len(self._read)):
            return [gpu.uuid for gpu in gpus]
        missing = {index: uuid for uuid, index in places.items() if uuid not in read}
        return [gpu.uuid or missing.get(gpu.device_index, "") for gpu in gpus]


def _report(device: DeviceAnswer, uuid: str, before: Gpu | None, now: float, broken: Collection[int]) -> Gpu:
    """Describe a device; of a silent device only the constant facts are kept."""
    gpu, illnesses = device.gpu, judge(device, before.illnesses if before else (), now, broken)
    if device.error and before:
        instances = tuple(replace(instance, memory_used=None) for instance in before.mig_instances)
        before = replace(before, device_index=gpu.device_index, mig_instances=instances)
        gpu = replace(before, **dict.fromkeys(_MEASURED))
    return replace(gpu, uuid=uuid, illnesses=illnesses)


def _with_news(gpu: Gpu, samples: tuple[str, str] | None, xids: Mapping[int, int] | None) -> Gpu:
    status, why = samples or ("failed", gpu.illnesses[0].detail if gpu.illnesses else "it was not asked")
    counted = tuple(Xid(xid, count, meaning(xid)) for xid, count in sorted(xids.items())) if xids else ()
    refused = status == "ok" and bool(why)
    return replace(gpu, samples=status, samples_why=why or None, legacy_call_refused=refused, xids=counted)


def judge(
    device: DeviceAnswer, before: Sequence[Illness], now: float, broken: Collection[int] = ()
) -> tuple[Illness, ...]:
    """Return a device's illnesses from its reading and those before, sorted as in `GpuReason`.

    Each stays until the GPU was seen without it.
    ``broken`` are its hardware XID errors since the last reset. An unreadable value proves nothing.
    """
    earlier = {illness.reason: illness for illness in before}
    reasons: dict[str, str] = {}
    unread: set[str] = {reason for name, reason in _BY_VALUE.items() if device.error or name in device.failed}
    if device.error:
        reasons[_BY_ERROR.get(device.error, GpuReason.UNREACHABLE)] = f"{device.text} ({device.error})"
    elif "memory" in device.failed:
        reasons[GpuReason.MEMORY_QUERY_FAILED] = device.failed["memory"]
    degrees, errors = device.gpu.temperature, device.gpu.ecc_uncorrected
    if degrees is not None and degrees > (COOL - 1 if GpuReason.TOO_HOT in earlier else HOT):
        reasons[GpuReason.TOO_HOT] = f"{degrees} C"
    if errors:
        reasons[GpuReason.ECC_UNCORRECTED] = f"{errors} uncorrected errors since the driver was loaded"
    if broken:
        reasons[GpuReason.XID] = "; ".join(f"XID {xid}: {BROKEN[xid]}" for xid in sorted(broken))
    for reason in unread & earlier.keys():
        reasons.setdefault(reason, earlier[reason].detail)
    return tuple(
        Illness(reason, reasons[reason], earlier[reason].since if reason in earlier else now)
        for reason in GpuReason
        if reason in reasons
    )


def meaning(xid: int) -> str:
    """Describe an XID, or say where to look it up."""
    return BROKEN.get(xid) or OF_PROGRAMS.get(xid) or "see NVIDIA's catalogue of XID errors"
