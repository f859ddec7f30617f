"""The host PID broker: its bytes, its path, its limits, and hostile clients."""

import asyncio
import contextlib
import os
import resource
import socket
import stat
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from resolver.base.errors import UsageError
from resolver.base.journal import Journal
from resolver.config import HostpidNamespace
from resolver.daemon import broker
from resolver.daemon.broker import Broker, opened
from resolver.hami.hostpid_policy import HostpidPolicy
from resolver.linux import peers
from resolver.linux.procfs import Procfs
from resolver.pids.pidmap import PidMap
from resolver.pids.scan import ScanSource
from tests.fakes import broker_client
from tests.fakes.broker_client import REQUEST, ask, connect, parse, receive
from tests.fakes.node import Node
from tests.fakes.pids import reborn
from tests.patience import never, until

HOST = HostpidPolicy(HostpidNamespace.HOST, "for a test")
CONTAINER = HostpidPolicy(HostpidNamespace.CONTAINER, "for a test")
UNKNOWN = HostpidPolicy(None, "for a test")
HALF_A_SECOND = broker.EXCHANGE_SECONDS


class Told(Journal):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, dict[str, Any]]] = []

    @property
    def log(self) -> Any:
        return self

    def __getattr__(self, _level: str) -> Any:
        return lambda event, **fields: self.lines.append((event, fields))


class Serving:
    def __init__(self, path: Path, policy: HostpidPolicy = HOST) -> None:
        self.path, self.policy = path, policy
        self.counters: Counter[str] = Counter()
        self.journal = Told()
        self.pidmap = PidMap(ScanSource(Procfs()))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        answering = Broker(Procfs(), self.pidmap, lambda: self.policy, self.journal, self.counters)
        self._task = asyncio.create_task(answering.serve(str(self.path)))
        self._ready.set()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def __enter__(self) -> Self:
        self._ready = threading.Event()
        self._thread.start()
        self._ready.wait()
        until(lambda: self.journal.lines, "its first log line")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert [line for line in self.journal.lines if line[0] == "internal_error"] == []

    def said(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in list(self.journal.lines) if name == event]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the socket's path; an exchange may take ten minutes, because clients may be starved."""
    monkeypatch.setattr(broker, "EXCHANGE_SECONDS", 600.0)
    return tmp_path / "hostpid" / "broker.sock"


@pytest.fixture
def served(path: Path) -> Iterator[Serving]:
    with Serving(path) as serving:
        yield serving


def raw(path: Path, sent: bytes = b"", *, end: bool = False) -> bytes:
    with connect(str(path)) as connection:
        connection.sendall(sent)
        if end:
            connection.shutdown(socket.SHUT_WR)
        return receive(connection)


INVALID_ANSWER = bytes.fromhex("48504944 0001 0001 00000000")
INVALID = (
    *(b"hpid\x00\x01\x00\x01", b"DIPH\x00\x01\x00\x01", b"HPID\x00\x02\x00\x01", b"HPID\x00\x00\x00\x01"),
    *(
        b"HPID\x00\x01\x00\x02",
        b"HPID\x00\x01\x00\x00",
        b"HPID\x01\x00\x01\x00",
    ),  # the last in another byte order
    *(bytes(8), b"\xff" * 8, b"GET / HTTP/1.1\r\n\r\n"),
)


def test_exchange_has_the_bytes_of_the_protocol(served: Serving, path: Path) -> None:
    answer = raw(path, bytes.fromhex("48504944 0001 0001"))
    assert answer == bytes.fromhex("48504944 0001 0000") + struct.pack(">I", os.getpid())
    assert served.said("broker_on") == [{"socket": str(path)}]
    for request in INVALID:
        with connect(str(path)) as connection:
            connection.sendall(request)
            assert connection.recv(64) == INVALID_ANSWER
            with contextlib.suppress(ConnectionResetError):  # unread bytes cause a reset after it
                assert connection.recv(64) == b""
    assert raw(path, REQUEST[:5], end=True) == INVALID_ANSWER
    assert raw(path, end=True) == b""
    connect(str(path)).close()
    # While the policy is unknown, HAMi's client guesses by itself, as without a broker; a repair corrects it.
    served.policy = UNKNOWN
    assert raw(path, REQUEST) == INVALID_ANSWER
    served.policy = HOST
    assert ask(str(path)) == (0, os.getpid())
    assert served.counters == {
        "broker_answers": 2,
        "broker_refused_invalid": len(INVALID) + 1,
        "broker_refused_policy_unknown": 1,
    }


