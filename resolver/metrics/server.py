"""HTTP for anybody on the network: small requests, short answers, and a limit on everything.

uvicorn's protocol without its server, behind a `resolver.serve.reception.Reception`: who connects and goes again
costs next to nothing, addresses take turns, a connection has a deadline, and nothing is done by the clock while
nobody asks.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from resolver.serve.admission import Places
from resolver.serve.reception import Reception, http_refusal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Answer = tuple[int, str, bytes]

#: Prometheus needs one connection, or two; whoever has most of them loses the oldest when there are more than these.
MAX_CONNECTIONS = 32
#: For a whole request, for the client to take its answer, and for the next one to begin.
SECONDS = 10.0
#: So many more may wait to be let in; beyond, the address with the most of them gets a 503.
MOST_WAITING = 128
APART = 0.002  # seconds between two that are let in, whoever they are
_SHARE = 0.25  # of a CPU for accepting: thousands of connections a second, where each has gone by then
_AT_ONCE, _PER_SECOND = 4.0, 10.0  # requests on one connection; beyond, it is closed after the answer
_MAX_HEAD = 8192  # bytes of a request's head
_PIECE = 65536  # a slow client has this much of its answer in memory, and no more
#: In the kernel: a flood fits in, so that a scraper among it isn't made to try again a second later.
_BACKLOG = 1024
_BUSY = http_refusal(1, "too many requests are waiting to be answered; come back in a second")


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


class _Connection(H11Protocol):
    """One client that was let in."""

    def __init__(self, server: _Server) -> None:
        super().__init__(server.config, server.state, {"connection": self})
        self._server = server
        self._deadline: asyncio.TimerHandle | None = None
        self._allowance, self._allowed_at = _AT_ONCE, self.loop.time()

    @property
    def idle(self) -> bool:
        """Whether it waits for no answer."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The request has begun to come."""
        super().connection_made(transport)
        self._give_time()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give back its place."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._server.places.leave(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """All of the answer is on its way; the client has as long again to take it, or to ask anew."""
        self._give_time()
        super().on_response_complete()

    def may_ask_again(self) -> bool:
        """Count a request; False if they come too fast to keep the connection."""
        now = self.loop.time()
        earned = (now - self._allowed_at) * _PER_SECOND
        self._allowance = min(_AT_ONCE, self._allowance + earned) - 1
        self._allowed_at = now
        self._server.reception.charge(1)  # a turn, also on a connection that was let in long ago
        return self._allowance >= 0

    def _give_time(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(SECONDS, self.transport.abort)


class _Server:
    """Who waits, and who was let in."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        self.config = config
        self.state = ServerState()
        self.places = Places(MAX_CONNECTIONS, lambda _address: _Connection(self))
        self.reception = Reception(
            listener,
            _address,
            self.places.let_in,
            refusal=_BUSY,
            most=MOST_WAITING,
            apart=APART,
            seconds=SECONDS,
            share=_SHARE,
        )

    async def stop(self) -> None:
        """Hang up on everybody."""
        self.reception.stop()
        await self.places.clear()


def _address(channel: socket.socket) -> str | None:
    try:
        return str(channel.getpeername()[0])
    except OSError:
        return None  # it has gone


def application(answer: Callable[[str, str], Awaitable[Answer]]) -> Any:
    """An ASGI application. ``answer(path, accept)`` gives status, content type and body."""

    async def app(
        scope: dict[str, Any], _receive: Any, send: Callable[[dict[str, Any]], Awaitable[None]]
    ) -> None:
        headers = {}
        if not scope["state"]["connection"].may_ask_again():
            headers["connection"] = "close"
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
    server = _Server(config, listener)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        await server.stop()
