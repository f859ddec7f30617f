"""The node's GPUs: what they are and whether they are well. None is "the driver does not say"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterator


class MigInstance(Struct, frozen=True):
    """One MIG instance of a GPU; memory in bytes."""

    uuid: str
    gpu_instance: int
    compute_instance: int
    memory_total: int | None
    memory_used: int | None


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


class GpuDetails(Struct, frozen=True):
    """What is read with the setting ``gpu_details`` only. Null is "the driver does not say".

    Clocks in MHz, power in watts, energy in joules since the driver was loaded, utilization of the video engines in per
    cent. ``throttle_reasons`` is why clocks are lower than they could be; empty while they are not. ``ecc_corrected``
    counts since the driver was loaded, ``pcie_replays`` since the GPU was reset.
    """

    sm_clock: int | None
    memory_clock: int | None
    throttle_reasons: tuple[str, ...] | None
    power_limit: float | None
    energy: float | None
    pcie_generation: int | None
    pcie_width: int | None
    pcie_replays: int | None
    ecc_corrected: int | None
    encoder: int | None
    decoder: int | None


#: NVML's bits of why clocks are lower than they could be. What has no name yet is ``other``.
THROTTLE_REASONS = (
    "idle",
    "application_clocks",
    "power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal",
    "hw_thermal",
    "power_brake",
    "display_clocks",
)
OTHER = "other"


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """The names of these bits."""
    names = [name for number, name in enumerate(THROTTLE_REASONS) if bits >> number & 1]
    return (*names, *([OTHER] if bits >> len(THROTTLE_REASONS) else []))


class GpuReport(Struct, frozen=True):
    """One GPU. Memory in bytes, utilization in per cent, temperature in degrees Celsius, power in watts.

    ``uuid`` is empty for a GPU whose UUID was never read. ``memory_used`` includes what the driver
    keeps for itself. ``samples`` is ``ok``, ``unsupported`` (MIG mode, for one) or ``failed``: whether NVML has the
    utilization of processes, with ``samples_why``. It is healthy while ``illnesses`` is empty.

    ``pci_address`` is the kernel's name of it (``0000:3b:00.0``), ``pcie_root`` the root complex that it hangs on
    (``pci0000:3a``). ``xids`` are the XID errors since the daemon started, ``details`` what the setting ``gpu_details``
    adds.
    """

    uuid: str
    device_index: int
    minor: int | None
    name: str
    memory_total: int | None
    memory_used: int | None
    utilization: int | None
    temperature: int | None
    power: float | None
    mig: bool | None
    mig_instances: tuple[MigInstance, ...]
    ecc_uncorrected: int | None
    samples: str
    samples_why: str | None
    illnesses: tuple[Illness, ...]
    pci_address: str | None = None
    numa_node: int | None = None
    pcie_root: str | None = None
    cpu_socket: int | None = None
    xids: tuple[Xid, ...] = ()
    details: GpuDetails | None = None


class Inventory(NamedTuple):
    """All GPUs in index order. ``version`` grows with each change of anything in it; ``at`` is when it was read."""

    version: int
    at: float
    driver_version: str | None
    gpus: tuple[GpuReport, ...]


NONE = Inventory(version=0, at=0.0, driver_version=None, gpus=())


def changes(old: Inventory, new: Inventory) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is worth telling of the step from one inventory to the next: events, as in `resolver.log.event_names`.

    A GPU that is lost and still counted by the driver is unhealthy; one that is not counted any more is gone.
    """
    if old.version == new.version:
        return
    before, now = ({_key(gpu): gpu for gpu in inventory.gpus} for inventory in (old, new))
    places = {gpu.device_index for gpu in new.gpus}
    for key, gpu in before.items():
        # One that had no name and has one now did not go.
        if key not in now and (gpu.uuid or gpu.device_index not in places):
            yield "gpu_gone", _about(gpu) | {"was": _reasons(gpu) or "healthy"}
    for key, gpu in now.items():
        known = before.get(key)
        if known is None:
            yield "gpu_found", _about(gpu) | {"name": gpu.name}
        seen = {each.xid for each in known.xids} if known else set()
        for each in gpu.xids:
            if each.xid not in seen:  # how often it came since is counted
                yield "gpu_xid", _about(gpu) | {"xid": each.xid, "meaning": each.meaning}
        had = {illness.reason for illness in known.illnesses} if known else set()
        for illness in gpu.illnesses:
            if illness.reason not in had:
                yield "gpu_unhealthy", _about(gpu) | {"reason": illness.reason, "detail": illness.detail}
        if known and known.illnesses and not gpu.illnesses:
            yield "gpu_healthy", _about(gpu) | {"was": _reasons(known)}


def _key(gpu: GpuReport) -> str | int:
    return gpu.uuid or gpu.device_index


def _about(gpu: GpuReport) -> dict[str, Any]:
    return {"device": gpu.uuid, "device_index": gpu.device_index}


def _reasons(gpu: GpuReport) -> str:
    return ", ".join(illness.reason for illness in gpu.illnesses)
