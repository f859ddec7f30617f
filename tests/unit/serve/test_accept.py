"""A client sends the last reference to a lingering socket: no server's loop may be the one that closes it."""

import asyncio
import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from resolver.base.journal import Journal
from resolver.config import HostpidNamespace
from resolver.daemon.broker import Broker
from resolver.hami.hostpid_policy import HostpidPolicy
from resolver.linux.procfs import Procfs
from resolver.pids.pidmap import PidMap
from resolver.pids.scan import ScanSource
from resolver.serve import accept, pages
from resolver.serve.http import PLAIN, Connection, Gatekeeper
from resolver.serve.server import serve
from resolver.serve.unix_socket import UnixSocket
from tests.fakes.lingering import lingering

SO_PASSRIGHTS, LINGER_SECONDS = 83, 4
REST = b"/ HTTP/1.1\r\nHost: r\r\n\r\n"
AT_ALL_TIMES = pytest.mark.parametrize("first", [b"", b"GET "], ids=["at-once", "with-the-rest"])


class OpenToAll(Gatekeeper):
    def owner(self, channel: socket.socket) -> int:
        return channel.family


async def api(listener: socket.socket) -> None:
    async def hello(connection: Connection) -> None:
        await connection.answer(b"hello\n", PLAIN)

    await serve(hello, OpenToAll(), listener, pages.LIMITS._replace(waiting=8, seconds=0.5))


async def broker(listener: socket.socket) -> None:
    policy = HostpidPolicy(HostpidNamespace.HOST, "for a test")
    pidmap = PidMap(ScanSource(Procfs()))
    server = Broker(Procfs(), pidmap, lambda: policy, Journal(), Counter())
    server.start(listener)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        server.stop()


def passes(path: str, first: bytes, text: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as client, lingering(LINGER_SECONDS) as fd:
        client.settimeout(5)
        client.connect(path)
        if first:
            client.send(first)
            time.sleep(0.1)
        try:
            with contextlib.suppress(PermissionError):  # from Linux 6.16 on the server can forbid it
                socket.send_fds(client, [text], [fd])
        finally:
            os.close(fd)
        with contextlib.suppress(OSError):
            while client.recv(4096):
                pass
        time.sleep(0.1)  # the loop's own close


@AT_ALL_TIMES
@pytest.mark.parametrize("possible", [True, False], ids=["before-6.16", "this-kernel"])
@pytest.mark.parametrize("server", [api, broker])
async def test_the_loop_waits_for_no_passed_socket(
    server: Callable[[socket.socket], Awaitable[None]], first: bytes, tmp_path: Path, *, possible: bool
) -> None:
    place = UnixSocket(str(tmp_path / "s"), "--socket")
    if possible:
        with contextlib.suppress(OSError):
            place.listener.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 1)
    place.open()
    task = asyncio.ensure_future(server(place.listener))
    client = asyncio.create_task(asyncio.to_thread(passes, place.path, first, REST))
    longest, last = 0.0, time.monotonic()
    while not client.done():
        await asyncio.sleep(0.02)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    await client
    began = time.monotonic()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    place.close()
    assert max(longest, time.monotonic() - began) < LINGER_SECONDS / 2


def test_closed_listener_drops_unaccepted_connections(tmp_path: Path) -> None:
    place = UnixSocket(str(tmp_path / "s"), "--socket")
    with contextlib.suppress(OSError):
        place.listener.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 1)
    place.open()
    with socket.socket(socket.AF_UNIX) as client, lingering(LINGER_SECONDS) as fd:
        client.connect(place.path)
        socket.send_fds(client, [b"x"], [fd])
        os.close(fd)
        began = time.monotonic()
        place.close()
        assert time.monotonic() - began < LINGER_SECONDS / 2


@pytest.mark.parametrize("answering", [False, True])
async def test_starved_loop_answers_before_it_accepts(
    monkeypatch: pytest.MonkeyPatch, *, answering: bool
) -> None:
    """A batch takes 1 ms of CPU time, but 100 ms of wall-clock time on a busy node."""
    pauses: list[float] = []
    clocks = SimpleNamespace(monotonic=count(0, 0.1).__next__, thread_time=count(0, 0.001).__next__)
    monkeypatch.setattr(accept, "time", clocks)
    monkeypatch.setattr(accept.Acceptor, "_pause", lambda _, seconds: pauses.append(seconds))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = asyncio.Queue[socket.socket]()
        acceptor = accept.Acceptor(listener, taken.put_nowait, share=0.25, answering=lambda: answering)
        with socket.create_connection(listener.getsockname()):
            (await taken.get()).close()
        acceptor.stop()
    assert bool(pauses) is answering
