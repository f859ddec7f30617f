"""The HTTP server of the metrics, with slow, silent, greedy, hostile and well-behaved clients."""

import asyncio
import contextlib
import errno
import gc
import os
import selectors
import socket
import time
import weakref
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import pytest

from resolver import metrics
from resolver.base.journal import Journal
from resolver.config import Settings
from resolver.serve import pages
from resolver.serve.server import Server, serve
from resolver.state import Snapshot
from tests.fakes.pictures import picture

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_clients: list[asyncio.StreamWriter] = []


async def hello(path: str) -> tuple[int, str, bytes]:
    return 200, "text/plain", f"you asked for {path}\n".encode()


@contextlib.asynccontextmanager
async def serving(answer: Any = hello, **limits: float) -> AsyncIterator[int]:
    """Run a server with these limits on a free port; yield the port."""
    listener = pages.listen("127.0.0.1", 0)
    chosen = pages.LIMITS._replace(**limits)  # type: ignore[arg-type]
    application = pages.Pages(answer)
    task = asyncio.create_task(serve(application, application, listener, chosen))
    try:
        async with asyncio.timeout(60):
            yield listener.getsockname()[1]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        listener.close()
        for writer in _clients:
            writer.transport.abort()
        _clients.clear()
        await asyncio.sleep(0)  # lets the loop finish the closed ones


async def say(port: int, *said: bytes, receive_buffer: int = 0) -> Streams:
    channel = socket.socket()
    if receive_buffer:
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    channel.setblocking(False)
    await asyncio.get_running_loop().sock_connect(channel, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=channel)
    _clients.append(writer)
    for piece in said:
        writer.write(piece)
    await writer.drain()
    return reader, writer


async def all_of(streams: Streams) -> bytes:
    """Return all bytes until the server closes or resets the connection."""
    reader, writer = streams
    heard = b""
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(65536):
            heard += piece
    writer.close()
    return heard


async def get(port: int, path: str = "/metrics", more: str = "") -> bytes:
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{more}\r\n"
    return await all_of(await say(port, request.encode()))


async def test_an_answer_has_its_length_and_its_kind() -> None:
    async with serving() as port:
        head, _, body = (await get(port, "/x")).partition(b"\r\n\r\n")
        assert body == b"you asked for /x\n"
        status, *headers = head.split(b"\r\n")
        assert status == b"HTTP/1.1 200 OK"
        assert {b"content-type: text/plain", b"content-length: 17", b"cache-control: no-store"} <= set(
            headers
        )


async def test_a_connection_may_ask_again_and_ahead() -> None:
    async with serving() as port:
        asked = [f"GET /{n} HTTP/1.1\r\nHost: x\r\n\r\n".encode() for n in range(3)]
        reader, writer = await say(port, *asked)
        heard = b""
        while b"/2\n" not in heard:
            heard += await reader.read(4096)
        assert heard.count(b"HTTP/1.1 200 OK") == 3
        assert heard.index(b"/0\n") < heard.index(b"/1\n") < heard.index(b"/2\n")
        writer.close()


