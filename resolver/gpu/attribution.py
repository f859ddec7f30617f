"""Join of utilization samples with slot owners.

A value is known, 0 (the device answered without a sample of the process), or unknown (None).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container, Mapping
from typing import NamedTuple

from resolver.base.budget import Slices
from resolver.base.errors import AccessDenied, ProcessGone
from resolver.base.reasons import STARTING, SampleReason
from resolver.gpu.inventory import Sample
from resolver.gpu.sampler import OK, Collection
from resolver.linux.procfs import Procfs
from resolver.pids.pidmap import PidMap


class Used(NamedTuple):
    """Process on a device. ``host_pid`` is the process's if known, else NVML's number; None is unknown.

    ``container`` is as in `Sample`; a slot's owner has an empty one, and None as ``no_slot``. ``share`` is its part
    of the device's load since the answer before, as in `DeviceSamples.shares`.
    """

    host_pid: int
    device_uuid: str
    container: str
    sm_util: int | None
    memory: int | None
    no_slot: SampleReason | None
    share: int = 0

    def with_thread(self, other: Used) -> Used:
        """Merge NVML's entry of another thread of the process: both show the same load and memory."""
        unknown = self.sm_util is None or other.sm_util is None
        return self._replace(
            sm_util=None if unknown else max(self.sm_util or 0, other.sm_util or 0),
            memory=other.memory if self.memory is None else max(self.memory, other.memory or 0),
            share=max(self.share, other.share),
        )


class Joined(NamedTuple):
    """NVML's values per slot's owner and device, those that are not 0; None is unknown."""

    at: float
    error: str
    values: Mapping[tuple[int, str], int | None]
    asked: frozenset[str]  # UUIDs of the devices that answered
    orphans: tuple[Sample, ...]
    used: tuple[Used, ...] = ()
    listed: frozenset[str] = frozenset()  # UUIDs of the devices with a known process list
    refused: frozenset[str] = frozenset()  # UUIDs of those with samples that HAMi before 2.10 can't read
    idle: frozenset[str] = frozenset()  # UUIDs of the devices without load by their own samples
    answered: float = 0.0  # when the answer came, on the monotonic clock

    def utilization(self, host_pid: int, device_uuid: str) -> int | None:
        """Return SM utilization in per cent: 0 when idle, None when unknown."""
        return self.values.get((host_pid, device_uuid), 0) if device_uuid in self.asked else None

    def changed(self, before: Joined | None) -> set[int] | None:
        """Return host PIDs with another utilization than before; None if it may be any."""
        if before is None or self.asked != before.asked:
            return None
        return {key[0] for key, _ in self.values.items() ^ before.values.items()}

    def orphan_reasons(self) -> Counter[SampleReason]:
        return Counter(orphan.reason for orphan in self.orphans)


NOTHING = Joined(at=0.0, error=STARTING, values={}, asked=frozenset(), orphans=())


async def join(
    collection: Collection,
    owners: Container[int],
    hami_containers: Container[str],
    procfs: Procfs,
    pidmap: PidMap,
) -> Joined:
    """Find the process of every sample, and its slot or the reason for none. NVML may list thread ids.

    ``owners`` are host PIDs that own a slot, ``hami_containers`` the containers with a region.
    """
    answered, places = time.monotonic(), dict[int, _Listed]()
    values: dict[tuple[int, str], int | None] = {}
    orphans, every, slices = list[Sample](), list[Used](), Slices()
    for uuid, device in collection.devices.items():
        used: dict[int, Used] = {}
        memories = device.memory or {}
        for nvml_pid in dict.fromkeys((*device.newest, *device.dropped, *memories, *device.shares)):
            place = places.get(nvml_pid)
            if place is None:
                place = places[nvml_pid] = _place(nvml_pid, owners, hami_containers, procfs, pidmap)
                await slices.yield_if_due()
            known_load = device.status == OK and nvml_pid not in device.dropped
            sm_util = min(device.newest.get(nvml_pid, 0), 100) if known_load else None
            memory, share = memories.get(nvml_pid), device.shares.get(nvml_pid, 0)
            use = Used(place.host_pid, uuid, place.container, sm_util, memory, place.reason, share)
            before = used.get(place.host_pid)
            used[place.host_pid] = use.with_thread(before) if before else use
            if place.reason is not None and nvml_pid in device.newest:
                orphans.append(Sample(nvml_pid, uuid, sm_util or 0, place.reason, place.container or None))
                # Its slot may be found before the next NVML answer: unknown until then, never idle.
                values[nvml_pid, uuid] = None
        every += used.values()
        owned = (record for record in used.values() if record.no_slot is None)
        values |= {(record.host_pid, uuid): record.sm_util for record in owned if record.sm_util != 0}
    devices = collection.devices.items()
    return Joined(
        collection.at,
        collection.error,
        values,
        frozenset(uuid for uuid, device in devices if device.status == OK),
        tuple(orphans),
        tuple(every),
        listed=frozenset(uuid for uuid, device in devices if device.memory is not None),
        refused=frozenset(uuid for uuid, device in devices if device.legacy_call_refused),
        idle=frozenset(uuid for uuid, device in devices if device.idle),
        answered=answered,
    )


def total(values: list[int | None]) -> int | None:
    """Return the sum; None if a value is unknown."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) if len(numbers) == len(values) else None


class _Listed(NamedTuple):
    """Process with a PID that NVML listed; a ``reason`` if it owns no slot."""

    host_pid: int
    reason: SampleReason | None = None
    container: str = ""


def _place(
    nvml_pid: int, owners: Container[int], hami_containers: Container[str], procfs: Procfs, pidmap: PidMap
) -> _Listed:
    if nvml_pid in owners:
        return _Listed(nvml_pid)
    try:
        tgid = procfs.tgid(nvml_pid)
        if tgid in owners:
            return _Listed(tgid)
        container_id = procfs.container(tgid).container_id
    except (ProcessGone, AccessDenied):
        container = pidmap.container_of(nvml_pid)
        reason = SampleReason.PID_UNKNOWN if container is None else SampleReason.PROCESS_ENDED
        return _Listed(nvml_pid, reason, container or "")
    pidmap.name_container(tgid, container_id)  # it may have ended by the next NVML answer
    if not container_id:
        return _Listed(tgid, SampleReason.NOT_IN_CONTAINER)
    in_hami = container_id in hami_containers
    return _Listed(tgid, SampleReason.NO_SLOT if in_hami else SampleReason.NO_SHARED_REGION, container_id)
