"""The BPF map compared with ``/proc``, while processes and namespaces come and go by the hundred thousand."""

import asyncio
import contextlib
import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resolver.linux.procfs import HOST_PIDNS, Procfs
from resolver.pids import bpf_map
from resolver.pids.bpf import BpfSource
from resolver.pids.bpf_map import LAYOUTS, KernelMap, Record, sizes, start
from resolver.pids.ladder import Ladder
from resolver.pids.source import PidSource
from tests.fakes.bpf.lives import (
    Life,
    candidates,
    child_of,
    children_of,
    compare,
    drift,
    firsts,
    ns_pids,
    put,
    reconcile,
    take_out,
    truth,
)
from tests.fakes.process import watched
from tests.patience import until

WRONG = ("full", "read_failed", "levels_truncated")


@pytest.fixture(scope="module")
def pidmap(kept_in: str) -> Iterator[KernelMap]:
    started = start(kept_in=kept_in)
    begun = started.counters()
    yield started
    assert {name: started.counters()[name] - begun[name] for name in WRONG} == dict.fromkeys(WRONG, 0)
    assert started.missed_events() == 0
    started.close()


def compared(pidmap: KernelMap) -> int:
    wrong, count = compare(pidmap)
    assert wrong == []
    return count


def no_drift(pidmap: KernelMap) -> None:
    reconcile(pidmap)  # the first comparison repairs gaps of the seeding
    assert drift(pidmap, pidmap.counters()["update_failed"]) == 0


@pytest.mark.parametrize("forks", [3_000, pytest.param(200_000, marks=pytest.mark.long)])
def test_forks_in_a_namespace_that_uses_its_numbers_again(pidmap: KernelMap, lives: Path, forks: int) -> None:
    missing, checks, seen, failed = [], 0, 0, pidmap.counters()["update_failed"]
    with Life(lives, "storm", str(forks), "100", "600") as storm:
        init = child_of(storm.ready().host_pid)
        pidns = Procfs().pidns(init)
        assert pidmap.lookup(pidns, 1) == pidmap.by_host(init)
        os.set_blocking(storm.stdout.fileno(), False)
        said = b""
        while not said.endswith(b"\n"):
            said += storm.stdout.read() or b""
            seen += compared(pidmap)
            missing.append(reconcile(pidmap))
            checks += 1
            time.sleep(0.25)
        word, wraps = said.split()
        assert word == b"done"
        assert int(wraps) > forks // 700
        assert len(children_of(init)) == 100
        for host_pid in children_of(init):
            record = pidmap.by_host(host_pid)
            assert record is not None
            assert pidmap.lookup(*record.levels[-1]) == record
            assert ns_pids(record) == Procfs().ns_pids(host_pid)
            assert host_pid in candidates(pidmap, ns_pids(record)[-1])
    assert checks > 1
    # A hundred are kept alive; one that was replaced between two readings is not compared.
    assert seen > 50 * checks
    # A fork that meets a walk at one number is counted. Its process may be missing until the next walk.
    met = pidmap.counters()["update_failed"] - failed
    assert met <= 1 + forks // 300
    assert len([each for each in missing if each]) <= 2 * met
    no_drift(pidmap)
    compared(pidmap)
    left = firsts(pidmap).get(pidns)
    assert left is None or left[0] != init, "another process may have this number of a namespace by now"


@pytest.mark.alone
def test_a_crowded_map_has_every_process(lives: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(start_with_room_for(4000, monkeypatch)) as crowded:
        with Life(lives, "many", "300") as many:
            many.ready()
            for host_pid in children_of(many.host_pid):
                record = crowded.by_host(host_pid)
                assert record is not None
                assert ns_pids(record) == Procfs().ns_pids(host_pid)
                assert crowded.lookup(*record.levels[-1]) == record
            compared(crowded)
            many.end()
        with Life(lives, "storm", "3000", "100", "600") as storm:
            storm.ready()
            while not select.select([storm.stdout], [], [], 0.05)[0]:
                compared(crowded)
        assert reconcile(crowded) == 0
        assert {name: crowded.counters()[name] for name in WRONG} == dict.fromkeys(WRONG, 0)


def test_fork_during_walk_is_counted_and_repaired(pidmap: KernelMap) -> None:
    """A walk enters a process that is then reaped, a fork meets the entry, and the walk removes its own.

    The test repeats this if other processes of the machine get the next PIDs.
    """
    until(lambda: met_a_walk(pidmap), "a fork that meets a walk")


def met_a_walk(pidmap: KernelMap) -> bool:
    processes, level = pidmap.processes, LAYOUTS["level"]
    last = os.posix_spawn("/bin/true", ["true"], {})  # os.fork would copy this whole Python
    os.waitpid(last, 0)
    numbers = [
        number for number in range(last + 1, last + 400) if processes.lookup(HOST_PIDNS, number) is None
    ]
    failed = pidmap.counters()["update_failed"]
    for number in numbers:
        value = LAYOUTS["process"].pack(1, number, 0, 1, HOST_PIDNS, number)
        put(processes, level.pack(HOST_PIDNS, number), value)
    forked = os.fork()  # without an exec, which would repair the entry
    if not forked:
        signal.pause()
        os._exit(0)
    for number in numbers:
        entry = processes.lookup(HOST_PIDNS, number)
        if number == forked or (entry and entry[0] == 1):  # other entries are not this test's
            put(processes, level.pack(HOST_PIDNS, number), b"")
    try:
        if pidmap.by_host(forked) is not None:
            return False
        assert pidmap.counters()["update_failed"] > failed
        assert not pidmap.complete()
        assert reconcile(pidmap) > 0
        assert pidmap.by_host(forked) is not None
        assert pidmap.complete()
        return True
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)


