"""One container in the daemon's documents, and what HAMi's monitors report of it, by release."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from resolver.hami.layout import DROPPED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from resolver.cli.documents import Documents

Json = dict[str, Any]


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
        """Format one GPU's sums; those by other rules only where they differ."""
        monitors = [("HAMi's monitor", self.monitor)]
        if self.monitor_2_9 != self.monitor:
            monitors = [("the monitor of HAMi 2.10", self.monitor), ("of 2.7 to 2.9", self.monitor_2_9)]
        if self.monitor_2_6 != self.monitor_2_9:
            monitors = [*monitors, ("up to 2.6", self.monitor_2_6)]
        shown = (f"{name} {percent(value)}" for name, value in (*monitors, ("NVML", self.nvml)))
        return f"{self.gpu}: {', '.join(shown)}"


class ContainerView:
    """Facts about one container."""

    def __init__(self, known: Documents, container: Json) -> None:
        self.known, self.container = known, container
        self.slots = [each for each in known.slots if self._mine(each)]
        # The file of a claim may be several containers', and then has no container's name.
        paths = {slot["path"] for slot in self.slots} | set(container.get("regions", ()))
        self.regions = [each for each in known.regions if each["path"] in paths or self._mine(each)]
        self.processes = [each for each in known.processes if self._mine(each)]
        self.gpus = {gpu["uuid"]: gpu for gpu in known.gpus}
        self.namespace: str = known.status["policy"]["namespace"]
        #: HAMi 2.8.1 wrote the file, which every monitor drops.
        self.dropped = any(region["layout"] == DROPPED for region in self.regions)

    def _mine(self, each: Json) -> bool:
        mine = self.container
        if each["container_id"] and mine["container_id"]:
            return bool(each["container_id"] == mine["container_id"])
        return bool(mine["pod_uid"]) and all(
            each[name] == mine[name] for name in ("pod_uid", "container_name")
        )

    def wanted(self, slot: Json) -> int | None:
        """Return the right ``hostpid`` of a slot, as far as it is known."""
        return {"host": slot["host_pid"], "container": slot["pid"]}.get(self.namespace)

    def gpu(self, uuid: str) -> str:
        """Return its name for people."""
        gpu = self.gpus.get(uuid)
        return f"GPU {gpu['device_index']}" if gpu else uuid[:12]

    def reported(self) -> Iterator[Reported]:
        """Yield the sums of each GPU."""
        devices = [uuid for region in self.regions for uuid in region["device_uuids"]]
        devices += [each["device_uuid"] for each in self.processes]
        for uuid in dict.fromkeys(devices):
            listed = [
                (slot["host_pid"], each)
                for slot in self.slots
                for each in slot["device_util"]
                if each["device_uuid"] == uuid
            ]
            used = {
                each["host_pid"]: each["sm_util"] for each in self.processes if each["device_uuid"] == uuid
            }
            for host_pid, each in listed:  # one that NVML does not list there is idle, or not known
                if host_pid is not None:
                    used.setdefault(host_pid, each["utilization"])
            readable = bool(self.regions) and not self.dropped
            in_use = _sum([each["sm_util"] for _, each in listed]) if readable else None
            ended, moved = (self._left_behind(uuid, name) for name in ("ended", "moved"))
            yield Reported(
                device_uuid=uuid,
                gpu=self.gpu(uuid),
                monitor=in_use,
                monitor_2_9=None if in_use is None else in_use + ended,
                monitor_2_6=None if in_use is None else in_use + ended + moved,
                nvml=_sum(used.values()),
            )

    def _left_behind(self, uuid: str, name: str) -> int:
        """Sum what slots of ended processes, or moved slots, still hold for a GPU."""
        regions = (zip(each["device_uuids"], each.get(name, ()), strict=False) for each in self.regions)
        return sum(dict(region).get(uuid, 0) for region in regions)


def _sum(values: Collection[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def percent(value: int | None) -> str:
    """Format a utilization; ``?`` is unknown."""
    return "?" if value is None else f"{value} %"
