"""Decides which number ``hostpid`` must be, and measures which PIDs the driver gives to a container's watcher.

After NVML has had samples of slot owners, a child (`resolver.workers.driver_probe`) reads the same samples from inside
their PID namespace. Two agreeing results, from different containers if possible, are a measurement. If a tenant
disturbs it, the version decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sysconfig
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from resolver.base.counters import CounterName
from resolver.base.errors import AccessDenied, ProcessGone, WorkerFailed
from resolver.base.retry import doubled
from resolver.gpu.sampler import OK, SAMPLE_SECONDS
from resolver.hami.driver_memory import DriverMemory, DriverVerdict, Subject, judge
from resolver.hami.hostpid_policy import Origin, by_version, decide
from resolver.linux import capabilities
from resolver.linux.procfs import HOST_PIDNS
from resolver.workers.driver_probe import RIGHTS
from resolver.workers.supervisor import WorkerProcess

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

    from resolver.base.journal import Journal
    from resolver.config import HostpidNamespace
    from resolver.gpu.sampler import Collection
    from resolver.linux.procfs import ProcessHandle, Procfs
    from resolver.pids.pidmap import PidMap
    from resolver.repair.owner_watch import Owners

_AGREEING = 2
_LOOK_SECONDS = 5.0
_FIRST_WAIT, _LONGEST_WAIT = 2.0, 600.0
_MOST_SUBJECTS = 8
_SAID_AFTER = 3

_Seen = dict[str, frozenset[int]]  # by the device's UUID: the PIDs in its samples


class _Place(NamedTuple):
    """A PID namespace to measure from, and busy owners in it; ``held`` keeps all descriptors."""

    pidns: int
    fd: int
    subjects: tuple[tuple[Subject, int, ProcessHandle], ...]  # with the sample's time (us since the epoch)
    held: ExitStack


class DriverMeasurement:
    """Measured behaviour of the driver; never waits."""

    def __init__(
        self,
        run_dir: str,
        owners: Owners,
        procfs: Procfs,
        pidmap: PidMap,
        counters: Counter[str],
        journal: Journal,
    ) -> None:
        self.why = ""  # why it is not measured yet; for people
        self.unable = ""  # why it never will be; empty while it may
        self.rights = frozenset[str]()  # what the daemon's children need for it, for as long as it is needed
        self.worker = WorkerProcess(
            "driver probe",
            "resolver.workers.driver_probe",
            sysconfig.get_paths()["purelib"],
            timeout=_LOOK_SECONDS + 4.0,
            rights=RIGHTS,
        )
        self._memory = DriverMemory(run_dir)
        self._owners, self._procfs, self._pidmap = owners, procfs, pidmap
        self._counters, self._journal = counters, journal
        self._task: asyncio.Task[tuple[_Place, _Seen | str]] | None = None
        self._nobody = True  # as whom to ask; a driver that is not open to everybody is asked as root
        self._enabled = False
        self._version = ""
        self._agreed: list[HostpidNamespace] = []
        self._tries: dict[int, int] = {}  # by PID namespace: each has its turn
        self._in_vain = 0
        self._not_before = 0.0

    def enable(self, *, wanted: bool) -> None:
        """Measure from now on if this process has the rights. Call it before any right is dropped."""
        held = capabilities.held()
        self._enabled = True
        if not wanted:
            why = "as hostpid_namespace was not auto at the start"
            self.unable = f"the right to was given up, {why}: restart resolver"
        elif "SYS_ADMIN" not in held:
            self.unable = "that takes CAP_SYS_ADMIN"
        else:
            self.rights = RIGHTS & held

    def disable(self, driver_version: str) -> None:
        """Stop measuring: that driver is measured, or the rights were given up."""
        self.rights = frozenset()
        why = f"after driver {driver_version} was measured"
        self.unable = f"the right to was given up {why}: restart resolver"
        self.close()

    def get(self, driver_version: str | None) -> HostpidNamespace | None:
        """Return the result for that driver, measured by this or an earlier daemon since the boot."""
        return self._memory.get(driver_version) if driver_version else None

    def consider(self, collection: Collection) -> None:
        """Conclude a finished measurement, and start one if it is due and possible."""
        if self._task is not None:
            if not self._task.done():
                return
            task, self._task = self._task, None
            if not task.cancelled():
                self._conclude(*task.result(), collection)
        version = collection.driver_version
        possible = self._enabled and not self.unable and not collection.error
        if not possible or not version or self.get(version) is not None:
            return
        if version != self._version:
            self._version, self._in_vain, self._not_before, self.why = version, 0, 0.0, ""
            self._agreed.clear()
        if time.monotonic() < self._not_before:
            return
        place = self._place(collection)
        if place is not None:
            self._counters[CounterName.DRIVER_PROBES] += 1
            self._task = asyncio.create_task(self._look(place))

    def close(self) -> None:
        """Stop the current measurement and its child."""
        if self._task is not None:
            self._task.cancel()
        self.worker.stop()

    # -- where to look -----------------------------------------------------------------------------------------------

    def _place(self, collection: Collection) -> _Place | None:
        oldest = int((collection.at - SAMPLE_SECONDS) * 1e6)
        busy: dict[int, list[tuple[int, str, int]]] = {}
        for uuid, device in collection.devices.items():
            for host_pid, (stamp, sm_util) in device.newest.items():
                process = self._owners.process(host_pid)
                # One level below the host's: then all that can see the probe are processes of that namespace.
                if process is not None and len(process.ns_pids) == 2 and sm_util and stamp > oldest:
                    with contextlib.suppress(ProcessGone, AccessDenied):
                        busy.setdefault(self._procfs.pidns(host_pid), []).append((host_pid, uuid, stamp))
        busy.pop(HOST_PIDNS, None)
        if not busy:
            self.why = self.why or "no container with a busy process has been seen yet"
            return None
        self._tries = {pidns: self._tries.get(pidns, 0) for pidns in busy}
        for pidns in sorted(busy, key=self._tries.__getitem__):
            with ExitStack() as held:
                subjects = tuple(self._hold(pidns, busy[pidns][:_MOST_SUBJECTS], collection, held))
                fd = self._open_namespace(subjects[0][2], pidns, held) if subjects else -1
                if fd >= 0:
                    self._tries[pidns] += 1
                    return _Place(pidns, fd, subjects, held.pop_all())
        self.why = self.why or "the numbers of every busy process may also be other processes'"
        return None

    def _hold(
        self, pidns: int, busy: list[tuple[int, str, int]], collection: Collection, held: ExitStack
    ) -> Iterator[tuple[Subject, int, ProcessHandle]]:
        """Hold the processes, and yield those with conclusive numbers."""
        for host_pid, uuid, stamp in busy:
            with contextlib.suppress(ProcessGone, AccessDenied):
                handle = self._procfs.open_handle(host_pid)
                held.callback(handle.close)
                subject = Subject(host_pid, handle.process.ns_pids[-1], uuid)
                same = handle.process == self._owners.process(host_pid)
                if same and self._conclusive(subject, pidns, collection):
                    yield subject, stamp, handle

    def _open_namespace(self, handle: ProcessHandle, pidns: int, held: ExitStack) -> int:
        """Open the held process's PID namespace; -1 if it is another one by now."""
        path = f"{self._procfs.root}/{handle.process.host_pid}/ns/pid"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return -1
        held.callback(os.close, fd)
        return fd if handle.alive() and os.fstat(fd).st_ino == pidns else -1

    def _conclusive(self, subject: Subject, pidns: int, collection: Collection) -> bool:
        """Check that each of its two numbers in samples could mean only this process."""
        host_pid, ns_pid, uuid = subject
        device = collection.devices.get(uuid)
        if host_pid == ns_pid or device is None or device.status != OK:
            return False
        if ns_pid in device.newest or ns_pid in device.dropped or ns_pid in (device.memory or ()):
            return False  # on the host another process has that number, and uses the device
        with contextlib.suppress(ProcessGone, AccessDenied):
            others = self._pidmap.source.candidates(host_pid, pidns)
            return all(other == host_pid or self._procfs.pidns(other) != pidns for other in others)
        return False

    # -- the look ----------------------------------------------------------------------------------------------------

    async def _look(self, place: _Place) -> tuple[_Place, _Seen | str]:
        """Return the samples seen from there, or the reason for none."""
        request = {
            "pidns": place.pidns,
            "uuids": sorted({subject.device_uuid for subject, _, _ in place.subjects}),
            "since": min(stamp for _, stamp, _ in place.subjects) - 1,
            "nobody": self._nobody,
            "seconds": _LOOK_SECONDS,
        }
        try:
            answer = await self.worker.request(json.dumps(request).encode(), [place.fd])
            return place, self._seen(json.loads(answer))
        except WorkerFailed as error:
            return place, str(error)
        except (ValueError, TypeError, KeyError, AttributeError):
            return place, str(self.worker.malformed("answered something malformed"))
        except BaseException:
            place.held.close()
            raise
        finally:
            self.worker.stop()  # it was for this question only

    def _seen(self, answer: dict[str, Any]) -> _Seen | str:
        if "refused" in answer:
            self._counters[CounterName.DRIVER_PROBES_REFUSED] += 1
            return f"the container was not entered: {answer['refused']}"
        if "failed" in answer:
            if answer["init"] and self._nobody:
                # The devices may be closed to other users: ask as root, at once.
                self._nobody, self._in_vain = False, -1
            return str(answer["failed"])
        seen = {uuid: frozenset(pids) for uuid, pids in answer["seen"].items() if pids is not None}
        if not all(type(pid) is int for pids in seen.values() for pid in pids):
            raise ValueError("PIDs are whole numbers")
        return seen or "NVML has no samples there"

    def _conclude(self, place: _Place, seen: _Seen | str, collection: Collection) -> None:
        """Reach a verdict from the host's view before and after the measurement."""
        with place.held:
            verdict = self._verdict(place, seen, collection)
        if verdict.namespace is None:
            self._failed(verdict.why)
        elif self._version != collection.driver_version:
            self._agreed.clear()
        elif self._agreed and verdict.namespace is not self._agreed[-1]:
            self._agreed.clear()
            self._failed("two measurements contradicted each other")
        else:
            self._agreed.append(verdict.namespace)
            self._in_vain, self.why = 0, "measured once, and to be confirmed"
            if len(self._agreed) >= _AGREEING:
                self._measured(verdict.namespace)

    def _verdict(self, place: _Place, seen: _Seen | str, collection: Collection) -> DriverVerdict:
        if isinstance(seen, str) or collection.error:
            return DriverVerdict(None, seen if isinstance(seen, str) else collection.error)
        # The driver can't translate dead processes, and a new one may have one of the numbers.
        left = [
            subject
            for subject, _, handle in place.subjects
            if handle.alive() and self._conclusive(subject, place.pidns, collection)
        ]
        if not left:
            return DriverVerdict(None, "the processes ended meanwhile, or their numbers are others' now")
        return judge(left, seen)

    def _failed(self, why: str) -> None:
        self._counters[CounterName.DRIVER_PROBES_FAILED] += 1
        wait = doubled(_FIRST_WAIT, _LONGEST_WAIT, self._in_vain) if self._in_vain >= 0 else 0.0
        self._in_vain += 1
        self._not_before = time.monotonic() + wait
        self.why = why
        log = self._journal.log.info if self._in_vain == _SAID_AFTER else self._journal.log.debug
        log("driver_not_measured", why=why, next_try_seconds=wait)

    def _measured(self, namespace: HostpidNamespace) -> None:
        self.why = ""
        self._agreed.clear()
        try:
            self._memory.put(self._version, namespace)
        except OSError as error:
            self._journal.log.warning("measurement_not_kept", path=self._memory.path, why=error.strerror)
        expected = by_version(self._version)
        if expected.namespace not in (None, namespace):
            self._journal.log.warning(
                "driver_contradicts_version",
                driver_version=self._version,
                measured=namespace,
                by_version=expected.namespace,
                why="its samples in a container contradict its version; hostpid follows the measurement",
            )


