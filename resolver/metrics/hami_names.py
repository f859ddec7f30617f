"""The same values under the names, labels and units of HAMi's monitor, for existing dashboards.

Names with ``hami_`` are HAMi 2.10's and KAI's; later releases call the others legacy. Kinds of memory and the last
kernel are HAMi-core's counts, of known owners of slots. Unknown values are left out.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import Metric

from resolver.metrics.family import FAMILIES, metric, values
from resolver.metrics.utilization import Names, Unknown, Usage, devices
from resolver.state import Counted, Snapshot

_ZONE = "vGPU"  # upstream's zone label


def collect(snapshot: Snapshot, used: Iterable[Usage], *, known: bool) -> Iterator[Metric]:
    """Yield the families; ``known``: NVML answers. Containers without a pod's name have no series."""
    node = os.environ.get("NODE_NAME", "")
    gpus = [
        ((node, str(gpu.device_index), gpu.uuid, f"NVIDIA-{gpu.name}", _ZONE), gpu)
        for gpu in (snapshot.inventory.gpus if known else ())
    ]
    yield from values("hami_gpu", gpus)
    # A pod and the one of the same name before it may both be there for a moment: the labels hold one of them.
    rows: defaultdict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
    instances = {part.uuid: part for gpu in snapshot.inventory.gpus for part in gpu.mig_instances}
    gpus_of_node = devices(snapshot)  # a file may name others, and its text is no label
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
    for family in FAMILIES.values():
        if family.record == "hami":
            yield metric(family.name, rows[family.attribute].items())


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
    """Give numbers to the GPUs of a container without a cache file, which has whole ones."""
    listed = list(used)
    with_file = {usage.names for usage in listed if usage.position is not None}
    places: Counter[Names] = Counter()
    for usage in sorted(listed, key=lambda usage: usage.device.index.zfill(4)):
        if usage.position is not None:
            yield usage
        elif usage.names not in with_file:
            yield usage._replace(position=places[usage.names])
            places[usage.names] += 1