def test_two_hundred_namespaces_in_a_row(pidmap: KernelMap, lives: Path) -> None:
    inodes = set()
    with Life(lives, "row", "200") as row:
        for number in range(200):
            row.ready()
            init = child_of(row.host_pid)
            pidns = Procfs().pidns(init)
            inodes.add(pidns)
            assert firsts(pidmap)[pidns][0] == init
            family = {1: init, **dict(zip((2, 3, 4), children_of(init), strict=True))}
            for ns_pid, host_pid in family.items():
                record = pidmap.lookup(pidns, ns_pid)
                assert record is not None
                assert record.host_pid == host_pid
                assert record.levels == ((HOST_PIDNS, host_pid), (pidns, ns_pid))
                assert host_pid in candidates(pidmap, ns_pid)
            with watched(init) as gone:
                row.nudge()
                until(gone, "the end of the namespace")
            for ns_pid in family:
                left = pidmap.lookup(pidns, ns_pid)
                assert left is None or left.host_pid not in family.values()
            if number % 20 == 0:
                compared(pidmap)
    assert len(inodes) < 200, "the kernel did not use a namespace's number again, so nothing was shown"
    no_drift(pidmap)


def start_with_room_for(more: int, monkeypatch: pytest.MonkeyPatch) -> KernelMap:
    """Start a map with room for ``more`` further numbers; again if other processes took it meanwhile."""
    while True:
        numbers = sum(map(len, truth().living.values()))  # a process in a container has two
        small_sizes = sizes(32_768) | {"LEVELS": numbers + more}
        monkeypatch.setattr(bpf_map, "sizes", lambda _, these=small_sizes: these)
        small = start()
        if small.complete():
            return small
        small.close()


@pytest.mark.alone
def test_full_map_is_counted_and_holds_no_wrong_entry(lives: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(start_with_room_for(100, monkeypatch)) as small:
        with Life(lives, "many", "1500") as many:
            many.ready()
            children = children_of(many.host_pid)
            found: list[Record] = [record for record in map(small.by_host, children) if record]
            assert 0 < len(found) < len(children)
            assert all(ns_pids(record) == Procfs().ns_pids(record.host_pid) for record in found)
            assert small.counters()["full"] >= len(children) - len(found)
            assert not small.complete()
            assert reconcile(small) > 500
            assert not small.complete()
            many.end()
        reconcile(small)  # enter other processes that came while there was no room
        until(lambda: reconcile(small) == 0, "a map that has everybody")
        assert small.complete()
        compared(small)


def test_namespaces_too_many_are_counted(lives: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_namespace = sizes(32_768) | {"NAMESPACES": 1}
    monkeypatch.setattr(bpf_map, "sizes", lambda _: one_namespace)
    with contextlib.closing(start()) as small, Life(lives, "nested", "4") as nested:
        nested.ready()
        assert not small.complete()
        assert small.counters()["full"] > 0


def test_a_process_that_was_missed_is_entered_when_it_execs(pidmap: KernelMap) -> None:
    with subprocess.Popen(["/bin/sh", "-c", "read x; exec cat"], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        until(lambda: pidmap.by_host(process.pid), "the fork")
        before, counted = pidmap.by_host(process.pid), pidmap.counters()["mended_at_exec"]
        take_out(pidmap, process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        until(lambda: pidmap.by_host(process.pid), "the exec")
        assert pidmap.by_host(process.pid) == before
        assert pidmap.counters()["mended_at_exec"] > counted  # processes of other tests count, too
        process.stdin.close()


def test_numbers_that_cannot_be_are_not_there(pidmap: KernelMap) -> None:
    for number in (0, -1, 1 << 31, 1 << 40):
        assert pidmap.by_host(number) is None
        assert pidmap.lookup(HOST_PIDNS, number) is None
        assert pidmap.lookup(12345, number) is None
        assert pidmap.lookup(1 << 40, number) is None
        assert candidates(pidmap, number) == []


def test_a_map_without_its_probes_is_left_at_the_next_walk(kept_in: str) -> None:
    """The daemon falls back to the scan at once, and tries a new map after five seconds."""
    source = BpfSource(start(kept_in=kept_in), Procfs())
    assert source.tend_at <= time.monotonic() + 10
    for hook in ("sched_process_fork", "sched_process_exec", "sched_process_exit"):
        os.close(source.bpf.loaded.descriptors.pop(hook))
    used: list[PidSource] = []
    ladder = Ladder("auto", Procfs(), 1024, used.append, lambda *_, **__: None)
    ladder.present, ladder.next_check = "bpf", math.inf
    with subprocess.Popen(["sleep", "1000"]) as child, contextlib.ExitStack() as at_the_end:
        at_the_end.callback(child.kill)
        assert child.pid not in source
        source.next_walk = 0.0
        while source.next_walk == 0.0 or source.tend_at == 0.0:
            source.tend()
        assert child.pid in source
        assert source.counters()["drift_missing"] > 0
        asyncio.run(ladder.tend(source))
        (scan,) = used
        assert (scan.name, child.pid in scan) == ("scan", True)
        assert ladder.next_climb <= time.monotonic() + 5
    source.close()
