"""One container in the daemon's documents, and the values that HAMi's monitors report, by release."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from resolver.api.shapes import Region, Slot
from resolver.cli.documents import Documents
from resolver.hami.layout import DROPPED
from resolver.state import Container, ContainerUse, Process


class Reported(NamedTuple):
    """Sums that monitors compute from the slots, and NVML's sum, in per cent; None if unknown.

    ``monitor`` follows HAMi 2.10: slots in use. ``monitor_2_9`` follows 2.7 to 2.9, KAI and the DRA driver: all below
    ``proc_num``; ``monitor_2_6`` follows Volcano and earlier releases: all 1,024.
    """

    device_uuid: str
    gpu: str
    monitor: int | None
    monitor_2_9: int | None
    monitor_2_6: int | None
    nvml: int | None

    def in_words(self) -> str:
        """Format a GPU's sums; those of older monitors only if they differ."""
        monitors = [("HAMi's monitor", self.monitor)]
        if self.monitor_2_9 != self.monitor:
            monitors = [("the monitor of HAMi 2.10", self.monitor), ("of 2.7 to 2.9", self.monitor_2_9)]
        if self.monitor_2_6 != self.monitor_2_9:
            monitors = [*monitors, ("up to 2.6", self.monitor_2_6)]
        sums = (f"{name} {percent(value)}" for name, value in (*monitors, ("NVML", self.nvml)))
        return f"{self.gpu}: {', '.join(sums)}"


class ContainerView:
    """Facts about one container."""

    def __init__(self, documents: Documents, container: Container) -> None:
        self.documents, self.container = documents, container
        self.slots = [slot for slot in documents.slots if self._is_about_it(slot)]
        # Several containers may share a claim's file, which then names none of them.
        paths = {slot.path for slot in self.slots} | set(container.regions)
        self.regions = [
            region for region in documents.regions if region.path in paths or self._is_about_it(region)
        ]
        self.processes: dict[int, list[Process]] = {}  # on GPUs, by their host PID
        for process in documents.processes:
            if self._is_about_it(process):
                self.processes.setdefault(process.host_pid, []).append(process)
        self.uses = [use for use in documents.uses if self._is_named(use)]
        self.without_slot = [record for record in documents.without_slot if self._is_named(record.process)]
        self.gpus = {gpu.uuid: gpu for gpu in documents.gpus}
        self.namespace: str = documents.status.policy.namespace
        #: True for a file of HAMi 2.8.1, which every monitor ignores.
        self.dropped = any(region.layout == DROPPED for region in self.regions)

    def _is_about_it(self, record: Slot | Region | Process) -> bool:
        """Check whether a current record is about this container: by the ids, or without one by the names."""
        mine = self.container.container_id
        if record.container_id and mine:
            return record.container_id == mine
        return bool(self.container.pod_uid) and self._is_named(record)

    def _is_named(self, record: ContainerUse | Slot | Region | Process) -> bool:
        """Compare the names, which outlive restarts of the container, or without names the ids."""
        mine = self.container
        if mine.pod_uid and mine.container_name:
            return (record.pod_uid, record.container_name) == (mine.pod_uid, mine.container_name)
        return record.container_id == mine.container_id

    def wanted(self, slot: Slot) -> int | None:
        """Return the right ``hostpid`` of a slot; None if unknown."""
        return {"host": slot.host_pid, "container": slot.pid}.get(self.namespace)

    def gpu(self, uuid: str) -> str:
        gpu = self.gpus.get(uuid)
        return f"GPU {gpu.device_index}" if gpu else uuid[:12]

    def reported(self) -> Iterator[Reported]:
        devices = [uuid for region in self.regions for uuid in region.device_uuids]
        processes = [process for on_gpu in self.processes.values() for process in on_gpu]
        devices += [process.device_uuid for process in processes]
        for uuid in dict.fromkeys(devices):
            utils = [
                (slot.host_pid, device)
                for slot in self.slots
                for device in slot.device_util
                if device.device_uuid == uuid
            ]
            used = {process.host_pid: process.sm_util for process in processes if process.device_uuid == uuid}
            for host_pid, device in utils:  # a process that NVML does not list there is idle or unknown
                if host_pid is not None:
                    used.setdefault(host_pid, device.utilization)
            readable = bool(self.regions) and not self.dropped
            in_use = _sum([device.sm_util for _, device in utils]) if readable else None
            # Values left behind by ended processes, and by moves of slots; empty if all are 0.
            ended = sum(dict(zip(r.device_uuids, r.ended, strict=False)).get(uuid, 0) for r in self.regions)
            moved = sum(dict(zip(r.device_uuids, r.moved, strict=False)).get(uuid, 0) for r in self.regions)
            yield Reported(
                device_uuid=uuid,
                gpu=self.gpu(uuid),
                monitor=in_use,
                monitor_2_9=None if in_use is None else in_use + ended,
                monitor_2_6=None if in_use is None else in_use + ended + moved,
                nvml=_sum(used.values()),
            )


def _sum(values: Collection[int | None]) -> int | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) if len(numbers) == len(values) else None


def percent(value: int | None) -> str:
    """Format a utilization; ``?`` is unknown."""
    return "?" if value is None else f"{value} %"
