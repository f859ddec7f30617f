"""The node's GPUs: what they are and whether they are well. None is "the driver does not say"."""

from __future__ import annotations

from typing import NamedTuple


class MigInstance(NamedTuple):
    """One MIG instance of a GPU; memory in bytes."""

    uuid: str
    gpu_instance: int
    compute_instance: int
    memory_total: int | None
    memory_used: int | None


class Illness(NamedTuple):
    """Why a GPU is unhealthy, and since when (Unix time)."""

    reason: str
    detail: str
    since: float


class GpuReport(NamedTuple):
    """One GPU. Memory in bytes, utilization in per cent, temperature in degrees Celsius, power in watts.

    ``samples`` is ``ok``, ``unsupported`` (MIG mode, for one) or ``failed``: whether NVML tells the utilization of
    processes, with ``samples_why``. It is healthy while ``illnesses`` is empty.
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
    samples_why: str
    illnesses: tuple[Illness, ...]


class Inventory(NamedTuple):
    """All GPUs in index order. ``version`` grows with each change of anything in it; ``at`` is when it was read."""

    version: int
    at: float
    driver_version: str | None
    gpus: tuple[GpuReport, ...]


NONE = Inventory(0, 0.0, None, ())
