"""Use of each GPU by each container since the daemon's start: for how long, whether its core limit holds, and energy.

One collection's values count for the time since the collection before it; without an answer of NVML that time is
unknown.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from resolver.gpu.attribution import total
from resolver.state import ContainerUse, LimitState, tally

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from resolver.gpu.attribution import Joined
    from resolver.gpu.sampler import DeviceSamples
    from resolver.state import Container, Process, RegionReport

#: Seconds between two answers of NVML after which the time between them is unknown.
_GAP_SECONDS: Final = 5.0
_CHECKPOINT_SECONDS: Final = 10.0
_MINUTE, _FIVE_MINUTES = 60.0, 300.0
#: HAMi-core's limiter overshoots for seconds; this much above the limit over a minute is no overshoot.
_TOLERANCE: Final = 0.10
#: Share of a window in which NVML did not answer, above which its mean is unknown.
_MOST_UNKNOWN: Final = 0.1
#: Seconds for which an ended container's counters can still be scraped.
_KEPT_SECONDS: Final = 120.0

#: Pod UID, container's name, and the container's id where these are not known; device UUID.
Key = tuple[str, str, str, str]


class _Checkpoint(NamedTuple):
    at: float
    gpu_seconds: float
    unknown_seconds: float


class _Entry:
    """Account of one container on one GPU; times are monotonic."""

    def __init__(self, process: Process, now: float) -> None:
        self.names = process
        self.since = time.time()
        self.left = 0.0  # when its last process ended; 0 while it has one
        self.gpu_seconds = self.byte_seconds = self.unknown_seconds = 0.0
        self.joules: float | None = None
        self.xids = 0
        self.utilization: float | None = 0.0
        self.memory: int | None = 0
        self.watts: float | None = None
        self.idle_since: float | None = None
        self._history = deque([_Checkpoint(now, 0.0, 0.0)])

    def add(self, known: float, unknown: float, now: float) -> None:
        """Count seconds with the present values, and seconds without."""
        if self.utilization is None:
            known, unknown = 0.0, unknown + known
        self.gpu_seconds += known * (self.utilization or 0.0)
        self.byte_seconds += known * (self.memory or 0)
        if self.watts is not None:
            self.joules = (self.joules or 0.0) + known * self.watts
        self.unknown_seconds += unknown
        if now - self._history[-1].at >= _CHECKPOINT_SECONDS:
            self._history.append(_Checkpoint(now, self.gpu_seconds, self.unknown_seconds))
            while len(self._history) > 1 and self._history[1].at <= now - _FIVE_MINUTES:
                self._history.popleft()

    def mean(self, seconds: float, now: float) -> float | None:
        """Return the mean utilization of the last ``seconds`` and up to 10 s before; None if that is not known."""
        before = next((each for each in reversed(self._history) if each.at <= now - seconds), None)
        if before is None:
            return None
        lasted, unknown = now - before.at, self.unknown_seconds - before.unknown_seconds
        if unknown > _MOST_UNKNOWN * lasted:
            return None
        return min(1.0, (self.gpu_seconds - before.gpu_seconds) / (lasted - unknown))


class Accounts:
    """All containers' accounts."""

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}
        #: Joules of each GPU in the time when no process used it.
        self.unused_joules: dict[str, float] = {}
        self._unused_watts: dict[str, float] = {}
        self._last = time.monotonic()

    def note(
        self, processes: tuple[Process, ...], joined: Joined, devices: Mapping[str, DeviceSamples]
    ) -> None:
        """Take over one collection: its processes, and the devices' power."""
        now = time.monotonic()
        gap = now - self._last
        self._use(processes, {uuid: device.power for uuid, device in devices.items()}, now)
        known = 0.0 if joined.error or gap > _GAP_SECONDS else gap
        for entry in self._entries.values():
            entry.add(known, gap - known, now)
        for uuid, unused in self._unused_watts.items():
            self.unused_joules[uuid] = self.unused_joules.get(uuid, 0.0) + unused * known
        self._last = now

    def count_xids(self, device_uuid: str, count: int) -> None:
        """Count errors of a GPU for each container that has a process on it; NVML doesn't say which it was."""
        for key, entry in self._entries.items():
            if key[3] == device_uuid and not entry.left:
                entry.xids += count

    def _use(self, processes: tuple[Process, ...], watts: Mapping[str, float | None], now: float) -> None:
        """Set the values that count from now on."""
        by_key: dict[Key, list[Process]] = {}
        use: dict[str, list[int | None]] = {}
        for process in processes:
            use.setdefault(process.device_uuid, []).append(process.sm_util)
            if process.container_id or process.container_name:
                by_key.setdefault(key_of(process, process.device_uuid), []).append(process)
        totals = {uuid: total(values) for uuid, values in use.items()}
        self._unused_watts = {uuid: each for uuid, each in watts.items() if each and totals.get(uuid, 0) == 0}
        for key, those in by_key.items():
            if key not in self._entries:
                self._entries[key] = _Entry(those[0], self._last)
            self._entries[key].names = those[0]
        for key, entry in self._entries.items():
            those = by_key.get(key, [])
            entry.left = 0.0 if those else entry.left or now
            used = total([process.sm_util for process in those])
            entry.utilization = None if used is None else min(used / 100, 1.0)
            entry.memory = total([process.memory for process in those])
            every, power = totals.get(key[3]), watts.get(key[3])
            entry.watts = None
            if power is not None and used is not None and every is not None:
                entry.watts = power * used / every if every else 0.0
            if used != 0 or not those:
                entry.idle_since = None
            elif entry.idle_since is None:
                entry.idle_since = now

    def uses(
        self, regions: Iterable[RegionReport], containers: Iterable[Container]
    ) -> tuple[ContainerUse, ...]:
        """Return every container's use of every GPU, by name."""
        limits = dict(_limits(regions, containers))
        now, clock = self._last, time.time()
        for key in [
            key for key, each in self._entries.items() if each.left and now - each.left > _KEPT_SECONDS
        ]:
            del self._entries[key]
        found = []
        for key, entry in self._entries.items():
            limit, state = limits.get(key, (None, LimitState.NO_LIMIT))
            minute = entry.mean(_MINUTE, now)
            enforced = state in (LimitState.IN_FORCE, LimitState.WAITING)
            if limit is not None and enforced and minute is not None and minute > limit / 100 + _TOLERANCE:
                state = LimitState.EXCEEDED
            idle = entry.idle_since
            found.append(
                ContainerUse(
                    namespace=entry.names.namespace,
                    pod=entry.names.pod,
                    container_name=entry.names.container_name,
                    pod_uid=entry.names.pod_uid,
                    container_id=entry.names.container_id,
                    device_uuid=key[3],
                    since=entry.since,
                    gpu_seconds=entry.gpu_seconds,
                    memory_byte_seconds=entry.byte_seconds,
                    unknown_seconds=entry.unknown_seconds,
                    energy=entry.joules,
                    used_1m=minute,
                    used_5m=entry.mean(_FIVE_MINUTES, now),
                    idle_since=None if idle is None else clock - (time.monotonic() - idle),
                    core_limit=limit,
                    limit_state=state,
                    xids=entry.xids,
                )
            )
        found.sort(
            key=lambda use: (use.namespace or "~", use.pod or "~", use.container_name or "", use.device_uuid)
        )
        return tuple(found)


def key_of(named: Process | Container, device_uuid: str) -> Key:
    """Return the account's key; a restarted container goes on with the account of the one before."""
    if named.pod_uid and named.container_name:
        return named.pod_uid, named.container_name, "", device_uuid
    return "", "", named.container_id or "", device_uuid


def _limits(
    regions: Iterable[RegionReport], containers: Iterable[Container]
) -> Iterator[tuple[Key, tuple[int | None, LimitState]]]:
    """Yield each container's core limit on each GPU in per cent, and whether HAMi-core enforces it."""
    by_path = {region.path: region for region in regions}
    for container in containers:
        for path in container.regions:
            region = by_path.get(path)
            if region is None:
                continue
            waiting = bool(tally(region.slots).unresolved)
            for position, uuid in enumerate(region.device_uuids):
                limit, state = region.core_limit(position), LimitState.IN_FORCE
                if limit is None:
                    state = LimitState.NO_LIMIT
                elif not region.limiting:
                    state = LimitState.SWITCHED_OFF
                elif waiting:
                    state = LimitState.WAITING
                yield key_of(container, uuid), (limit, state)
