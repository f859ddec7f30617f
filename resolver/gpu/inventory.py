"""The node's GPUs: identity and health. None: the driver doesn't report the value."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import force_setattr

from resolver.base.reasons import SampleReason


class MigInstance(Struct, frozen=True):
    """One MIG instance of a GPU; memory in bytes. ``profile`` is NVIDIA's name of its size (``1g.5gb``)."""

    uuid: str
    gpu_instance: int
    compute_instance: int
    memory_total: int | None
    memory_used: int | None
    profile: str = ""


class Illness(Struct, frozen=True):
    """Why a GPU is unhealthy, and since when (Unix time)."""

    reason: str
    detail: str
    since: float


class Xid(Struct, frozen=True):
    """An XID error that the driver reported of a GPU since the daemon started, and how often."""

    xid: int
    count: int
    meaning: str


class Gpu(Struct, frozen=True):
    """One GPU. Memory in bytes, utilization in per cent, temperature in degrees Celsius, power in watts.

    ``uuid`` is empty until it was read. ``samples`` is the availability of per-process utilization: ``ok``,
    ``unsupported`` (as in MIG mode) or ``failed``, with ``samples_why``. ``pci_address`` is the kernel's name
    (``0000:3b:00.0``), ``pcie_root`` the PCI root complex. ``nvlinks`` are the active NVLinks by the PCI address at
    their other end, a GPU's or a switch's. ``xids`` are the XID errors since the daemon started.
    ``memory_utilization`` is the memory controller's. It is ``healthy`` while ``illnesses`` is empty.
    ``legacy_call_refused``: only HAMi-core 2.10 and later can read its samples.
    ``virtualization`` is ``none``, ``passthrough``, ``vgpu`` (in a guest), ``host_vgpu`` or ``host_vsga``.
    """

    uuid: str
    device_index: int
    minor: int | None = None
    name: str = ""
    memory_total: int | None = None
    memory_used: int | None = None
    utilization: int | None = None
    temperature: int | None = None
    power: float | None = None
    mig: bool | None = None
    mig_instances: tuple[MigInstance, ...] = ()
    ecc_uncorrected: int | None = None
    samples: str = ""
    samples_why: str | None = None
    illnesses: tuple[Illness, ...] = ()
    pci_address: str | None = None
    numa_node: int | None = None
    pcie_root: str | None = None
    cpu_socket: int | None = None
    xids: tuple[Xid, ...] = ()
    nvlinks: dict[str, int] | None = None
    memory_utilization: int | None = None
    legacy_call_refused: bool = False
    virtualization: str | None = None
    healthy: bool = True

    def __post_init__(self) -> None:
        force_setattr(self, "healthy", not self.illnesses)


class Sample(Struct, frozen=True):
    """A utilization sample without a slot; ``host_pid`` as NVML gave it, ``sm_util`` in per cent.

    ``container`` is the container's id, or ``<podUID>_<containerName>`` of a slot's ended owner.
    """

    host_pid: int
    device_uuid: str
    sm_util: int
    reason: SampleReason
    container: str | None


class DeviceAnswer(Struct, frozen=True):
    """The NVML worker's answer about a device, with reasons of ``failed`` values; with an ``error`` none was read."""

    gpu: Gpu
    failed: dict[str, str] = {}
    error: str = ""
    text: str = ""


class Inventory(NamedTuple):
    """All GPUs in index order, read at ``at``. ``version`` grows with each change."""

    version: int
    at: float
    driver_version: str | None
    gpus: tuple[Gpu, ...]

    def memory(self) -> dict[str, int | None]:
        """Return the bytes of memory of each GPU and MIG instance."""
        sizes = {part.uuid: part.memory_total for gpu in self.gpus for part in gpu.mig_instances}
        return sizes | {gpu.uuid: gpu.memory_total for gpu in self.gpus}

    def in_vgpu_guest(self) -> bool | None:
        """Return whether the GPUs are virtual; None if only some are."""
        kinds = {gpu.virtualization == "vgpu" for gpu in self.gpus if gpu.virtualization is not None}
        return None if len(kinds) > 1 else True in kinds


NONE = Inventory(version=0, at=0.0, driver_version=None, gpus=())


def changes(old: Inventory, new: Inventory) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events between two inventories, as in `resolver.base.event_log`.

    A lost GPU that the driver still counts is unhealthy; otherwise it is gone.
    """
    if old.version == new.version:
        return
    before, now = ({gpu.uuid or gpu.device_index: gpu for gpu in inventory.gpus} for inventory in (old, new))
    places = {gpu.device_index for gpu in new.gpus}
    for key, gpu in before.items():
        # A GPU that has its UUID only now is not gone.
        if key not in now and (gpu.uuid or gpu.device_index not in places):
            yield "gpu_gone", _about(gpu) | {"was": _reasons(gpu) or "healthy"}
    for key, gpu in now.items():
        previous = before.get(key)
        if previous is None:
            yield "gpu_found", _about(gpu) | {"name": gpu.name}
        seen = {xid.xid for xid in previous.xids} if previous else set()
        for xid in gpu.xids:
            if xid.xid not in seen:  # how often it came since is counted
                yield "gpu_xid", _about(gpu) | {"xid": xid.xid, "meaning": xid.meaning}
        had = {illness.reason for illness in previous.illnesses} if previous else set()
        for illness in gpu.illnesses:
            if illness.reason not in had:
                yield "gpu_unhealthy", _about(gpu) | {"reason": illness.reason, "detail": illness.detail}
        if previous and previous.illnesses and not gpu.illnesses:
            yield "gpu_healthy", _about(gpu) | {"was": _reasons(previous)}


def new_xids(old: Inventory, new: Inventory) -> dict[str, int]:
    """Return how many XID errors each GPU had between two inventories, by UUID."""
    before = {gpu.uuid: sum(xid.count for xid in gpu.xids) for gpu in old.gpus}
    counts = {gpu.uuid: sum(xid.count for xid in gpu.xids) - before.get(gpu.uuid, 0) for gpu in new.gpus}
    return {uuid: count for uuid, count in counts.items() if count > 0}


def _about(gpu: Gpu) -> dict[str, Any]:
    return {"device": gpu.uuid, "device_index": gpu.device_index}


def _reasons(gpu: Gpu) -> str:
    return ", ".join(illness.reason for illness in gpu.illnesses)
