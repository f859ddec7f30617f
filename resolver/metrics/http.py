"""HTTP for anybody on the network: small requests, short answers, and a limit on everything.

uvicorn's protocol without its server: a connection has a deadline, a flood of connections costs the oldest ones, and
nothing is done by the clock while nobody asks.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Answer = tuple[int, str, bytes]

#: Prometheus needs one connection, or two; whoever wants more than all of them closes the oldest.
MAX_CONNECTIONS = 32
#: For a whole request, for the client to take its answer, and for the next one to begin.
SECONDS = 10.0
_MAX_HEAD = 8192  # bytes of a request's head
_APART = 0.005  # seconds between two requests, whoever sends them
_PIECE = 65536  # a slow client has this much of its answer in memory, and no more
_BACKLOG = 64


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; every address of both families without a host. OSError if it cannot be had."""
    if not host:
        try:
            if socket.has_dualstack_ipv6():
                return socket.create_server(
                    ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
                )
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
        return socket.create_server(("", port), backlog=_BACKLOG)  # a kernel told to be without IPv6
    kind, flags = socket.SOCK_STREAM, socket.AI_NUMERICHOST
    family, _, _, _, address = socket.getaddrinfo(host, port, type=kind, flags=flags)[0]
    return socket.create_server(address, family=family, backlog=_BACKLOG)


class _Pace:
    """Everybody's requests in a row, a little apart: a flood costs its sender time and this daemon little."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = 0.0

    async def wait(self) -> None:
        """Until it is this request's turn."""
        now = time.monotonic()
        due = max(now, self._next)
        self._next = due + self._seconds
        if due > now:
            await asyncio.sleep(due - now)


class Connection(H11Protocol):
    """One client. ``open_ones`` has all of them, the oldest first."""

    def __init__(self, config: uvicorn.Config, state: ServerState, open_ones: dict[Connection, None]) -> None:
        super().__init__(config, state, {})
        self._open_ones = open_ones
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """One more: the oldest goes if it is one too many, of those that wait for no answer if there are any."""
        super().connection_made(transport)
        if len(self._open_ones) >= MAX_CONNECTIONS:
            idle = (one for one in self._open_ones if one.cycle is None or one.cycle.response_complete)
            next(idle, next(iter(self._open_ones))).transport.abort()
        self._open_ones[self] = None
        self._give_time()

    def connection_lost(self, exc: Exception | None) -> None:
        """One less."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._open_ones.pop(self, None)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """All of the answer is on its way; the client has as long again to take it, or to ask anew."""
        self._give_time()
        super().on_response_complete()

    def _give_time(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(SECONDS, self.transport.abort)


def application(answer: Callable[[str, str], Awaitable[Answer]]) -> Any:
    """An ASGI application. ``answer(path, accept)`` gives status, content type and body."""
    pace = _Pace(_APART)

    async def app(
        scope: dict[str, Any], _receive: Any, send: Callable[[dict[str, Any]], Awaitable[None]]
    ) -> None:
        await pace.wait()
        headers = {}
        if scope["method"] not in ("GET", "HEAD"):
            status, kind, body = 405, "text/plain; charset=utf-8", b"only GET and HEAD are answered\n"
            headers["allow"] = "GET, HEAD"
        else:
            accept = b",".join(value for name, value in scope["headers"] if name == b"accept")
            status, kind, body = await answer(scope["path"], accept.decode("latin-1"))
        headers |= {"content-type": kind, "content-length": str(len(body)), "cache-control": "no-store"}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": encoded})
        view = memoryview(b"" if scope["method"] == "HEAD" else body)
        for start in range(0, len(view), _PIECE):
            piece = bytes(view[start : start + _PIECE])
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


async def serve(listener: socket.socket, answer: Callable[[str, str], Awaitable[Answer]]) -> None:
    """Answer until cancelled."""
    config = uvicorn.Config(
        application(answer),
        log_config=None,
        log_level="critical",  # what a client sends is no trouble of the daemon's
        access_log=False,
        lifespan="off",
        ws="none",
        http="h11",
        interface="asgi3",
        proxy_headers=False,
        timeout_keep_alive=3600,  # the deadline comes first
        h11_max_incomplete_event_size=_MAX_HEAD,
    )
    config.load()
    state, open_ones = ServerState(), dict[Connection, None]()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(config, state, open_ones), sock=listener)
    try:
        await loop.create_future()
    finally:
        server.close()
        for connection in list(open_ones):
            connection.transport.abort()
