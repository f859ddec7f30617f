"""Join of utilization samples with slot owners.

A value is known, 0 (the device answered without a sample of the process), or unknown (None).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from resolver.base.budget import Slices
from resolver.base.errors import AccessDenied, ProcessGone
from resolver.base.reasons import STARTING, SampleReason
from resolver.gpu.inventory import Sample
from resolver.gpu.sampler import OK

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping

    from resolver.gpu.sampler import Collection, DeviceSamples
    from resolver.linux.procfs import Procfs
    from resolver.pids.pidmap import PidMap


class Used(NamedTuple):
    """Process on a device. ``host_pid`` is the process's if known, else NVML's number; None is unknown.

    ``container`` is as in `Sample`, empty for a slot's owner, whose ``no_slot`` is None. ``share`` is its part of the
    device's load since the answer before, as in `DeviceSamples.shares`.
    """

    host_pid: int
    device_uuid: str
    container: str
    sm_util: int | None
    memory: int | None
    no_slot: SampleReason | None
    share: int = 0


class Joined(NamedTuple):
    """NVML's values per process and device."""

    at: float
    error: str
    values: Mapping[tuple[int, str], int]
    unknown: frozenset[tuple[int, str]]
    asked: frozenset[str]  # UUIDs of the devices that answered
    orphans: tuple[Sample, ...]
    used: tuple[Used, ...] = ()
    listed: frozenset[str] = frozenset()  # UUIDs of the devices with a known process list
    # UUIDs of the devices with samples that HAMi before 2.10 can't read
    refused: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()  # UUIDs of the devices without load by their own samples

    def utilization(self, host_pid: int, device_uuid: str) -> int | None:
        """Return SM utilization in per cent: 0 when idle, None when unknown."""
        if device_uuid not in self.asked or (host_pid, device_uuid) in self.unknown:
            return None
        return self.values.get((host_pid, device_uuid), 0)

    def changed(self, before: Joined | None) -> set[int] | None:
        """Return host PIDs whose utilization differs from before; None if it may be any."""
        if before is None or self.asked != before.asked:
            return None
        values = {key[0] for key, _ in self.values.items() ^ before.values.items()}
        return values | {host_pid for host_pid, _ in self.unknown ^ before.unknown}

    def orphan_reasons(self) -> Counter[SampleReason]:
        """Count samples without a slot, by reason."""
        return Counter(orphan.reason for orphan in self.orphans)


NOTHING = Joined(at=0.0, error=STARTING, values={}, unknown=frozenset(), asked=frozenset(), orphans=())


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
    values: dict[tuple[int, str], int] = {}
    unknown: set[tuple[int, str]] = set()
    orphans: list[Sample] = []
    places: dict[int, int | _Nowhere] = {}
    slices = Slices()
    for device in collection.devices.values():
        for nvml_pid in _listed(device):
            if nvml_pid not in places:
                places[nvml_pid] = _place(nvml_pid, owners, hami_containers, procfs, pidmap)
                await slices.breathe()
    place = places.__getitem__
    for uuid, device in collection.devices.items():
        for nvml_pid, (sm_util, _) in device.newest.items():
            found = place(nvml_pid)
            if isinstance(found, _Nowhere):
                orphans.append(Sample(nvml_pid, uuid, sm_util, found.reason, found.container or None))
                # Its slot may be found before the next NVML answer: unknown until then, never idle.
                unknown.add((nvml_pid, uuid))
            else:
                # Several threads of one process can be listed: its load is the largest of them, not their sum.
                values[found, uuid] = max(values.get((found, uuid), 0), min(sm_util, 100))
        for nvml_pid in device.dropped:
            found = place(nvml_pid)
            if not isinstance(found, _Nowhere):
                unknown.add((found, uuid))
    asked = frozenset(uuid for uuid, device in collection.devices.items() if device.status == OK)
    joined = Joined(collection.at, collection.error, values, frozenset(unknown), asked, tuple(orphans))
    listed = frozenset(uuid for uuid, device in collection.devices.items() if device.memory is not None)
    idle = frozenset(uuid for uuid, device in collection.devices.items() if device.idle)
    refused = frozenset(uuid for uuid, device in collection.devices.items() if device.legacy_call_refused)
    return joined._replace(
        used=tuple(_used(collection, place, joined)), listed=listed, idle=idle, refused=refused
    )


def _listed(device: DeviceSamples) -> dict[int, None]:
    """Return every PID in NVML's answer about a device."""
    return dict.fromkeys((*device.newest, *device.dropped, *(device.memory or ()), *device.shares))


def _used(collection: Collection, place: Callable[[int], int | _Nowhere], joined: Joined) -> Iterator[Used]:
    """Yield every process on every device once; NVML may list several of its threads."""
    for uuid, device in collection.devices.items():
        found: dict[int, Used] = {}
        idle = 0 if uuid in joined.asked else None
        for nvml_pid in _listed(device):
            owner, memory = place(nvml_pid), (device.memory or {}).get(nvml_pid)
            if isinstance(owner, _Nowhere):
                sample = None if nvml_pid in device.dropped else device.newest.get(nvml_pid, (idle, 0))[0]
                used = Used(owner.host_pid or nvml_pid, uuid, owner.container, sample, memory, owner.reason)
            else:
                used = Used(owner, uuid, "", joined.utilization(owner, uuid), memory, None)
            other = found.get(used.host_pid, used)  # a thread of the same process, with the same memory
            sm_util, memory = _most(used.sm_util, other.sm_util), _most(memory, other.memory)
            share = max(device.shares.get(nvml_pid, 0), other.share)
            found[used.host_pid] = used._replace(sm_util=sm_util, memory=memory, share=share)
        yield from found.values()


def _most(one: int | None, other: int | None) -> int | None:
    return max((each for each in (one, other) if each is not None), default=None)


def total(values: list[int | None]) -> int | None:
    """Return the sum; None if a value is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


class _Nowhere(NamedTuple):
    reason: SampleReason
    container: str
    host_pid: int = 0  # the process's, if NVML gave a thread's


def _place(
    nvml_pid: int, owners: Container[int], hami_containers: Container[str], procfs: Procfs, pidmap: PidMap
) -> int | _Nowhere:
    """Return the host PID of a sample's slot owner, or the reason for none."""
    if nvml_pid in owners:
        return nvml_pid
    try:
        tgid = procfs.tgid(nvml_pid)
        if tgid in owners:
            return tgid
        container_id = procfs.container(tgid).container_id
    except (ProcessGone, AccessDenied):
        container = pidmap.container_of(nvml_pid)
        reason = SampleReason.PID_UNKNOWN if container is None else SampleReason.PROCESS_ENDED
        return _Nowhere(reason, container or "")
    pidmap.name_container(tgid, container_id)  # it may have ended by the next NVML answer
    if not container_id:
        return _Nowhere(SampleReason.NOT_IN_CONTAINER, "", tgid)
    in_hami = container_id in hami_containers
    return _Nowhere(SampleReason.NO_SLOT if in_hami else SampleReason.NO_SHARED_REGION, container_id, tgid)
