"""Pages for any client on the network: small requests by GET on a TCP port."""

from __future__ import annotations

import errno
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from resolver.base.budget import Bucket
from resolver.serve import http, server
from resolver.serve.http import PLAIN

if TYPE_CHECKING:
    from resolver.serve.tls import PortCredentials, Session  # OpenSSL, 7 MiB

#: Status, content type and body.
Answer = tuple[int, str, bytes]

#: Prometheus needs one connection, or two; beyond this number the client with the most loses its oldest.
LIMITS = http.Limits(
    connections=32,
    head_bytes=8192,
    seconds=10.0,
    idle_seconds=10,
    share=0.25,  # thousands of connections a second that are closed at once
    waiting=128,
    apart=0.002,
    busy="too many requests are waiting to be answered; come back in a second",
)
#: A handshake costs milliseconds with a large RSA key.
_APART_WITH_TLS = 0.02
#: Kubelet's probes have no token.
_WITHOUT_TOKEN = ("/healthz", "/readyz")
_AT_ONCE, _PER_SECOND = 4.0, 10.0  # requests on one connection; beyond, it is closed after the answer
#: Length of the kernel's queue: a flood fits in, and a scraper among it needs no second try.
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


def probed(path: str, alive: str, ready: str) -> Answer:
    """Return the answer of a probe: why the process isn't alive or ready; both are empty if all is well."""
    probes = {"/healthz": alive, "/readyz": ready}
    if path not in probes:
        return 404, PLAIN, b"there are /metrics, /healthz and /readyz\n"
    return (503, PLAIN, f"{probes[path]}\n".encode()) if probes[path] else (200, PLAIN, b"ok\n")


class Pages(http.Gatekeeper):
    """Gatekeeper that admits every client, and the application, which calls ``answer(path)``.

    A connection with too many requests is closed.
    """

    def __init__(
        self, answer: Callable[[str], Awaitable[Answer]], credentials: PortCredentials | None = None
    ) -> None:
        super().__init__()
        self._answer, self._credentials = answer, credentials

    def session(self) -> Session | None:
        return self._credentials.session() if self._credentials else None

    def enter(self, _channel: socket.socket) -> Bucket:
        return Bucket(_PER_SECOND, _AT_ONCE)

    async def __call__(self, connection: http.Connection) -> None:
        headers = {"cache-control": "no-store"}
        if connection.visitor.take(1) > 0:
            headers["connection"] = "close"
        credentials = self._credentials if connection.path not in _WITHOUT_TOKEN else None
        if credentials and not credentials.authorized(connection.headers.get("authorization", "")):
            status, kind = 401, PLAIN
            body = b"send the header Authorization: Bearer with the right token\n"
            headers["www-authenticate"] = 'Bearer realm="resolver"'
        elif connection.method in ("GET", "HEAD"):
            status, kind, body = await self._answer(connection.path)
        else:
            status, kind, body = 405, PLAIN, b"only GET and HEAD are answered\n"
            headers["allow"] = "GET, HEAD"
        await connection.answer(body, kind, status, headers)


async def serve(
    listener: socket.socket,
    answer: Callable[[str], Awaitable[Answer]],
    credentials: PortCredentials | None = None,
    refused: Callable[[OSError], None] = lambda _: None,
) -> None:
    """Answer until cancelled."""
    limits = LIMITS
    if credentials and credentials.uses_tls:
        # Before a handshake no client could read a refusal, and sending refusals would prolong a flood.
        limits = LIMITS._replace(apart=_APART_WITH_TLS, busy="")
    pages = Pages(answer, credentials)
    pages.refused = refused
    await server.serve(pages, pages, listener, limits)
