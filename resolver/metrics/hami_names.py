"""The same values under the names and labels of HAMi's own monitor, for dashboards that exist.

Two generations of names: those with ``hami_`` (as HAMi 2.10 has them, and KAI's monitor) and those before it, which
later releases give with ``--legacy-metrics``. Upstream's units: utilization is in per cent, also where the name says
ratio. What upstream exports and is not known here is left out. The kinds of memory and the time of the last kernel are
what HAMi-core says in the container's file, of processes that are known to own its slots.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from resolver.metrics.families import Family
from resolver.metrics.utilization import Unknown, devices

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.metrics_core import Metric

    from resolver.metrics.utilization import Usage
    from resolver.state import Snapshot

_ZONE = "vGPU"  # what upstream registers all of its own under
GPU_LABELS = ("node", "device_index", "device_uuid", "device_type", "zone")
OLD_GPU_LABELS = ("nodeid", "deviceidx", "deviceuuid", "devicetype", "zone")
CONTAINER_LABELS = ("namespace", "pod", "container", "vdevice_index", "device_uuid", "zone")
OLD_CONTAINER_LABELS = ("podnamespace", "podname", "ctrname", "vdeviceid", "deviceuuid", "zone")
_OLD_KINDS = (*OLD_CONTAINER_LABELS[:-1], "context", "module", "data", "offset", "zone")


def _gauge(name: str, labels: tuple[str, ...], meaning: str) -> Family:
    return Family(name=name, kind="gauge", labels=labels, help=meaning)


_HOST_MEMORY = "Memory of a GPU that is in use, in bytes."
_HOST_UTILIZATION = "How much of the time a GPU was busy, in per cent."
_USED = "GPU memory that a container's processes hold, in bytes."
_LIMIT = "GPU memory that a container may hold, in bytes."
_UTILIZATION = "SM utilization of a container on a GPU, in per cent."
_LAST_KERNEL = "Time since HAMi-core last saw a kernel of the container."

#: Both generations of each, the later one first.
HOST_MEMORY = (
    _gauge("hami_host_gpu_memory_used_bytes", GPU_LABELS, _HOST_MEMORY),
    _gauge("HostGPUMemoryUsage", OLD_GPU_LABELS, _HOST_MEMORY),
)
HOST_UTILIZATION = (
    _gauge("hami_host_gpu_utilization_ratio", GPU_LABELS, _HOST_UTILIZATION),
    _gauge("HostCoreUtilization", OLD_GPU_LABELS, _HOST_UTILIZATION),
)
HOST_TEMPERATURE = (_gauge("hami_host_gpu_temperature_celsius", GPU_LABELS, "A GPU's temperature."),)
HOST_POWER = (_gauge("hami_host_gpu_power_usage_watts", GPU_LABELS, "What a GPU draws."),)
MEMORY = (
    _gauge("hami_vgpu_memory_used_bytes", CONTAINER_LABELS, _USED),
    _gauge("hami_container_device_memory_bytes", CONTAINER_LABELS, _USED),
    _gauge("vGPU_device_memory_usage_in_bytes", OLD_CONTAINER_LABELS, _USED),
)
LIMIT = (
    _gauge("hami_vgpu_memory_limit_bytes", CONTAINER_LABELS, _LIMIT),
    _gauge("vGPU_device_memory_limit_in_bytes", OLD_CONTAINER_LABELS, _LIMIT),
)
CONTEXT = (
    _gauge(
        "hami_vgpu_memory_context_bytes",
        CONTAINER_LABELS,
        "GPU memory of a container's CUDA contexts, as HAMi-core counts it.",
    ),
)
MODULE = (
    _gauge(
        "hami_vgpu_memory_module_bytes",
        CONTAINER_LABELS,
        "GPU memory of a container's loaded modules, as HAMi-core counts it.",
    ),
)
BUFFER = (
    _gauge(
        "hami_vgpu_memory_buffer_bytes",
        CONTAINER_LABELS,
        "GPU memory that a container allocated, as HAMi-core counts it.",
    ),
)
KINDS = (
    _gauge(
        "Device_memory_desc_of_container",
        _OLD_KINDS,
        "GPU memory of a container as HAMi-core counts it, its kinds as labels.",
    ),
)
UTILIZATION = (
    _gauge("hami_container_device_utilization_ratio", CONTAINER_LABELS, _UTILIZATION),
    _gauge("Device_utilization_desc_of_container", OLD_CONTAINER_LABELS, _UTILIZATION),
)
LAST_KERNEL = (
    _gauge("hami_container_last_kernel_elapsed_seconds", CONTAINER_LABELS, _LAST_KERNEL),
    _gauge("Device_last_kernel_of_container", OLD_CONTAINER_LABELS, _LAST_KERNEL),
)
_OF_HOSTS = (*HOST_MEMORY, *HOST_UTILIZATION, *HOST_TEMPERATURE, *HOST_POWER)
_OF_CONTAINERS = (*MEMORY, *LIMIT, *CONTEXT, *MODULE, *BUFFER, *KINDS, *UTILIZATION, *LAST_KERNEL)
FAMILIES = (*_OF_HOSTS, *_OF_CONTAINERS)

_Rows = list[tuple[tuple[str, ...], float | None]]


def collect(snapshot: Snapshot, used: Iterable[Usage], *, known: bool) -> Iterator[Metric]:
    """``known``: NVML answers. HAMi's labels know a container by its pod's name only: without one there is none."""
    node = os.environ.get("NODE_NAME", "")
    gpus = [
        ((node, str(gpu.device_index), gpu.uuid, f"NVIDIA-{gpu.name}", _ZONE), gpu)
        for gpu in (snapshot.inventory.gpus if known else ())
    ]
    yield from _each(HOST_MEMORY, ((labels, gpu.memory_used) for labels, gpu in gpus))
    yield from _each(HOST_UTILIZATION, ((labels, gpu.utilization) for labels, gpu in gpus))
    yield from _each(HOST_TEMPERATURE, ((labels, gpu.temperature) for labels, gpu in gpus))
    yield from _each(HOST_POWER, ((labels, gpu.power) for labels, gpu in gpus))
    rows: dict[tuple[Family, ...], _Rows] = {
        families: [] for families in (MEMORY, LIMIT, CONTEXT, MODULE, BUFFER, KINDS, UTILIZATION, LAST_KERNEL)
    }
    gpus_of_node = devices(snapshot)  # a file may name others, and its word is no label
    for usage in used:
        names = usage.names
        if (
            usage.position is None
            or not (names.pod and names.container)
            or usage.device.uuid not in gpus_of_node
        ):
            continue
        labels = (*names[:3], str(usage.position), usage.device.uuid, _ZONE)
        rows[MEMORY].append((labels, None if isinstance(usage.memory, Unknown) else usage.memory))
        rows[LIMIT].append((labels, usage.limit))
        percent = None if isinstance(usage.utilization, Unknown) else round(100 * usage.utilization)
        rows[UTILIZATION].append((labels, percent))
        if 0 < usage.last_kernel <= snapshot.at:
            rows[LAST_KERNEL].append((labels, int(snapshot.at) - usage.last_kernel))
        if usage.counted is not None:
            context, module, data, total = usage.counted
            rows[CONTEXT].append((labels, context))
            rows[MODULE].append((labels, module))
            rows[BUFFER].append((labels, data))
            kinds = (*map(str, (context, module, data, max(0, total - context - module - data))),)
            rows[KINDS].append(((*labels[:-1], *kinds, _ZONE), total))
    for families, values in rows.items():
        yield from _each(families, values)


def _each(
    families: tuple[Family, ...], rows: Iterable[tuple[tuple[str, ...], float | None]]
) -> Iterator[Metric]:
    # A pod and the one of the same name before it may both be there for a moment: the labels hold one of them.
    values = {labels: value for labels, value in rows if value is not None}
    for family in families:
        yield family.metric(values.items())
