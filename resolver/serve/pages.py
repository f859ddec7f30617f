"""Pages for anybody on the network: small requests by GET, short answers, a port of TCP."""

from __future__ import annotations

import errno
import socket
from collections import Counter
from typing import TYPE_CHECKING, Any

from resolver.base.limiter import Bucket
from resolver.serve import http
from resolver.serve.http import PLAIN

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from http import HTTPStatus

    Answer = tuple[int, str, bytes]

#: Prometheus needs one connection, or two; beyond this number the client with the most loses its oldest.
LIMITS = http.Limits(
    connections=32,
    head_bytes=8192,
    seconds=10.0,
    idle_seconds=10,
    share=0.25,  # thousands of connections a second, where each has gone by then
    waiting=128,
    apart=0.002,
    busy="too many requests are waiting to be answered; come back in a second",
)
_AT_ONCE, _PER_SECOND = 4.0, 10.0  # requests on one connection; beyond, it is closed after the answer
_PIECE = 65536  # a slow client has this much of its answer in memory, and no more
#: In the kernel: a flood fits in, so that a scraper among it isn't made to try again a second later.
_BACKLOG = 1024


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; without a host, on all addresses of both families. Raises OSError."""
    if not host:
        try:
            if socket.has_dualstack_ipv6():
                return socket.create_server(
                    ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
                )
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
        return socket.create_server(("", port), backlog=_BACKLOG)  # a kernel started without IPv6
    kind, flags = socket.SOCK_STREAM, socket.AI_NUMERICHOST
    family, _, _, _, address = socket.getaddrinfo(host.encode(), port, type=kind, flags=flags)[0]
    return socket.create_server(address, family=family, backlog=_BACKLOG)


class _Anybody:
    """Anonymous client. Its connection is closed if its requests come too fast."""

    turned_away = None

    def __init__(self) -> None:
        self.requests = Bucket(_PER_SECOND, _AT_ONCE)


class _OpenToAll:
    """Gatekeeper that admits every client."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()

    @staticmethod
    def owner(connection: socket.socket) -> str | None:
        """Return the client's address."""
        try:
            return str(connection.getpeername()[0])
        except OSError:
            return None  # it has gone

    @staticmethod
    def enter(connection: Any) -> _Anybody:  # noqa: ARG004
        """Admit the client without identifying it."""
        return _Anybody()

    def leave(self, visitor: _Anybody) -> None:
        """Do nothing: no state is kept."""

    @staticmethod
    def refusal(status: HTTPStatus, why: str) -> http.Refusal:
        """Return the refusal as plain text."""
        return http.Refusal(status, PLAIN, f"{why}\n".encode())


def application(answer: Callable[[str, str], Awaitable[Answer]]) -> Any:
    """Return an ASGI application. ``answer(path, accept)`` returns status, content type and body."""

    async def app(
        scope: dict[str, Any], _receive: Any, send: Callable[[dict[str, Any]], Awaitable[None]]
    ) -> None:
        headers = {}
        scope["state"]["connection"].take_a_turn()  # also on a connection that was let in long ago
        if scope["state"]["access"].requests.take(1) > 0:
            headers["connection"] = "close"
        if scope["method"] not in ("GET", "HEAD"):
            status, kind, body = 405, PLAIN, b"only GET and HEAD are answered\n"
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
    await http.serve(application(answer), _OpenToAll(), listener, LIMITS)
