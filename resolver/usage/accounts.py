"""Use of each GPU by each container since the daemon's start: GPU time, energy, and whether its core limit holds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from resolver.base.reasons import SampleReason
from resolver.gpu.attribution import Joined, total
from resolver.gpu.sampler import DeviceSamples
from resolver.state import Container, ContainerUse, LimitState, Process, RegionReport, tally
from resolver.usage.windows import KEPT_SECONDS, DeviceTime, Window

_CHECKPOINT_SECONDS: Final = 10.0
_MINUTE, _FIVE_MINUTES = 60.0, 300.0
#: HAMi-core's limiter overshoots for seconds; this much above the limit over a minute is no overshoot.
_TOLERANCE: Final = 0.10
#: Largest error of a mean, as a share of it (`make bench ARGS=usage`).
_ERROR: Final = 0.03
#: Share of a window without NVML answers that makes its mean unknown.
_MOST_UNKNOWN: Final = 0.1
#: Seconds without an answer after which means are outdated.
_STALE_SECONDS: Final = 5.0
#: Seconds that an ended container's counters stay.
_KEPT_ENDED_SECONDS: Final = 120.0
_ENDED: Final = (SampleReason.PROCESS_ENDED, SampleReason.PID_UNKNOWN)

#: Pod UID, container's name, and the container's id where these are not known; device UUID.
Key = tuple[str, str, str, str]


class _Sums(NamedTuple):
    """Seconds accounted for, GPU-seconds, unknown seconds, and GPU-seconds while several containers used the device."""

    at: float = 0.0
    used: float = 0.0
    unknown: float = 0.0
    shared: float = 0.0

    def since(self, before: _Sums) -> _Sums:
        return _Sums(*(now - then for now, then in zip(self, before, strict=True)))

    def mean(self) -> float | None:
        """Return the mean utilization; None if too much time is unknown."""
        if self.unknown > _MOST_UNKNOWN * self.at or self.at <= 0:
            return None
        return min(1.0, self.used / (self.at - self.unknown))

    def error(self) -> float | None:
        """Return the largest error of the use, as a share of it; None if it may be all wrong."""
        missing = self.unknown + self.shared
        if not missing:
            return _ERROR
        error = _ERROR + missing / self.used if self.used else 1.0
        return error if error < 1 else None


class _Entry:
    def __init__(self, process: Process, age: float) -> None:
        self.names = process
        self.since = time.time() - age
        self.left = 0.0  # when its last process ended, monotonic; 0 while it has one
        self.sums = _Sums()
        self.byte_seconds = 0.0
        self.joules: float | None = None
        self.xids = 0
        self.idle: float | None = None  # seconds without use
        self._history = deque([self.sums])

    def add(self, window: Window, used: float | None, whole: float, processes: list[Process]) -> None:
        """Count a window's GPU-seconds, None if unknown, of these processes; the device's are ``whole``."""
        seconds, unknown = window.covered, window.unknown
        if used is None:
            seconds, unknown, used = 0.0, unknown + seconds, 0.0
        new = _Sums(seconds + unknown, used, unknown, whole if 0 < used < whole else 0.0)
        self.sums = _Sums(*map(sum, zip(self.sums, new, strict=True)))
        self.byte_seconds += seconds * (total([process.memory for process in processes]) or 0)
        if used or not processes:
            self.idle = None
        elif seconds:
            self.idle = (self.idle or 0.0) + seconds
        if self.sums.at - self._history[-1].at >= _CHECKPOINT_SECONDS:
            self._history.append(self.sums)
            while len(self._history) > 1 and self._history[1].at <= self.sums.at - _FIVE_MINUTES:
                self._history.popleft()

    def _before(self, seconds: float, now: _Sums) -> _Sums | None:
        return next((window for window in reversed(self._history) if window.at <= now.at - seconds), None)

    def mean(self, seconds: float) -> float | None:
        """Return the mean utilization of the last ``seconds`` and up to 10 s before; None if that is not known."""
        before = self._before(seconds, self.sums)
        return None if before is None else self.sums.since(before).mean()

    def exceeds(self, limit: float) -> bool:
        """Check that the last minute and the one before were both above it, whatever the error."""
        end = self.sums
        for _ in range(2):
            begin = self._before(_MINUTE, end)
            if begin is None:
                return False
            mean = end.since(begin).mean()
            if mean is None or mean * (1 - _ERROR) <= limit + _TOLERANCE:
                return False
            end = begin
        return True


class Accounts:
    """All containers' accounts."""

    def __init__(self) -> None:
        self.entries: dict[Key, _Entry] = {}
        #: Joules of each GPU in the time when no process used it.
        self.unused_joules: dict[str, float] = {}
        self._times: dict[str, DeviceTime[Key | None]] = {}
        self._keys: dict[tuple[int, str], Key] = {}  # of the last answer's processes, by host PID and device

    def note(
        self, processes: tuple[Process, ...], joined: Joined, devices: Mapping[str, DeviceSamples]
    ) -> None:
        """Take over one collection: its processes, and the devices' periods and power."""
        now, late = time.monotonic(), time.time() - joined.at
        if 0 < late < _STALE_SECONDS:  # NVML's answer is older, by much at the daemon's start
            now -= late
        if not joined.error:
            here = self._place(processes, now)
            shares = {(used.host_pid, used.device_uuid): used.share for used in joined.used}
            for uuid, device in devices.items():
                its = {process.host_pid: process for process in here.get(uuid, ())}
                self._add(uuid, device, its, shares, now)
        for key in [key for key, entry in self.entries.items() if 0 < entry.left < now - _KEPT_ENDED_SECONDS]:
            del self.entries[key]

    def count_xids(self, device_uuid: str, count: int) -> None:
        """Count errors of a GPU for each container that has a process on it; NVML doesn't say which it was."""
        for key, entry in self.entries.items():
            if key[3] == device_uuid and not entry.left:
                entry.xids += count

    def _place(self, processes: tuple[Process, ...], now: float) -> dict[str, list[Process]]:
        """Find each process's account, an ended process's last one; return the processes by device."""
        keys: dict[tuple[int, str], Key] = {}
        here: dict[str, list[Process]] = {}
        for process in processes:
            uuid, which = process.device_uuid, (process.host_pid, process.device_uuid)
            here.setdefault(uuid, []).append(process)
            earlier = self._keys.get(which) if process.no_slot in _ENDED else None
            if earlier is not None:
                keys[which] = earlier
            elif process.container_id or process.container_name:
                keys[which] = key_of(process, uuid)
                begin = self._times[uuid].at if uuid in self._times else now  # all of the next window counts
                age = time.monotonic() - begin
                self.entries.setdefault(keys[which], _Entry(process, age)).names = process
        self._keys = keys
        present = set(keys.values())
        for key, entry in self.entries.items():
            entry.left = 0.0 if key in present else entry.left or now
        return here

    def _add(
        self,
        uuid: str,
        device: DeviceSamples,
        processes: Mapping[int, Process],
        shares: Mapping[tuple[int, str], int],
        now: float,
    ) -> None:
        """Divide a device's time since the last answer among its containers."""
        of: dict[Key | None, list[Process]] = {}
        values: dict[Key | None, int] = {}
        for host_pid, process in processes.items():
            key = self._keys.get((host_pid, uuid))
            of.setdefault(key, []).append(process)
            values[key] = values.get(key, 0) + shares.get((host_pid, uuid), 0)
        taken = self._times.setdefault(uuid, DeviceTime(now)).take(device, now, values)
        if taken is None:
            return
        window, used = taken
        joules, whole = window.covered * (device.power or 0.0), sum(used.values())
        if joules and not whole:
            self.unused_joules[uuid] = self.unused_joules.get(uuid, 0.0) + joules
        for key, entry in self.entries.items():
            if key[3] != uuid:
                continue
            members = of.get(key, [])
            unknown = any(process.sm_util is None for process in members)
            entry.add(window, None if unknown else used.get(key, 0.0), whole, members)
            if device.power is not None and not unknown:
                entry.joules = (entry.joules or 0.0) + (joules * used.get(key, 0.0) / whole if whole else 0.0)

    def uses(
        self, regions: Iterable[RegionReport], containers: Iterable[Container]
    ) -> tuple[ContainerUse, ...]:
        limits = dict(_limits(regions, containers))
        now, clock = time.monotonic(), time.time()
        uses = []
        for key, entry in self.entries.items():
            limit, state = limits.get(key, (None, LimitState.NO_LIMIT))
            silence = now - self._times[key[3]].at if key[3] in self._times else 0.0
            fresh = silence <= _STALE_SECONDS
            if limit is not None and state is LimitState.IN_FORCE and fresh and entry.exceeds(limit / 100):
                state = LimitState.EXCEEDED
            uses.append(
                ContainerUse(
                    namespace=entry.names.namespace,
                    pod=entry.names.pod,
                    container_name=entry.names.container_name,
                    pod_uid=entry.names.pod_uid,
                    container_id=entry.names.container_id,
                    device_uuid=key[3],
                    since=entry.since,
                    gpu_seconds=entry.sums.used,
                    error=entry.sums.error(),
                    memory_byte_seconds=entry.byte_seconds,
                    unknown_seconds=entry.sums.unknown + max(0.0, silence - KEPT_SECONDS),
                    energy=entry.joules,
                    used_1m=entry.mean(_MINUTE) if fresh else None,
                    used_5m=entry.mean(_FIVE_MINUTES) if fresh else None,
                    idle_since=None if entry.idle is None else clock - entry.idle,
                    core_limit=limit,
                    limit_state=state,
                    xids=entry.xids,
                )
            )
        uses.sort(
            key=lambda use: (use.namespace or "~", use.pod or "~", use.container_name or "", use.device_uuid)
        )
        return tuple(uses)


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
            enforced = _enforced(region, container.container_id)
            for position, uuid in enumerate(region.device_uuids):
                limit = region.core_limit(position)
                state = LimitState.NO_LIMIT if limit is None else enforced
                if state is LimitState.IN_FORCE and position < len(region.limits):
                    state = region.limits[position] or state
                yield key_of(container, uuid), (limit, state)


def _enforced(region: RegionReport, container_id: str) -> LimitState:
    """Return the state of the least limited process; without an owned slot, that of slots without an owner."""
    states = {
        LimitState.of(slot.core_policy, switch=region.limiting)
        for slot in region.slots.owned
        if slot.host_pid is not None and slot.container_id in ("", container_id)
    }
    if not states:
        return (
            LimitState.WAITING
            if tally(region.slots).unresolved
            else LimitState.of("", switch=region.limiting)
        )
    order = (LimitState.UNKNOWN, LimitState.DISABLED, LimitState.SWITCHED_OFF, LimitState.IN_FORCE)
    return next(state for state in order if state in states)
