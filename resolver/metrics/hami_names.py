"""The same values under the names, labels and units of HAMi's monitor, for existing dashboards.

Names with ``hami_`` are HAMi 2.10's and KAI's; later releases call the others legacy. Kinds of memory and the last
kernel are HAMi-core's counts, of known owners of slots. Unknown values are left out.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

from resolver.metrics.family import Family
from resolver.metrics.utilization import Unknown, devices
from resolver.state import Counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.metrics_core import Metric

    from resolver.metrics.utilization import Names, Usage
    from resolver.state import Snapshot

_ZONE = "vGPU"  # upstream's zone label
GPU_LABELS = ("node", "device_index", "device_uuid", "device_type", "zone")
OLD_GPU_LABELS = ("nodeid", "deviceidx", "deviceuuid", "devicetype", "zone")
CONTAINER_LABELS = ("namespace", "pod", "container", "vdevice_index", "device_uuid", "zone")
OLD_CONTAINER_LABELS = ("podnamespace", "podname", "ctrname", "vdeviceid", "deviceuuid", "zone")
_MIG_IDS = ("mig_uuid", "profile", "gpu_instance_id", "compute_instance_id")
_MIG_LABELS = (*CONTAINER_LABELS[:-1], *_MIG_IDS, "zone")
_OLD_KINDS = (*OLD_CONTAINER_LABELS[:-1], "context", "module", "data", "offset", "zone")


def _gauges(meaning: str, *names: str) -> tuple[Family, ...]:
    """Declare both generations of one value, the later one first."""
    return tuple(Family(name, "gauge", _labels(name), meaning) for name in names)


def _labels(name: str) -> tuple[str, ...]:
    if name == "hami_host_gpu_memory_controller_utilization_ratio":
        return GPU_LABELS[1:]  # the one that HAMi gives no node
    if name == "hami_mig_device_info":
        return _MIG_LABELS
    if name.startswith(("hami_host_", "Host")):
        return GPU_LABELS if name.startswith("hami_") else OLD_GPU_LABELS
    if name == "Device_memory_desc_of_container":
        return _OLD_KINDS
    return CONTAINER_LABELS if name.startswith("hami_") else OLD_CONTAINER_LABELS


#: By attribute of a GPU's record.
OF_GPUS = {
    "memory_used": _gauges(
        "Memory of a GPU that is in use, in bytes.", "hami_host_gpu_memory_used_bytes", "HostGPUMemoryUsage"
    ),
    "utilization": _gauges(
        "Share of the time that a GPU was busy, in per cent.",
        *("hami_host_gpu_utilization_ratio", "HostCoreUtilization"),
    ),
    "memory_utilization": _gauges(
        "Share of the time that a GPU's memory controller was busy, in per cent.",
        "hami_host_gpu_memory_controller_utilization_ratio",
    ),
    "temperature": _gauges("A GPU's temperature.", "hami_host_gpu_temperature_celsius"),
    "power": _gauges("Power draw of a GPU.", "hami_host_gpu_power_usage_watts"),
}
OF_CONTAINERS = {
    "memory": _gauges(
        "GPU memory that a container's processes hold, in bytes.",
        *("hami_vgpu_memory_used_bytes", "hami_container_device_memory_bytes"),
        "vGPU_device_memory_usage_in_bytes",
    ),
    "limit": _gauges(
        "GPU memory that a container may hold, in bytes.",
        *("hami_vgpu_memory_limit_bytes", "vGPU_device_memory_limit_in_bytes"),
    ),
    "context": _gauges(
        "GPU memory of a container's CUDA contexts, as HAMi-core counts it.", "hami_vgpu_memory_context_bytes"
    ),
    "module": _gauges(
        "GPU memory of a container's loaded modules, as HAMi-core counts it.", "hami_vgpu_memory_module_bytes"
    ),
    "buffer": _gauges(
        "GPU memory that a container allocated, as HAMi-core counts it.", "hami_vgpu_memory_buffer_bytes"
    ),
    "kinds": _gauges(
        "GPU memory of a container as HAMi-core counts it, its kinds as labels.",
        "Device_memory_desc_of_container",
    ),
    "utilization": _gauges(
        "SM utilization of a container on a GPU, in per cent: NVML's, the sum over its living processes.",
        *("hami_container_device_utilization_ratio", "Device_utilization_desc_of_container"),
    ),
    "mig": _gauges("1 for a MIG instance of a container.", "hami_mig_device_info"),
    "last_kernel": _gauges(
        "Time since HAMi-core last saw a kernel of the container.",
        *("hami_container_last_kernel_elapsed_seconds", "Device_last_kernel_of_container"),
    ),
}
FAMILIES = tuple(family for each in (OF_GPUS, OF_CONTAINERS) for its in each.values() for family in its)


def collect(snapshot: Snapshot, used: Iterable[Usage], *, known: bool) -> Iterator[Metric]:
    """Yield the families; ``known``: NVML answers. Containers without a pod's name have no series."""
    node = os.environ.get("NODE_NAME", "")
    gpus = [
        ((node, str(gpu.device_index), gpu.uuid, f"NVIDIA-{gpu.name}", _ZONE), gpu)
        for gpu in (snapshot.inventory.gpus if known else ())
    ]
    for attribute, families in OF_GPUS.items():
        for family in families:
            values = ((labels[-len(family.labels) :], getattr(gpu, attribute)) for labels, gpu in gpus)
            yield family.metric(values)
    # A pod and the one of the same name before it may both be there for a moment: the labels hold one of them.
    rows: dict[str, dict[tuple[str, ...], float]] = {value: {} for value in OF_CONTAINERS}
    instances = {part.uuid: part for gpu in snapshot.inventory.gpus for part in gpu.mig_instances}
    gpus_of_node = devices(snapshot)  # a file may name others, and its word is no label
    for usage in _placed(used):
        names = usage.names
        if names.pod and names.container and usage.device.uuid in gpus_of_node:
            labels = (*names[:3], str(usage.position), usage.device.uuid, _ZONE)
            if (part := instances.get(usage.device.uuid)) is not None:
                ids = part.uuid, part.profile, str(part.gpu_instance), str(part.compute_instance)
                rows["mig"][(*labels[:-1], *ids, _ZONE)] = 1
            for value, more, number in _values(usage, snapshot.at):
                if number is not None:
                    rows[value][(*labels[:-1], *more, _ZONE)] = number
    for value, families in OF_CONTAINERS.items():
        for family in families:
            yield family.metric(rows[value].items())


