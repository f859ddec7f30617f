"""Process events as bytes: what each one means, what is lost and how that is known."""

from __future__ import annotations

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
from tests.fakes.procs import changes, numbers

NONE, FORK, EXEC, UID, EXIT = 0, 1, 2, 4, 0x80000000
NO_CPU = 0xFFFFFFFF


class Kernel:
    """The other end of `stream`: sends what the kernel would, with a sequence of its own for each CPU."""

    def __init__(self, ours: socket.socket, channel: socket.socket) -> None:
        self.stream, self._channel = EventStream(ours), channel
        self.sequence: dict[int, int] = {}

    def send(self, what: int, *words: int, cpu: int = 0, ack: int = 0) -> None:
        sequence = self.sequence.get(cpu, 0)
        self.sequence[cpu] = (sequence + 1) % (1 << 32)
        event = struct.pack("=IIQ6I", what, cpu, 1, *words, *[0] * (6 - len(words)))
        connector = struct.pack("=IIIIHH", 1, 1, sequence, ack, len(event), 0)
        self.raw(struct.pack("=IHHII", 16 + len(connector + event), 3, 0, 0, 0) + connector + event)

    def raw(self, message: bytes) -> None:
        self._channel.send(message)

    def fork(self, tid: int, tgid: int | None = None, *, cpu: int = 0) -> None:
        self.send(FORK, 1, 1, tid, tid if tgid is None else tgid, cpu=cpu)

    def exit(self, tid: int, tgid: int | None = None, *, cpu: int = 0) -> None:
        self.send(EXIT, tid, tid if tgid is None else tgid, 0, 17, cpu=cpu)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    ours, kernels = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, kernels:
        yield Kernel(ours, kernels)


@pytest.fixture
def stream(kernel: Kernel) -> EventStream:
    return kernel.stream


# ---- what an event means ------------------------------------------------------------------------------------------


def test_processes_are_named_and_threads_are_not(stream: EventStream, kernel: Kernel) -> None:
    kernel.fork(100)
    kernel.fork(101, 100)
    kernel.fork(200, cpu=1)
    kernel.exit(101, 100)
    kernel.exit(200, cpu=1)
    kernel.send(UID, 100, 100, 0, 0)
    assert stream.drain() == 6
    assert (stream.touched, stream.ended) == ({100, 200}, {200})
    assert (stream.emptied, stream.incomplete, stream.lost) == (True, False, {})


def test_a_drain_is_bounded_and_says_so(stream: EventStream, kernel: Kernel) -> None:
    for host_pid in range(1, 6):
        kernel.fork(host_pid)
    assert stream.drain(3) == 3
    assert not stream.emptied
    assert stream.drain(3) == 2
    assert stream.emptied
    assert stream.events == 5


# ---- what is lost -------------------------------------------------------------------------------------------------


def test_losses_are_counted_exactly_for_each_cpu(stream: EventStream, kernel: Kernel) -> None:
    kernel.sequence = {0: 7000, 3: (1 << 32) - 2}
    kernel.fork(1, cpu=0)
    kernel.fork(2, cpu=3)
    kernel.sequence[0] += 5
    kernel.sequence[3] = 9  # of the numbers after 2**32 - 2 are lost 2**32 - 1 and 0 to 8
    kernel.fork(3, cpu=0)
    kernel.fork(4, cpu=3)
    kernel.fork(5, cpu=3)
    kernel.sequence[0] += 1
    kernel.fork(6, cpu=0)
    stream.drain()
    assert stream.lost == {0: 6, 3: 10}
    assert stream.incomplete
    assert stream.touched == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize(("first", "then", "incomplete"), [((1 << 32) - 1, 0, False), (1000, 5, True)])
def test_a_sequence_that_goes_back_has_wrapped_or_lost_an_unknown_number(
    stream: EventStream, kernel: Kernel, first: int, then: int, *, incomplete: bool
) -> None:
    kernel.sequence[0] = first
    kernel.fork(1)
    kernel.sequence[0] = then
    kernel.fork(2)
    stream.drain()
    assert (stream.lost, stream.incomplete) == ({}, incomplete)


def test_the_acknowledgement_of_an_old_kernel_has_no_sequence_number(
    stream: EventStream, kernel: Kernel
) -> None:
    kernel.fork(1)
    kernel.sequence[NO_CPU] = 4711
    kernel.send(NONE, 0, cpu=NO_CPU, ack=5)
    kernel.sequence[NO_CPU] = 3
    kernel.send(NONE, 0, cpu=NO_CPU, ack=9)
    kernel.fork(2)
    stream.drain()
    assert (stream.lost, stream.incomplete) == ({}, False)


OTHERS: Final = struct.pack("=IIIIHHIIQ6I", 1, 2, 0, 0, 40, 0, FORK, 0, 1, 1, 1, 9, 9, 0, 0)