ASK = (sys.executable, "-I", broker_client.__file__)


@pytest.mark.parametrize("policy", [HOST, CONTAINER])
@pytest.mark.parametrize("old_kernel", [False, True])
def test_process_in_real_namespaces_gets_its_pid(
    node: Node, path: Path, policy: HostpidPolicy, monkeypatch: pytest.MonkeyPatch, *, old_kernel: bool
) -> None:
    if old_kernel:
        monkeypatch.setattr(peers, "by_pidfd", lambda *_: None)
    with Serving(path, policy) as serving:
        first = node.container(broker_dir=path.parent)
        shared = node.container(pid_namespace=first, broker_dir=path.parent)
        of_the_host = node.container(pid_namespace="host", broker_dir=path.parent)
        for container in (first, shared, node.container(broker_dir=path.parent), of_the_host):
            for nested in (False, True):
                process = container.spawn(
                    [*ASK, "/usr/local/hostpid/broker.sock", "--read-only"], nested=nested
                )
                answer = eval(process.read_line(), {})  # noqa: S307 - printed by this test's script
                assert answer.keys() == {"status", "number"}, answer
                assert answer["number"] == (process.host_pid if policy is HOST else process.ns_pid)
                # The broker entered the process into the map, without a refresh.
                assert process.host_pid in serving.pidmap.source
                assert process.host_pid in serving.pidmap.source.candidates(process.ns_pid)
        assert serving.pidmap.refreshes == 0
        assert serving.counters == {"broker_answers": 8}


ASK_AND_LEAVE = """
import os, socket, sys
client = socket.socket(socket.AF_UNIX)
client.connect(sys.argv[1])
client.sendall(b"HPID\\0\\1\\0\\1")
print("asked", flush=True)
sys.stdin.readline()
if os.fork():
    os._exit(0)
print(client.recv(100).hex(), flush=True)
sys.stdin.readline()
"""


def test_answer_is_never_about_a_reused_pid(node: Node, path: Path) -> None:
    """A caller leaves its connection to a child and ends; another container has its PID at the answer."""

    async def answer_now(listener: socket.socket, counters: Counter[str]) -> None:
        pidmap = PidMap(ScanSource(Procfs()))
        late = Broker(Procfs(), pidmap, lambda: CONTAINER, Told(), counters)
        late.start(listener)
        while not counters:  # noqa: ASYNC110 - a Counter has no event
            await asyncio.sleep(0.002)
        late.stop()

    counters: Counter[str] = Counter()
    place = opened(str(path))
    try:
        script = [sys.executable, "-I", "-c", ASK_AND_LEAVE, str(path)]
        process = node.container().spawn(script)
        assert process.read_line() == "asked"
        process.write_line("leave")
        until(lambda: not os.path.exists(f"/proc/{process.host_pid}"), "its end")
        with reborn(process.host_pid):
            asyncio.run(answer_now(place.listener, counters))
            assert process.read_line() == INVALID_ANSWER.hex()
        assert counters == {"broker_refused_ended": 1}
    finally:
        place.close()


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 4096), max(before[1], 4096)))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_silent_client_is_closed_after_half_a_second(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "EXCHANGE_SECONDS", HALF_A_SECOND)
    with Serving(path) as served:
        for words in (b"", b"HPI"):
            began = time.monotonic()
            with connect(str(path)) as connection:
                connection.sendall(words)
                assert receive(connection) == b""
            assert time.monotonic() - began > 0.49
        assert served.counters == {"broker_timeouts": 2}

        def is_closed_before_its_last_byte() -> bool:
            with connect(str(path)) as connection:
                try:
                    for byte in REQUEST:
                        connection.sendall(bytes((byte,)))
                        time.sleep(0.25)
                except (BrokenPipeError, ConnectionResetError):
                    return True
            return False

        # Single bytes gain no time, unless the broker lacks a CPU for 2 s and reads all bytes together.
        until(is_closed_before_its_last_byte, "a client closed that sends a byte now and then")


def test_silent_clients_delay_no_others(path: Path, many_descriptors: None) -> None:
    with Serving(path) as served, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(str(path))) for _ in range(700)]
        until(lambda: served.counters["broker_busy"] == 700 - 512, "the first ones sent away")
        for _ in range(20):
            assert ask(str(path)) == (0, os.getpid())
        for client in silent[:150]:  # those silent for longest were closed
            assert receive(client) == b""
        last = silent[-1]
        last.sendall(REQUEST)
        assert parse(receive(last)) == (0, os.getpid())


