"""Passes over real files with the real writer; the test sets the owners of slots."""

import asyncio
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from resolver.base import journal as log
from resolver.base.reasons import UnresolvedReason
from resolver.config import HostpidNamespace, Settings
from resolver.gpu.attribution import NOTHING, Joined
from resolver.hami import layout as layouts
from resolver.hami.discovery import SharedDirectory
from resolver.hami.hostpid_policy import HostpidPolicy
from resolver.linux.procfs import ProcessHandle, Procfs
from resolver.pids.pidmap import PidMap
from resolver.pids.scan import ScanSource
from resolver.repair.repairer import Repairer
from resolver.repair.reported_values import TWO_TICKS
from resolver.state import SlotReport
from tests.fakes import cachefiles
from tests.fakes.family import Family

V1_2 = layouts.LAYOUTS["v1.2"]
HOST = HostpidPolicy(HostpidNamespace.HOST, "")
UUID = "GPU-a"

Lines = Callable[[], list[dict[str, Any]]]


class ToldOwners:
    def __init__(self) -> None:
        self.host_pids: dict[int, int] = {}
        self.reasons: dict[int, UnresolvedReason] = {}
        self.runs = False
        self.asked: Counter[int] = Counter()
        self.rivals = set[int]()

    async def owner(
        self,
        directory: SharedDirectory,
        shown: tuple[str, int],
        ns_pid: int,
        _payer: str = "",
        rival: int = 0,
        _pause: object = None,
    ) -> ProcessHandle | UnresolvedReason:
        assert directory.path
        assert all(shown)
        self.asked[ns_pid] += 1
        self.rivals.add(rival)
        if ns_pid in self.host_pids:
            return Procfs().open_handle(self.host_pids[ns_pid])
        return self.reasons.get(ns_pid, UnresolvedReason.NO_SUCH_PROCESS)

    def vacant(self, directory: SharedDirectory, ns_pid: int) -> bool:
        return self.runs and bool(directory.path) and ns_pid not in self.host_pids

    def forget(self, directory: SharedDirectory) -> None:
        assert directory.path


class Bench:
    def __init__(self, place: Path, stack: ExitStack, **settings: Any) -> None:
        self.place, self.stack = place, stack
        self.counters: Counter[str] = Counter()
        self.told = ToldOwners()
        procfs = Family()
        self.pidmap = PidMap(ScanSource(procfs))
        self.settings = Settings(containers_dir=(str(place),), **settings)
        self.woken = 0
        self.repairer = Repairer(
            self.settings, procfs, self.pidmap, self.counters, log.Journal(), wake=self._wake
        )
        self.repairer.owners.finder = self.told  # type: ignore[assignment]
        self.joined = NOTHING
        self.runner = asyncio.Runner()
        stack.callback(self.runner.close)
        stack.callback(self.repairer.close)

    def _wake(self) -> None:
        self.woken += 1

    def file(self, *slots: tuple[int, int], name: str = "main", sm_util: int = 0) -> Path:
        return cachefiles.region(self.place / f"uid_{name}" / "a.cache", slots, [UUID], sm_util=sm_util)

    def child(self, stdin: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["sleep", "600"], stdin=stdin)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        return process

    def has_open(self, path: Path) -> None:
        """Hold the file open, as HAMi does; the daemon takes a file that no process holds as dead in the end."""
        self.child(self.stack.enter_context(path.open("r+b")))

    def sees(self, load: int | None = None) -> None:
        """Set the utilization that NVML reports of every owner; None for no samples."""
        values = {} if load is None else {(host_pid, UUID): load for host_pid in self.told.host_pids.values()}
        idle = frozenset({UUID} if not values else ())
        self.joined = Joined(1.0, "", values, frozenset({UUID}), (), idle=idle, answered=time.monotonic())

    def step(self, policy: HostpidPolicy = HOST) -> None:
        self.runner.run(self.repairer.pass_once(policy, self.joined, patient=False))

    def waits(self) -> None:
        time.sleep(TWO_TICKS)

    def reports(self) -> dict[int, SlotReport]:
        return {slot.slot: slot for region in self.repairer.reports() for slot in region.slots}


def slot(path: Path, index: int = 0) -> tuple[int, int, int]:
    data = path.read_bytes()
    pid, hostpid = struct.unpack_from("<ii", data, V1_2.slot_offset(index))
    return pid, hostpid, struct.unpack_from("<Q", data, V1_2.sm_util_offset(index, 0) or 0)[0]