def _values(usage: Usage, now: float) -> Iterator[tuple[str, tuple[str, ...], float | None]]:
    """Yield name, further labels and value of one container on one GPU."""
    yield "memory", (), None if isinstance(usage.memory, Unknown) else usage.memory
    yield "limit", (), usage.limit
    util = usage.utilization
    yield "utilization", (), None if isinstance(util, Unknown) else round(100 * util)
    if 0 < usage.last_kernel <= now:
        yield "last_kernel", (), int(now) - usage.last_kernel
    if isinstance(usage.counted, Counted):
        context, module, data, total = usage.counted
        yield from (("context", (), context), ("module", (), module), ("buffer", (), data))
        kinds = (context, module, data, max(0, total - context - module - data))
        yield "kinds", tuple(map(str, kinds)), total


def _placed(used: Iterable[Usage]) -> Iterator[Usage]:
    """Number the GPUs of a container without a cache file, which has whole ones."""
    listed = list(used)
    with_file = {usage.names for usage in listed if usage.position is not None}
    places: Counter[Names] = Counter()
    for usage in sorted(listed, key=lambda each: each.device.index.zfill(4)):
        if usage.position is not None:
            yield usage
        elif usage.names not in with_file:
            yield usage._replace(position=places[usage.names])
            places[usage.names] += 1
