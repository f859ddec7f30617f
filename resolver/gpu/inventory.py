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


class GpuReport(Struct, frozen=True):
    """One GPU. Memory in bytes, utilization in per cent, temperature in degrees Celsius, power in watts.

    ``uuid`` is empty for a GPU whose UUID was never read. ``memory_used`` includes what the driver
    keeps for itself. ``samples`` is ``ok``, ``unsupported`` (MIG mode, for one) or ``failed``: whether NVML has the
    utilization of processes, with ``samples_why``. It is healthy while ``illnesses`` is empty.

    ``pci_address`` is the kernel's name of it (``0000:3b:00.0``), ``pcie_root`` the root complex that it hangs on
    (``pci0000:3a``).
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


class Inventory(NamedTuple):
    """All GPUs in index order. ``version`` grows with each change of anything in it; ``at`` is when it was read."""

    version: int
    at: float
    driver_version: str | None
    gpus: tuple[GpuReport, ...]


NONE = Inventory(0, 0.0, None, ())


def changes(old: Inventory, new: Inventory) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is worth telling of the step from one inventory to the next: events, as in `resolver.events`.

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
