"""Keeps the inventory of GPUs over failures of the NVML worker."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from resolver.gpu.health import BROKEN, SILENT, judge, meaning
from resolver.gpu.inventory import NONE, Gpu, GpuDetails, Inventory, MigInstance, Xid, throttle_reasons

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

#: Unknown of a GPU that is silent now.
_MEASURED = (
    "memory_used",
    "utilization",
    "memory_utilization",
    "temperature",
    "power",
    "ecc_uncorrected",
    "details",
)
#: Taken over from the worker's answer.
_AS_READ = (
    *("minor", "temperature", "power", "mig"),
    *("pci_address", "numa_node", "pcie_root", "cpu_socket", "nvlinks"),
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

    def take(self, answer: dict[str, Any], now: float) -> bool:
        """Take the worker's answer to ``devices``. False if a device did not answer in full."""
        devices = answer["devices"]
        old, version = self.inventory, str(answer["driver_version"])
        if version != old.driver_version:  # at once: `hostpid` depends on it, even if no samples can be read
            self.inventory = old._replace(version=old.version + 1, driver_version=version)
        self._read_at = now
        known = {gpu.uuid or gpu.device_index: gpu for gpu in self._read}
        read = []
        for device, uuid in zip(devices, self._identify(devices), strict=True):
            before = known.get(uuid or device["index"])
            silent = before is not None and any(each.reason in SILENT for each in before.illnesses)
            if silent and "error" not in device:
                self._broken.pop(uuid, None)  # it answers again: it was reset
            read.append(_report(device, uuid, before, now, self._broken.get(uuid, ())))
        self._read = tuple(read)
        for gone in self._xids.keys() - {gpu.uuid for gpu in self._read}:
            del self._xids[gone]
            self._broken.pop(gone, None)
        pairs = zip(devices, self._read, strict=True)
        self.answering = tuple(gpu for device, gpu in pairs if "error" not in device)
        return all("error" not in device and "memory" not in device["failed"] for device in devices)

    def publish(self, samples: Mapping[str, tuple[str, str]]) -> Inventory:
        """Return the inventory with each device's sample status; a new version if anything changed."""
        gpus = tuple(_with_news(gpu, samples.get(gpu.uuid), self._xids.get(gpu.uuid)) for gpu in self._read)
        old = self.inventory
        self.inventory = Inventory(old.version + (gpus != old.gpus), self._read_at, old.driver_version, gpus)
        return self.inventory

    def _identify(self, devices: Sequence[dict[str, Any]]) -> list[str]:
        """Return the UUID of each device; empty if unknown.

        A silent device keeps its index's UUID while the others keep theirs: indexes follow the bus.
        """
        places = {gpu.uuid: gpu.device_index for gpu in self._read if gpu.uuid}
        read = {device["uuid"]: device["index"] for device in devices if device["uuid"]}
        both = places.keys() & read.keys()
        in_place = all(places[uuid] == read[uuid] for uuid in both)
        if not in_place or not (both or len(devices) == len(self._read)):
            return [device["uuid"] for device in devices]
        missing = {index: uuid for uuid, index in places.items() if uuid not in read}
        return [device["uuid"] or missing.get(device["index"], "") for device in devices]


def _report(
    device: dict[str, Any], uuid: str, before: Gpu | None, now: float, broken: Collection[int]
) -> Gpu:
    """Describe a device. Only the constant facts of a silent one are kept."""
    illnesses = judge(device, before.illnesses if before else (), now, broken)
    if "error" in device:
        before = before or Gpu(uuid, device["index"])
        return replace(
            before,
            uuid=uuid,
            device_index=device["index"],
            **dict.fromkeys(_MEASURED),
            mig_instances=tuple(replace(each, memory_used=None) for each in before.mig_instances),
            illnesses=illnesses,
        )
    total, used = device["memory"] or (None, None)
    utilization, memory_utilization = device["rates"] or (None, None)
    return Gpu(
        uuid=uuid,
        device_index=device["index"],
        name=device["name"] or "",
        memory_total=total,
        memory_used=used,
        utilization=utilization,
        memory_utilization=memory_utilization,
        mig_instances=tuple(MigInstance(*each) for each in device.get("mig_instances") or ()),
        ecc_uncorrected=device["ecc"],
        illnesses=illnesses,
        details=_details(device),
        virtualization=device.get("virtualization"),
        **{name: device[name] for name in _AS_READ},
    )


def _with_news(gpu: Gpu, samples: tuple[str, str] | None, xids: Mapping[int, int] | None) -> Gpu:
    ill = gpu.illnesses[0].detail if gpu.illnesses else "it was not asked"
    status, why = samples or ("failed", ill)
    counted = tuple(Xid(xid, count, meaning(xid)) for xid, count in sorted(xids.items())) if xids else ()
    refused = status == "ok" and bool(why)
    return replace(gpu, samples=status, samples_why=why or None, legacy_call_refused=refused, xids=counted)


def _details(device: dict[str, Any]) -> GpuDetails | None:
    read = device.get("details")
    if read is None:
        return None
    bits = read["throttle"]
    return GpuDetails(
        throttle_reasons=None if bits is None else throttle_reasons(bits),
        **{name: value for name, value in read.items() if name != "throttle"},
    )
