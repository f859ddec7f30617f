"""Every odd way in which a process can live and end, as the BPF map sees it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from resolver.linux.procfs import HOST_PIDNS, Procfs
from resolver.pids.bpf_map import KernelMap, Record, start
from tests.fakes.bpf.lives import (
    Life,
    candidates,
    child_of,
    drift,
    everybody,
    firsts,
    ns_pids,
    reconcile,
    start_time,
)
from tests.fakes.process import watched
from tests.patience import until


@pytest.fixture(scope="module")
def pidmap(kept_in: str) -> Iterator[KernelMap]:
    with contextlib.closing(start(kept_in=kept_in)) as started:
        yield started


@pytest.fixture(autouse=True)
def no_drift(pidmap: KernelMap) -> Iterator[None]:
    """Check after each test that the map has neither lost nor kept a process."""
    reconcile(pidmap)
    failed = pidmap.counters()["update_failed"]
    yield
    assert drift(pidmap, failed) == 0


def found(pidmap: KernelMap, host_pid: int) -> Record:
    """Return a process's record; check that each of its numbers leads to it, and that /proc agrees."""
    record = pidmap.by_host(host_pid)
    assert record is not None, f"process {host_pid} is not in the map"
    procfs = Procfs()
    assert (start_time(record), ns_pids(record)) == (procfs.start_time(host_pid), procfs.ns_pids(host_pid))
    for level in record.levels:
        assert pidmap.lookup(*level) == record
    assert host_pid in candidates(pidmap, ns_pids(record)[-1])
    assert everybody(pidmap)[host_pid] == record
    return record


def gone(pidmap: KernelMap, record: Record) -> None:
    """Check that no number leads to the record; other processes may have the numbers."""
    assert record not in [
        pidmap.by_host(record.host_pid),
        *(pidmap.lookup(*level) for level in record.levels),
    ]


@pytest.mark.parametrize("kind", ["leader-first", "thread-execs", "threads 1000"])
def test_threads_are_one_process_with_the_leaders_number(pidmap: KernelMap, lives: Path, kind: str) -> None:
    """Holds also if the leader ends before its threads, and if a thread takes its place by exec."""
    with Life(lives, *kind.split()) as process:
        first = pidmap.by_host(process.host_pid)
        process.ready()
        if kind == "leader-first":
            assert "State:\tZ" in Path(f"/proc/{process.host_pid}/status").read_text()
        record = found(pidmap, process.host_pid)
        assert first == record
        threads = [int(tid) for tid in os.listdir(f"/proc/{process.host_pid}/task")]
        assert len(threads) == 1001 or not kind.endswith("1000")
        assert [tid for tid in threads if pidmap.by_host(tid)] == [process.host_pid]
        process.end()
        gone(pidmap, record)


def test_a_vforked_child_is_a_process_before_and_after_it_execs(pidmap: KernelMap, lives: Path) -> None:
    with Life(lives, "vfork") as process:
        assert process.line() == "vforked"
        child = child_of(process.host_pid)
        before = found(pidmap, child)
        process.nudge()
        process.ready()
        assert found(pidmap, child) == before
        process.end()
        gone(pidmap, before)


def test_a_process_that_enters_a_namespace_and_forks(pidmap: KernelMap, lives: Path) -> None:
    with Life(lives, "clone") as container:
        init = child_of(container.ready().host_pid)
        with Life(lives, "enter", f"/proc/{init}/ns/pid") as guest:
            child = child_of(guest.ready().host_pid)
            record = found(pidmap, child)
            assert record.levels == ((HOST_PIDNS, child), (Procfs().pidns(init), 2))
            assert len(found(pidmap, guest.host_pid).levels) == 1, (
                "the entering process stays in its namespace"
            )
            guest.end()
            gone(pidmap, record)


@pytest.mark.parametrize("depth", [1, 3, 32])
def test_every_level_of_nested_namespaces(pidmap: KernelMap, lives: Path, depth: int) -> None:
    """The kernel allows 32 levels below its own (MAX_PID_NS_LEVEL)."""
    with Life(lives, "nested", str(depth)) as process:
        process.ready()
        innermost = process.host_pid
        chain = [innermost]
        for _ in range(depth):
            innermost = child_of(innermost)
            chain.append(innermost)
        records = [found(pidmap, host_pid) for host_pid in chain]
        assert [len(record.levels) for record in records] == list(range(1, depth + 2))
        assert tuple(pidns for pidns, _ in records[-1].levels) == Procfs().pidns_chain(innermost)
        with watched(chain[1]) as ended:
            process.end()
            until(ended, "the end of the namespaces")
        for record in records:
            gone(pidmap, record)


def test_processes_older_than_the_probes_are_seeded(lives: Path, kept_in: str) -> None:
    with Life(lives, "nested", "3") as nested, Life(lives, "leader-first") as headless:
        nested.ready()
        headless.ready()
        with contextlib.closing(start(kept_in=kept_in)) as late:
            innermost = child_of(child_of(child_of(nested.host_pid)))
            record = found(late, innermost)
            assert len(record.levels) == 4
            found(late, headless.host_pid)
            assert Procfs().pidns(innermost) in firsts(late)
            nested.end()
            until(lambda: late.by_host(innermost) != record, "the end of the namespaces")
