"""The real BPF map as a source: complete, too small, and no longer readable."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from resolver.base.errors import ProcessGone
from resolver.linux.procfs import Procfs
from resolver.pids.bpf import BpfSource
from resolver.pids.bpf_map import KernelMap, start
from tests.fakes.bpf.lives import child_of, take_out
from tests.kernel.rights import rights


@pytest.fixture(scope="module")
def maps() -> Iterator[tuple[KernelMap, KernelMap]]:
    """A large map, and one too small for any machine; shared, because LLVM takes seconds to load."""
    both = start(16_384), start(16)
    yield both
    for each in both:
        each.close()


def descriptors(pidmap: KernelMap) -> tuple[int, ...]:
    return pidmap.processes.fd, pidmap.namespaces.fd, pidmap._counters.fd


@pytest.fixture
def large(maps: tuple[KernelMap, KernelMap]) -> Iterator[BpfSource]:
    kept = {fd: os.dup(fd) for fd in descriptors(maps[0])}
    yield BpfSource(maps[0], Procfs())
    for fd, copy in kept.items():  # restores a map that a test broke
        os.dup2(copy, fd, inheritable=False)
        os.close(copy)


@pytest.fixture
def small(maps: tuple[KernelMap, KernelMap]) -> BpfSource:
    return BpfSource(maps[1], Procfs())


@contextmanager
def running(*wrapper: str) -> Iterator[int]:
    """Yield a child past its exec, whose event could otherwise restore an entry that a test removed."""
    pipe = subprocess.PIPE
    with subprocess.Popen([*wrapper, "cat"], stdin=pipe, stdout=pipe, bufsize=0) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"!")
        assert process.stdout.read(1) == b"!"
        yield process.pid
        process.kill()


@pytest.fixture
def child() -> Iterator[int]:
    with running() as host_pid:
        yield host_pid


def break_down(source: BpfSource) -> None:
    """Replace each descriptor of a map with /dev/null, as if the kernel had removed the map."""
    nothing = os.open("/dev/null", os.O_RDONLY)
    for fd in descriptors(source.bpf):
        os.dup2(nothing, fd)
    os.close(nothing)


def _living() -> int:
    procfs, living = Procfs(), 0
    for host_pid in procfs.entries():
        with suppress(ProcessGone), procfs.hold(host_pid) as held:
            living += held.alive()
    return living


def _tend(source: BpfSource) -> int:
    """Tend the source until no comparison is left; return the number of calls."""
    source.tend()
    calls = 1
    while source.comparing is not None:
        source.tend()
        calls += 1
    return calls


def _counted(source: BpfSource) -> int:
    source.next_walk = 0.0
    _tend(source)
    return len(source)


def test_limit_on_locked_memory_is_lifted() -> None:
    """Before Linux 5.11, a map of the default size exceeds the usual limit of 64 KiB."""
    code = "from resolver.pids.bpf_load import *; lift_locked_memory_limit(); print(open('/proc/self/limits').read())"
    limited = ["prlimit", "--memlock=65536:8388608", sys.executable, "-c", code]
    limits = subprocess.check_output(limited, text=True)
    ((soft, hard),) = re.findall(r"Max locked memory +(\S+) +(\S+)", limits)
    assert soft == hard == ("unlimited" if "SYS_RESOURCE" in rights(os.getpid()).effective else "8388608")


def test_a_map_with_room_needs_no_help(large: BpfSource, child: int) -> None:
    large.refresh()
    large.tend()
    assert (large.shortage(), large.incomplete(), large.trouble()) == ("", "", "")
    assert large.room == 16_384
    assert child in large
    assert large.candidates(child) == [child]
    assert large.arrival(child) // 10_000_000 == Procfs().start_time(child)
    off = [_counted(large) - _living() for _ in range(20)]
    assert min(map(abs, off)) <= 2, off  # other processes start and end meanwhile
    assert len(large.scan) == 0  # the scan was never asked


def test_process_is_a_candidate_in_each_nested_namespace(large: BpfSource, child: int) -> None:
    procfs, unshared = Procfs(), ["unshare", "--pid", "--fork", "--kill-child"]
    with running(*unshared, *unshared) as first:
        outer = child_of(first)
        inner = child_of(outer)
        assert len(procfs.ns_pids(inner)) == 3
        for host_pid in (child, outer, inner):
            ns_pid = procfs.ns_pids(host_pid)[-1]
            found = list(large.everywhere(ns_pid))
            assert host_pid in found
            assert sorted({*found} - {0}) == large.candidates(ns_pid)
            arrival = large.arrival(host_pid)
            assert large.namespaces_of(host_pid, arrival) == procfs.pidns_chain(host_pid)
            assert large.namespaces_of(host_pid, arrival + 1) == ()  # another process's time


def test_process_without_room_in_map_is_scanned(small: BpfSource, child: int) -> None:
    assert "raise --map-size" in small.shortage()
    assert small.counters()["full"] > 0
    before = set(Procfs().entries())
    small.refresh()
    assert len(small) >= len(before & set(Procfs().entries()))
    assert small.bpf.by_host(child) is None
    assert child in small
    assert small.candidates(child) == [child]
    assert small.arrival(child) > 0
    assert (small.incomplete(), small.trouble()) == ("", "")
    full = small.counters()["full"]
    small.next_walk = 0.0
    _tend(small)
    assert small.counters()["full"] > full  # still too small
    assert small.counters()["drift_missing"] > 0
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    small.refresh()
    assert child not in small


def test_a_comparison_that_takes_long_is_made_bit_by_bit(
    large: BpfSource, child: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 processes take 10 ms of CPU time; a process that starts or ends meanwhile is no drift."""
    monkeypatch.setattr("resolver.pids.bpf.SLICE_SECONDS", 0.0)
    monkeypatch.setattr("resolver.pids.bpf_map.SOME_PROCESSES", 8)
    large.next_walk = 0.0
    large.tend()
    assert large.comparing is not None
    take_out(large.bpf, child)
    with subprocess.Popen(["sleep", "1000"]) as later:
        large.tend()
        assert later.pid in large
        later.kill()
    assert _tend(large) > 1
    assert large.counters()["drift_missing"] == 1
    assert child in large


