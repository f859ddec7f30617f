"""Samples get a slot, or a reason for having none: on the real /proc, with real processes and threads."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from resolver.base.reasons import SampleReason
from resolver.gpu.attribution import NOTHING, Joined, Used, join
from resolver.gpu.inventory import Sample
from resolver.gpu.sampler import FAILED, OK, UNSUPPORTED, Collection, DeviceSamples
from resolver.linux.procfs import Procfs
from resolver.pids.pidmap import PidMap
from resolver.pids.scan import ScanSource
from tests.fakes.procs import FakeProc

CID = "0123456789abcdef" * 4


def device(load: dict[int, int], dropped: frozenset[int] = frozenset(), status: str = OK) -> DeviceSamples:
    return DeviceSamples(status, "", load, dropped)


def joined(
    load: dict[int, int] | None = None,
    owners: set[int] | None = None,
    hami: set[str] | None = None,
    procfs: Procfs | None = None,
    pidmap: PidMap | None = None,
    **devices: DeviceSamples,
) -> Joined:
    procfs = procfs or Procfs()
    if pidmap is None:
        pidmap = PidMap(ScanSource(procfs))
    every = {"GPU-a": device(load)} if load is not None else {}
    collection = Collection(5.0, "", {**every, **devices})
    return asyncio.run(join(collection, owners or set(), hami or set(), procfs, pidmap))


@pytest.fixture
def threads() -> Iterator[tuple[int, list[int]]]:
    """Yield a process's PID, and the TIDs of its other threads."""
    code = (
        "import threading, time\n"
        "for _ in range(2): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        tids = [int(tid) for tid in os.listdir(f"/proc/{process.pid}/task")]
        yield process.pid, [tid for tid in tids if tid != process.pid]
        process.kill()


def test_values_idle_and_unknown() -> None:
    result = joined(
        owners={10, 11, 12},
        a=device({10: 42}),
        b=device({}, dropped=frozenset({11})),
        c=device({}, status=FAILED),
        d=device({}, status=UNSUPPORTED),
    )
    table = {pid: [result.utilization(pid, uuid) for uuid in "abcde"] for pid in (10, 11, 12)}
    assert table == {
        10: [42, 0, None, None, None],
        11: [0, None, None, None, None],
        12: [0, 0, None, None, None],
    }
    assert result.orphans == ()


@pytest.mark.parametrize(("sm", "value"), [(0, 0), (1, 1), (100, 100), (101, 100), (2**32 - 1, 100)])
def test_values_end_at_100(sm: int, value: int) -> None:
    assert joined({10: sm}, owners={10}).utilization(10, "GPU-a") == value


def test_threads_are_one_process(threads: tuple[int, list[int]]) -> None:
    """Samples of a process's threads are one load, seen several times; an unknown value makes it unknown."""
    host_pid, (first, second) = threads
    memory = {first: 100, host_pid: None}
    result = joined(owners={host_pid}, a=listed({host_pid: 20, first: 30, second: 20}, memory))
    assert result.used == (Used(host_pid, "a", "", 30, 100, None),)
    assert (result.utilization(host_pid, "a"), result.utilization(first, "a")) == (30, 0)
    (used,) = joined(a=listed({first: 30, second: 20}, memory)).used
    assert (used.host_pid, used.sm_util, used.memory) == (host_pid, 30, 100)
    dropped = joined(owners={host_pid}, a=device({host_pid: 30}, dropped=frozenset({first})))
    assert dropped.utilization(host_pid, "a") is None


@pytest.mark.parametrize(
    ("cgroup", "hami", "reason", "container"),
    [
        ("/user.slice/session-1.scope", True, SampleReason.NOT_IN_CONTAINER, ""),
        (f"/docker/{CID}", False, SampleReason.NO_SHARED_REGION, CID),
        (f"/docker/{CID}", True, SampleReason.NO_SLOT, CID),
        (f"/kubepods/besteffort/podx/{CID[::-1]}", True, SampleReason.NO_SHARED_REGION, CID[::-1]),
    ],
)
def test_a_process_without_a_slot_keeps_a_reason(
    tmp_path: Path, cgroup: str, reason: SampleReason, container: str, *, hami: bool
) -> None:
    proc = FakeProc(tmp_path)
    proc.put(500, 7, cgroup=f"0::{cgroup}")
    result = joined({500: 30}, owners={10}, hami={CID} if hami else set(), procfs=proc.procfs)
    assert result.orphans == (Sample(500, "GPU-a", 30, reason, container or None),)
    assert result.utilization(500, "GPU-a") is None


def test_a_process_that_ended_still_has_its_container(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    proc.put(500, 7, cgroup=f"0::/docker/{CID}")
    proc.put(550, 7, cgroup="0::/user.slice/session-1.scope")
    pidmap = PidMap(ScanSource(proc.procfs))
    pidmap.name_container(600, "uid_main")  # the process owned a slot
    status = (thread := proc.put(501, 7)) / "status"
    status.write_text(status.read_text().replace("Tgid:\t501", "Tgid:\t500"))
    (thread / "task/501").rename(thread / "task/500")
    alive = joined({501: 30, 550: 3}, procfs=proc.procfs, pidmap=pidmap)
    assert alive.orphans == (
        Sample(501, "GPU-a", 30, SampleReason.NO_SHARED_REGION, CID),
        Sample(550, "GPU-a", 3, SampleReason.NOT_IN_CONTAINER, None),
    )
    for host_pid in (500, 550):
        shutil.rmtree(tmp_path / str(host_pid))
    assert joined({500: 30, 550: 3, 600: 4, 700: 5}, procfs=proc.procfs, pidmap=pidmap).orphans == (
        Sample(500, "GPU-a", 30, SampleReason.PROCESS_ENDED, CID),
        Sample(550, "GPU-a", 3, SampleReason.PROCESS_ENDED, None),
        Sample(600, "GPU-a", 4, SampleReason.PROCESS_ENDED, "uid_main"),
        Sample(700, "GPU-a", 5, SampleReason.PID_UNKNOWN, None),  # the process ended before any scan
    )


@pytest.mark.parametrize("nvml_pid", [0, 2**22 + 5, 2**31 - 1, 2**32 - 1])
def test_a_number_that_no_process_has_had(nvml_pid: int) -> None:
    result = joined({nvml_pid: 30})
    assert result.orphan_reasons() == Counter({SampleReason.PID_UNKNOWN: 1})
    assert result.used == (Used(nvml_pid, "GPU-a", "", 30, None, SampleReason.PID_UNKNOWN),)


def listed(load: dict[int, int], memory: dict[int, int | None] | None, **changes: Any) -> DeviceSamples:
    return replace(device(load), memory=memory, **changes)


@pytest.mark.parametrize("status", [OK, FAILED, UNSUPPORTED])
def test_process_comes_from_its_sample_or_from_the_list(tmp_path: Path, status: str) -> None:
    """A process without a sample still has a known memory use."""
    proc = FakeProc(tmp_path)
    proc.put(500, 7, cgroup=f"0::/docker/{CID}")
    result = joined(
        owners={10, 11},
        procfs=proc.procfs,
        a=listed({10: 42}, {11: 5, 500: 6, 10: None}, status=status),
        b=listed({11: 7, 500: 7}, None),
    )
    load, idle = (42, 0) if status == OK else (None, None)
    assert set(result.used) == {
        Used(10, "a", "", load, None, None),
        Used(11, "a", "", idle, 5, None),
        Used(500, "a", CID, idle, 6, SampleReason.NO_SHARED_REGION),
        Used(11, "b", "", 7, None, None),
        Used(500, "b", CID, 7, None, SampleReason.NO_SHARED_REGION),
    }
    assert result.listed == {"a"}
    assert result.utilization(500, "b") is None, "its slot may be found before the next answer"


def test_changes_between_two_answers() -> None:
    def answer(load: dict[int, int], dropped: frozenset[int] = frozenset(), status: str = OK) -> Joined:
        return joined(owners={10, 11, 12}, a=device(load, dropped, status))

    first = answer({10: 42, 11: 5}, frozenset({12}))
    assert first.changed(first) == set()
    assert first.changed(None) is None
    assert first.changed(answer({}, status=FAILED)) is None, "another device answers: it may be any"
    assert answer({10: 42, 11: 6}, frozenset({12})).changed(first) == {11}
    assert answer({10: 42}).changed(first) == {11, 12}
    assert NOTHING.at == 0.0
