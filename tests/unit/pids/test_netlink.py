"""Process events as bytes: their meaning, and the source's reaction to each."""

import shutil
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from resolver.base.errors import AccessDenied
from resolver.linux.procfs import ProcessIdentity, Procfs
from resolver.pids.netlink import NetlinkSource
from resolver.pids.proc_events import EventStream
from tests.fakes.procs import FakeProc, changes, numbers

FORK, UID, EXIT = 1, 4, 0x80000000
NO_CPU = 0xFFFFFFFF  # in an old kernel's acknowledgement, which has no sequence number


class Kernel:
    """The kernel's end of `stream`: sends events as the kernel would."""

    def __init__(self, ours: socket.socket, channel: socket.socket) -> None:
        self.stream, self._channel = EventStream(ours), channel
        self.sequence: dict[int, int] = {}

    def send(self, what: int, *words: int, cpu: int = 0) -> None:
        sequence = self.sequence.get(cpu, 0)
        self.sequence[cpu] = (sequence + 1) % (1 << 32)
        event = struct.pack("=IIQ6I", what, cpu, 1, *words, *[0] * (6 - len(words)))
        connector = struct.pack("=IIIIHH", 1, 1, sequence, 0, len(event), 0)
        self.raw(struct.pack("=IHHII", 16 + len(connector + event), 3, 0, 0, 0) + connector + event)

    def raw(self, message: bytes) -> None:
        self._channel.send(message)

    def fork(self, tid: int, tgid: int | None = None) -> None:
        self.send(FORK, 1, 1, tid, tid if tgid is None else tgid)

    def exit(self, tid: int, tgid: int | None = None) -> None:
        self.send(EXIT, tid, tid if tgid is None else tgid, 0, 17)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    ours, kernels = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, kernels:
        yield Kernel(ours, kernels)


@pytest.fixture
def stream(kernel: Kernel) -> EventStream:
    return kernel.stream


def test_processes_are_named_and_threads_are_not(stream: EventStream, kernel: Kernel) -> None:
    kernel.fork(100)
    kernel.fork(101, 100)
    kernel.fork(200)
    kernel.exit(101, 100)
    kernel.exit(200)
    kernel.send(UID, 100, 100, 0, 0)
    assert stream.drain() == 6
    assert (stream.touched, stream.ended) == ({100, 200}, {200})
    assert (stream.emptied, stream.incomplete) == (True, False)


def test_a_drain_is_bounded_and_says_so(stream: EventStream, kernel: Kernel) -> None:
    for host_pid in range(1, 6):
        kernel.fork(host_pid)
    assert stream.drain(3) == 3
    assert not stream.emptied
    assert stream.drain(3) == 2
    assert stream.emptied
    assert stream.events == 5


@pytest.mark.parametrize(
    ("cpu", "first", "then", "gaps"),
    [(3, 7000, 7002, 1), (0, (1 << 32) - 1, 0, 0), (0, 1000, 5, 1), (NO_CPU, 4711, 3, 0)],
)
def test_lost_event_is_noticed_by_sequence_number(
    stream: EventStream, kernel: Kernel, cpu: int, first: int, then: int, gaps: int
) -> None:
    kernel.sequence[cpu] = first
    kernel.send(FORK, 1, 1, 1, 1, cpu=cpu)
    kernel.send(FORK, 1, 1, 2, 2, cpu=1)
    kernel.sequence[cpu] = then
    kernel.send(FORK, 1, 1, 3, 3, cpu=cpu)
    kernel.send(FORK, 1, 1, 4, 4, cpu=1)
    stream.drain()
    assert (stream.gaps, stream.incomplete, stream.touched) == (gaps, bool(gaps), {1, 2, 3, 4})


OTHERS: Final = struct.pack("=IIIIHHIIQ6I", 1, 2, 0, 0, 40, 0, FORK, 0, 1, 1, 1, 9, 9, 0, 0)


