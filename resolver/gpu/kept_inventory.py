"""Keeps the inventory of GPUs over failures of the NVML worker."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from msgspec.structs import replace

from resolver.gpu.health import BROKEN, SILENT, judge, meaning
from resolver.gpu.inventory import NONE, Inventory, Xid

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from resolver.gpu.inventory import DeviceAnswer, Gpu

#: Unknown of a GPU that is silent now.
_MEASURED = (
    *("memory_used", "utilization", "memory_utilization", "temperature", "power"),
    *("ecc_uncorrected", "details"),
)


class InventoryKeeper:
    """The inventory, and which of its GPUs answer."""

    def __init__(self) -> None:
        self.inventory: Inventory = NONE
        self.answering: tuple[Gpu, ...] = ()  # GPUs with a known UUID
        self._read: tuple[Gpu, ...] = ()  # as last read, without their samples
        self._read_at = 0.0
        self._xids: dict[str, Counter[int]] = {}  # by UUID, since the daemon started
        self._broken: dict[str, set[int]] = {}  # those after which it needs a reset, as long as it had none

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
    """Describe a device. Only the constant facts of a silent one are kept."""
    gpu, illnesses = device.gpu, judge(device, before.illnesses if before else (), now, broken)
    if device.error and before:
        instances = tuple(replace(instance, memory_used=None) for instance in before.mig_instances)
        place = gpu.device_index
        gpu = replace(before, **dict.fromkeys(_MEASURED), mig_instances=instances, device_index=place)
    return replace(gpu, uuid=uuid, illnesses=illnesses)


def _with_news(gpu: Gpu, samples: tuple[str, str] | None, xids: Mapping[int, int] | None) -> Gpu:
    status, why = samples or ("failed", gpu.illnesses[0].detail if gpu.illnesses else "it was not asked")
    counted = tuple(Xid(xid, count, meaning(xid)) for xid, count in sorted(xids.items())) if xids else ()
    refused = status == "ok" and bool(why)
    return replace(gpu, samples=status, samples_why=why or None, legacy_call_refused=refused, xids=counted)