@pytest.mark.parametrize(
    ("said", "status", "has"),
    [
        (b"HEAD /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200, b"content-length: 17"),
        (
            b"POST /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
            405,
            b"allow: GET, HEAD",
        ),
        (b"DELETE /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 405, b"only GET and HEAD"),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n", 400, b"this is not HTTP"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 80_000, 431, b"longer than 8192 bytes"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, b"this is not HTTP"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, b"this is not HTTP"),  # no Host
        (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400, b"this is not HTTP"),
    ],
)
async def test_other_requests_get_a_status(said: bytes, status: int, has: bytes) -> None:
    async with serving() as port:
        heard = await all_of(await say(port, said))
        assert heard.startswith(b"HTTP/1.1 %d " % status)
        assert has in heard
        assert b"200 OK" in await get(port)


async def test_no_connection_stays_open_after_eviction_or_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        application = pages.Pages(hello)
        server = Server(application, application, listener, pages.LIMITS._replace(connections=2))
        pairs = [socket.socketpair() for _ in range(5)]
        for ours, _ in pairs:
            ours.setblocking(False)
            server.let_in(ours, "them")
        await asyncio.sleep(0.05)
        assert [ours.fileno() >= 0 for ours, _ in pairs] == [False] * 3 + [True] * 2
        await server.stop()
    for ours, theirs in pairs:
        assert ours.fileno() == -1
        assert theirs.recv(1) == b""
        theirs.close()


async def test_one_byte_now_and_then_buys_no_time() -> None:
    async with serving(seconds=0.4) as port:
        reader, writer = await say(port)
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof() and reader.exception() is None:
                writer.write(b"G")
                await writer.drain()
                await asyncio.sleep(0.05)


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


async def test_slow_reader_costs_no_memory_or_time() -> None:
    text = b"x" * (16 << 20)

    async def answer(path: str) -> tuple[int, str, bytes]:
        return (200, "text/plain", text) if path == "/metrics" else await hello(path)

    async with serving(answer, seconds=1.5) as port:
        before = resident()
        request = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
        slow = [await say(port, request, receive_buffer=4096) for _ in range(8)]
        for _, writer in slow:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(0.5)
        assert resident() - before < 64 << 20, "a copy of the answer for each of them"
        assert b"you asked for /healthz" in await get(port, "/healthz")
        reader, writer = slow[0]
        await asyncio.sleep(2)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert len(await all_of((reader, writer))) < len(text)  # the response was cut off


async def test_silent_flood_closes_the_oldest_connection_only() -> None:
    async with serving() as port:
        crowd = [await say(port) for _ in range(pages.LIMITS.waiting)]
        assert b"you asked for /metrics" in await get(port)
        assert b" 503 " in await all_of(crowd[0])
        alive = crowd[2:]
        for _, writer in alive:
            writer.write(b"GET /late HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        for streams in alive:
            assert b"you asked for /late" in await all_of(streams)


async def test_waiting_client_is_not_closed_for_silent_one() -> None:
    go_on = asyncio.Event()

    async def answer(path: str) -> tuple[int, str, bytes]:
        await go_on.wait()
        return await hello(path)

    async with serving(answer, connections=4) as port:
        waiting = asyncio.create_task(get(port))
        await asyncio.sleep(0.1)
        crowd = [await say(port) for _ in range(40)]
        await asyncio.sleep(0.1)
        go_on.set()
        assert b"you asked for /metrics" in await waiting
        for _, writer in crowd:
            writer.close()


async def test_request_memory_is_freed_on_hangup() -> None:
    asked, freed = asyncio.Event(), asyncio.Event()

    class Needed(bytearray): ...

    async def long(_path: str) -> tuple[int, str, bytes]:
        needed = Needed(1 << 20)
        weakref.finalize(needed, freed.set)
        asked.set()
        await asyncio.sleep(3600)
        return 200, "text/plain", bytes(needed)

    gc.disable()  # a collection would free it, too
    try:
        async with serving(long) as port:
            _, writer = await say(port, b"GET / HTTP/1.1\r\nHost: r\r\n\r\n")
            await asked.wait()
            writer.transport.abort()
            await freed.wait()
    finally:
        gc.enable()


async def test_when_epoll_watches_are_used_up_and_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[object] = []

    def refuse(*arguments: object) -> None:
        refused.append(arguments)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def ask(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n")  # not yet accepted
            return await asyncio.to_thread(client.recv, 1 << 16)

    async with serving() as port:
        await get(port)
        with monkeypatch.context() as patch:
            patch.setattr(selectors.EpollSelector, "register", refuse)
            assert b"200 OK" in await ask(port)
            with socket.create_connection(("127.0.0.1", port)):  # a silent client
                known = len(refused)
                while len(refused) < known + 2:  # noqa: ASYNC110 - the connection, and then the listener
                    await asyncio.sleep(0.01)
        assert b"200 OK" in await ask(port)


async def test_endless_requests_must_reconnect() -> None:
    async with serving() as port:
        heard = await all_of(await say(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 50))
        assert 4 <= heard.count(b"200 OK") < 10
        assert heard.count(b"connection: close") == 1


@pytest.mark.parametrize(
    ("limits", "count", "apart"), [({}, 30, 0.002), ({"waiting": 8, "apart": 0.2}, 16, 0.2)]
)
async def test_requests_are_answered_at_a_pace_or_told_to_come_back(
    limits: dict[str, float], count: int, apart: float
) -> None:
    async with serving(**limits) as port:
        began = time.monotonic()
        heard = await asyncio.gather(*(get(port) for _ in range(count)))
        refused = [answer for answer in heard if b"503 Service Unavailable" in answer]
        assert bool(refused) is bool(limits)
        assert all(b"Retry-After: 1\r\n" in answer for answer in refused)
        answered = sum(b"200 OK" in answer for answer in heard)
        assert answered + len(refused) == count
        assert time.monotonic() - began >= (answered - 1) * apart


async def test_complete_request_precedes_partial_ones() -> None:
    async with serving(waiting=8, apart=0.5) as port:
        slow = [await say(port, b"GET /slow HTTP/1.1\r\n") for _ in range(12)]
        assert b"you asked for /metrics" in await get(port)
        assert b"503 Service Unavailable" in await all_of(slow[1])
        first = slow[0]  # this client was accepted, and still has time
        first[1].write(b"Host: x\r\nConnection: close\r\n\r\n")
        assert b"you asked for /slow" in await all_of(first)


async def test_simultaneous_scrapes_get_the_same_text() -> None:
    made: list[float] = []

    def snapshot() -> Snapshot:
        made.append(time.monotonic())
        return picture()

    page = metrics.Page(snapshot, Settings())
    async with serving(page.answer) as port:
        answers = await asyncio.gather(*(get(port) for _ in range(8)))
        bodies = {each.partition(b"\r\n\r\n")[2] for each in answers}
        assert len(bodies) == 1
        assert b"resolver_build_info" in bodies.pop()
        assert len(made) == 1
        first = made[0]
        while len(made) == 1:
            await get(port)
        assert made[1] - first >= 0.5


async def test_others_get_their_turn_while_a_long_text_is_made() -> None:
    page = metrics.Page(picture, Settings())
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await page.answer("/metrics")
    task.cancel()
    assert turns > 30


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Mock:
    log = Mock()
    monkeypatch.setattr(Journal, "log", log)
    return log


async def said(log: Mock, number: int) -> tuple[str, dict[str, Any]]:
    while len(log.method_calls) <= number:  # noqa: ASYNC110 - a mock has no event
        await asyncio.sleep(0.01)
    _level, (event,), fields = log.method_calls[number]
    return event, fields


async def test_address_in_use_is_reported_once_and_retried(log: Mock) -> None:
    taken = pages.listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    wanted = Settings(metrics_addr=f"127.0.0.1:{port}")
    task = asyncio.create_task(metrics.serve(picture, wanted, Journal()))
    event, fields = await said(log, 0)
    assert event == "metrics_off"
    assert fields["why"] == (
        f"127.0.0.1:{port} cannot be listened on: Address already in use; name another with --metrics-addr"
    )
    await asyncio.sleep(0.3)
    assert len(log.method_calls) == 1
    taken.close()
    assert await said(log, 1) == ("metrics_on", {"address": f"127.0.0.1:{port}"})
    assert b"resolver_build_info" in await get(port)
    task.cancel()


async def test_a_defect_is_shown_and_the_next_request_is_answered(log: Mock) -> None:
    broken = True

    def snapshot() -> Snapshot:
        if broken:
            raise RuntimeError("defect")
        return picture()

    task = asyncio.create_task(metrics.serve(snapshot, Settings(metrics_addr="127.0.0.1:0"), Journal()))
    event, fields = await said(log, 0)
    assert event == "metrics_on"
    port = int(fields["address"].rpartition(":")[2])
    assert (await get(port)).startswith(b"HTTP/1.1 500 ")
    assert await said(log, 1) == ("internal_error", {"step": "metrics"})
    broken = False
    assert b"resolver_build_info" in await get(port)
    task.cancel()


@pytest.mark.parametrize("ipv6", [True, False])
def test_without_a_host_every_address_is_listened_on(monkeypatch: pytest.MonkeyPatch, *, ipv6: bool) -> None:
    real = socket.create_server

    def create_server(address: Any, **options: Any) -> socket.socket:
        if options.get("family") == socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return real(address, **options)

    if not ipv6:
        monkeypatch.setattr(socket, "create_server", create_server)
        monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: True)
    with pages.listen("", 0) as listener:
        port = listener.getsockname()[1]
        answered = []
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with contextlib.suppress(OSError), socket.socket(family) as client:
                client.connect((address, port))
                answered.append(address)
        assert ipv6 or listener.family == socket.AF_INET
        expected = ["127.0.0.1", "::1"] if listener.family == socket.AF_INET6 else ["127.0.0.1"]
        assert answered == expected