@pytest.mark.parametrize("message", [b"", b"\1" * 16, b"\1" * 36, b"\1" * 75, bytes(16) + OTHERS])
def test_invalid_message_causes_a_rescan(stream: EventStream, kernel: Kernel, message: bytes) -> None:
    kernel.fork(1)
    kernel.raw(message)
    kernel.fork(2)
    stream.drain()
    assert stream.incomplete
    assert stream.touched == {1, 2}


class Fixture(FakeProc):
    """A ``/proc`` of files, and a source on it."""

    def __init__(self, root: Path, kernel: Kernel) -> None:
        super().__init__(root)
        self.kernel = kernel
        self.source = NetlinkSource(Procfs(str(root)), kernel.stream)
        self.put(1)
        for host_pid in range(900, 950):  # so many that a listing costs more than one read
            self.put(host_pid)
        self.source.refresh()

    def stop(self, host_pid: int) -> None:
        shutil.rmtree(self.root / str(host_pid))

    def changes(self) -> tuple[list[int], list[int]]:
        return changes(self.source)


@pytest.fixture
def fixture(tmp_path: Path, kernel: Kernel) -> Fixture:
    return Fixture(tmp_path, kernel)


def test_without_events_proc_is_left_alone(fixture: Fixture) -> None:
    fixture.put(100)
    assert fixture.changes() == ([], [])
    fixture.kernel.fork(100)
    assert fixture.changes() == ([100], [])
    assert fixture.source.listings == 1


def test_one_process_is_looked_at_before_its_event_came(fixture: Fixture) -> None:
    fixture.put(100, 7)
    assert changes(fixture.source, look=100) == ([100], [])
    assert numbers(fixture.source)[100] == (100, 7)
    fixture.kernel.fork(100)
    assert fixture.changes() == ([], [])
    fixture.stop(100)
    assert changes(fixture.source, look=100) == ([], [100])
    fixture.kernel.exit(100)
    assert fixture.changes() == ([], [])
    assert fixture.source.listings == 1


def test_scan_notices_a_zombie_with_a_lost_exit(fixture: Fixture) -> None:
    fixture.put(100)
    fixture.kernel.fork(100)
    fixture.changes()
    fixture.stop(100)
    fixture.put(100, state="Z")
    fixture.kernel.raw(b"")  # counts as a loss of events
    fixture.changes()
    assert fixture.source.rescans == 1
    fixture.stop(100)
    assert fixture.changes() == ([], [100])


def test_many_named_processes_are_listed_at_once(fixture: Fixture) -> None:
    for host_pid in range(100, 120):
        fixture.put(host_pid)
        fixture.kernel.fork(host_pid)
    assert fixture.changes() == (list(range(100, 120)), [])
    assert (fixture.source.listings, fixture.source.rescans) == (2, 0)


def test_abandoned_refresh_loses_nothing(fixture: Fixture) -> None:
    for host_pid in (100, 101):
        fixture.put(host_pid)
        fixture.kernel.fork(host_pid)
    next(fixture.source.refreshing())
    steps = sum(1 for _ in fixture.source.refreshing())
    assert steps > 50, "a scan in one go"
    assert numbers(fixture.source).keys() >= {100, 101}


def test_unreadable_processes_are_counted_until_readable(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Procfs, host_pid: int) -> ProcessIdentity:
        raise AccessDenied(f"{host_pid} may not be read")

    fixture.put(100)
    fixture.kernel.fork(100)
    with monkeypatch.context() as patch:
        patch.setattr(Procfs, "hold", refuse)
        for _ in range(2):
            assert fixture.changes() == ([], [])
            assert fixture.source.incomplete() == "1 processes could not be read"
    assert fixture.changes() == ([100], [])
    fixture.changes()
    assert fixture.source.trouble() == ""


def test_a_socket_that_breaks_is_no_reason_to_fall_behind(fixture: Fixture) -> None:
    fixture.source.close()
    fixture.put(100)
    assert fixture.changes() == ([100], [])
    fixture.stop(100)
    assert fixture.changes() == ([], [100])
    assert "socket failed" in fixture.source.trouble()