@pytest.mark.parametrize("message", [b"", b"\1" * 16, b"\1" * 36, b"\1" * 75, bytes(16) + OTHERS])
def test_a_short_message_or_another_connectors_is_counted_and_not_understood(
    stream: EventStream, kernel: Kernel, message: bytes
) -> None:
    kernel.fork(1)
    kernel.raw(message)
    kernel.fork(2)
    stream.drain()
    assert (stream.malformed, stream.incomplete, stream.lost) == (1, True, {})
    assert stream.touched == {1, 2}


# ---- what the source makes of it ----------------------------------------------------------------------------------


class Fixture:
    """A ``/proc`` of files, and a source on it."""

    def __init__(self, root: Path, kernel: Kernel) -> None:
        self.root, self.kernel = root, kernel
        self.source = NetlinkSource(Procfs(str(root)), kernel.stream)
        self.start(1)
        for host_pid in range(900, 950):  # enough of them that a listing costs more than a look
            self.start(host_pid)
        self.source.refresh()

    def start(self, host_pid: int, *, tgid: int | None = None, ns_pid: int = 0, state: str = "S") -> None:
        numbers = f"{host_pid}\t{ns_pid}" if ns_pid else f"{host_pid}"
        directory = self.root / str(host_pid)
        directory.mkdir()
        status = f"Name:\tx\nState:\t{state}\nTgid:\t{tgid or host_pid}\nPPid:\t1\nNSpid:\t{numbers}\n"
        (directory / "status").write_text(status)

    def stop(self, host_pid: int) -> None:
        shutil.rmtree(self.root / str(host_pid))

    def refresh(self) -> tuple[list[int], list[int]]:
        return changes(self.source)


@pytest.fixture
def fixture(tmp_path: Path, kernel: Kernel) -> Fixture:
    return Fixture(tmp_path, kernel)


def test_without_events_proc_is_left_alone(fixture: Fixture) -> None:
    fixture.start(100)
    assert fixture.refresh() == ([], [])
    fixture.kernel.fork(100)
    assert fixture.refresh() == ([100], [])
    assert fixture.source.listings == 1


def test_one_process_is_looked_at_before_its_event_came(fixture: Fixture) -> None:
    fixture.start(100, ns_pid=7)
    assert changes(fixture.source, look=100) == ([100], [])
    assert numbers(fixture.source)[100] == (100, 7)
    fixture.kernel.fork(100)
    assert fixture.refresh() == ([], [])
    fixture.stop(100)
    assert changes(fixture.source, look=100) == ([], [100])
    fixture.kernel.exit(100)
    assert fixture.refresh() == ([], [])
    assert (fixture.source.listings, fixture.source.drift) == (1, 0)


def test_a_zombie_whose_end_was_lost_is_found_by_the_scan(fixture: Fixture) -> None:
    fixture.start(100)
    fixture.kernel.fork(100)
    fixture.refresh()
    fixture.stop(100)
    fixture.start(100, state="Z")
    fixture.kernel.sequence[0] += 3
    fixture.kernel.fork(2)
    fixture.refresh()
    assert (fixture.source.rescans, fixture.source.stream.lost) == (1, {0: 3})
    fixture.stop(100)
    assert fixture.refresh() == ([], [100])


def test_many_named_processes_are_listed_at_once(fixture: Fixture) -> None:
    for host_pid in range(100, 120):
        fixture.start(host_pid)
        fixture.kernel.fork(host_pid)
    assert fixture.refresh() == (list(range(100, 120)), [])
    assert (fixture.source.listings, fixture.source.rescans) == (2, 0)


def test_what_may_not_be_read_is_counted_until_it_can(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Procfs, host_pid: int) -> ProcessIdentity:
        raise AccessDenied(f"{host_pid} may not be read")

    fixture.start(100)
    fixture.kernel.fork(100)
    with monkeypatch.context() as patch:
        patch.setattr(Procfs, "status", refuse)
        for _ in range(2):
            assert fixture.refresh() == ([], [])
            assert fixture.source.incomplete() == "1 processes could not be read"
    assert fixture.refresh() == ([100], [])
    fixture.refresh()
    assert (fixture.source.drift, fixture.source.trouble()) == (0, "")


def test_what_no_event_explains_is_drift(fixture: Fixture) -> None:
    source = fixture.source
    fixture.start(100)
    fixture.start(101)
    fixture.stop(901)
    source._next_reconcile = 0.0
    assert fixture.refresh() == ([100, 101], [901])
    fixture.kernel.fork(101)  # was on its way
    assert source.trouble() == ""
    assert fixture.refresh() == ([], [])
    assert source.drift == 2
    assert source.trouble() == "2 processes came or went without an event from the proc connector"


def test_a_socket_that_breaks_is_no_reason_to_fall_behind(fixture: Fixture) -> None:
    fixture.source.close()
    fixture.start(100)
    assert fixture.refresh() == ([100], [])
    fixture.stop(100)
    assert fixture.refresh() == ([], [100])
    assert "socket failed" in fixture.source.trouble()