def test_event_missed_during_comparison_repeats_it(
    large: BpfSource, child: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resolver.pids.bpf.SLICE_SECONDS", 0.0)
    large.next_walk = 0.0
    large.tend()
    monkeypatch.setattr(large.bpf, "missed_events", lambda: 1)
    large.refresh()
    _tend(large)
    assert large.exact() is None
    large.next_walk = 0.0
    _tend(large)
    assert large.exact() is large.bpf


def test_absence_counts_only_after_comparison(
    large: BpfSource, child: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_out(large.bpf, child)
    large.refresh()
    assert child not in large
    monkeypatch.setattr(large.bpf, "missed_events", lambda: 1)
    large.refresh()
    assert large.candidates(child) == [child]
    assert large.exact() is None
    assert large.shortage() == ""
    large.next_walk = 0.0
    _tend(large)
    assert large.exact() is large.bpf
    assert child in large
    assert large.counters()["missed"] == 1


def test_the_scan_stands_in_for_a_map_that_fails(large: BpfSource, child: int) -> None:
    large.refresh()
    break_down(large)
    assert large.candidates(child) == [child]  # the lookup that finds the fault is still answered
    assert large.trouble().startswith("the map cannot be read: Invalid argument")
    assert (large.shortage(), large.incomplete()) == ("", "")
    with subprocess.Popen(["sleep", "1000"]) as later:
        large.refresh()
        assert later.pid in large
        assert large.candidates(later.pid) == [later.pid]
        later.kill()
    large.refresh()
    assert later.pid not in large
    assert large.counters() == {"drift_missing": 0, "missed": 0}


@pytest.mark.parametrize("ask", ["candidates", "arrival", "__contains__", "tend"])
def test_the_first_question_and_upkeep_find_the_trouble(large: BpfSource, ask: str) -> None:
    break_down(large)
    getattr(large, ask)(*([] if ask == "tend" else [os.getpid()]))
    assert large.trouble().startswith("the map cannot be read: Invalid argument")
    large.next_walk = 0.0
    large.tend()
    assert large.trouble()