def test_no_descriptor_is_kept(served: Serving, path: Path) -> None:
    ask(str(path))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        ask(str(path))
        raw(path, b"garbage!")
        connect(str(path)).close()
    until(lambda: len(os.listdir("/proc/self/fd")) <= before, "as many descriptors as before")


def test_clients_wait_while_descriptors_are_used_up(served: Serving, path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as client, contextlib.ExitStack() as stack:
        client.settimeout(60)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                stack.callback(os.close, os.open("/dev/null", os.O_RDONLY))
        client.connect(str(path))
        client.sendall(REQUEST)
        until(lambda: served.counters["broker_busy"], "that it cannot be accepted")
        stack.close()
        assert parse(receive(client)) == (0, os.getpid())


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_modes_and_owners(path: Path, umask: int) -> None:
    path = path.parent / "d" / "h" / "broker.sock"  # a socket's path has 107 bytes at most
    before = os.umask(umask)
    try:
        with Serving(path) as serving:
            assert serving.said("broker_off") == []
            assert ask(str(path)) == (0, os.getpid())
            modes = {
                name: (stat.S_IMODE(os.lstat(name).st_mode), os.lstat(name).st_uid)
                for name in (path, path.parent, path.parent.parent)
            }
            assert list(modes.values()) == [(0o666, 0), (0o711, 0), (0o755, 0)]
            assert os.listdir(path.parent) == ["broker.sock"]  # nothing else is mounted into containers
    finally:
        os.umask(before)
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("backlog", [16, 0])
def test_live_socket_of_another_process_is_kept(path: Path, backlog: int) -> None:
    """The process may be too busy to answer. Once it is gone, the broker takes the path."""
    path.parent.mkdir(mode=0o711)
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as waiting:
        other.bind(str(path))
        other.listen(backlog)
        waiting.connect(str(path))
        inode = path.stat().st_ino
        with Serving(path) as serving:
            line = serving.said("broker_off")[0]
            assert "another process listens" in line["why"]
            never(lambda: path.stat().st_ino != inode or serving.said("broker_on"), "a change", 0.3)
            assert len(serving.said("broker_off")) == 1  # logged once
            other.close()
            until(lambda: serving.said("broker_on"), "that it answers now")
            assert ask(str(path)) == (0, os.getpid())


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, lambda path: path.symlink_to("/dev/null")])
def test_path_that_is_no_socket_is_kept(path: Path, make: Callable[[Path], None]) -> None:
    path.parent.mkdir(mode=0o711)
    make(path)
    with pytest.raises(UsageError, match="is not a socket"):
        opened(str(path))
    assert os.listdir(path.parent) == ["broker.sock"]


@pytest.mark.parametrize(
    ("spoil", "fix"),
    [
        (lambda folder: folder.chmod(0o777), "go-w"),
        (
            lambda folder: folder.chmod(0o1777),
            "go-w",
        ),  # the sticky bit suffices only for the parent directory
        (lambda folder: folder.chmod(0o731), "go-w"),
        (lambda folder: os.chown(folder, 65534, 0), "chown root"),
        (lambda folder: folder.chmod(0o700), "chmod 711"),
        (lambda folder: folder.parent.chmod(0o777), "go-w"),
        (lambda folder: os.chown(folder.parent, 65534, 0), "chown root"),
    ],
)
def test_directory_that_others_can_change_is_refused(tmp_path: Path, spoil: Any, fix: str) -> None:
    folder = tmp_path / "up" / "hostpid"
    folder.mkdir(parents=True, mode=0o711)
    spoil(folder)
    with pytest.raises(UsageError, match=fix):
        opened(str(folder / "broker.sock"))
    assert os.listdir(folder) == []


def test_directory_that_cannot_be_made_is_named() -> None:
    used = r"the directory /proc/nope-resolver cannot be used \(No such file .*--broker"
    for directory, words in (
        ("/nope-resolver", "there is no /nope-resolver, .* make it"),
        ("/proc/nope-resolver", used),
    ):
        with pytest.raises(UsageError, match=words):
            opened(f"{directory}/broker.sock")
        assert not os.path.exists(directory)