class Decision:
    """The policy in force, decided again whenever more is known about the driver."""

    def __init__(self, setting: HostpidNamespace, measurement: DriverMeasurement, journal: Journal) -> None:
        self.policy = decide(setting, None)
        self.measurement = measurement
        self._journal = journal
        self._said = False

    def decide(self, setting: HostpidNamespace, driver_version: str | None) -> bool:
        """Decide; return True if that changed anything. A measured driver takes no rights any more."""
        measured, unable = self.measurement.get(driver_version), self.measurement.unable
        policy = decide(setting, driver_version, measured, unable)
        if self._said and self.policy == policy:
            return False
        self.policy, self._said = policy, True
        namespace = policy.namespace or "unknown"
        self._journal.record("policy", hostpid_namespace=namespace, why=policy.why, origin=policy.origin)
        if driver_version and policy.origin is Origin.MEASURED and self.measurement.rights:
            self.measurement.disable(driver_version)
        return True

    def consider(self, collection: Collection) -> None:
        """Start a measurement if it could matter and there is something to measure."""
        if self.policy.origin is not Origin.FORCED:
            self.measurement.consider(collection)

    def not_measured(self) -> str:
        """Explain why the policy does not come from a measurement; empty if it does, or need not."""
        if self.policy.origin in (Origin.MEASURED, Origin.FORCED):
            return ""
        return self.measurement.unable or self.measurement.why
