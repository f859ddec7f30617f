"""HTTP with a limit on everything: uvicorn's protocol without its server, for the API's sockets and for ``/metrics``.

Nothing is done by the clock while nobody is connected. Each connection has at most one timer: for the request that
it owes, for the answer that it does not read, or (uvicorn's own) for the silence between two requests.

What is used of uvicorn's private parts is in here alone; ``tests/contract/test_uvicorn.py`` holds it, and
``pyproject.toml`` names the versions that were tried.
"""

from __future__ import annotations

import asyncio
import sys
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import h11

from resolver.lean import lean
from resolver.serve.admission import Places
from resolver.serve.reception import Acceptor, Reception, http_refusal

with lean("uvicorn"):
    from uvicorn.config import Config
    from uvicorn.protocols.http.h11_impl import H11Protocol
    from uvicorn.server import ServerState

if TYPE_CHECKING:
    import socket
    from collections import Counter
    from collections.abc import Hashable


class Limits(NamedTuple):
    """What the clients of one listening socket may cost.

    ``connections`` are open at a time, and ``share`` of a CPU goes to accepting them. A request's head has
    ``head_bytes`` at most; the whole request has ``seconds`` to come and its answer as long to be taken; between two
    requests a connection may be silent for ``idle_seconds``.

    With ``waiting`` there is a `Reception` in front: so many may wait there, and one each ``apart`` seconds is let in;
    a client that is turned away gets ``busy``. Without, clients are let in as they come.
    """

    connections: int
    head_bytes: int
    seconds: float
    idle_seconds: int
    share: float
    waiting: int = 0
    apart: float = 0.0
    busy: str = ""


class Refusal(NamedTuple):
    """An answer to who is hung up on afterwards."""

    status: int
    media_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class Visitor(Protocol):
    """Who is at the other end of a connection. Requests find it in ``scope["state"]["access"]``."""

    @property
    def turned_away(self) -> Refusal | None:
        """What is answered before a request is read; None if requests are read."""


class Gatekeeper(Protocol):
    """Identifies clients, and counts ``refused_requests`` and ``dropped_slow``.

    ``owner`` names whom a connection waits for; None turns it away, and OSError means that descriptors have run out.
    ``refusal`` puts into words why nothing, or nothing more, is read: what came is no HTTP (400), too much of it
    (431), or it comes too slowly (408).
    """

    counters: Counter[str]

    def owner(self, connection: socket.socket, /) -> Hashable | None: ...  # noqa: D102
    def enter(self, connection: Any, /) -> Visitor: ...  # noqa: D102
    def leave(self, visitor: Any, /) -> None: ...  # noqa: D102
    def refusal(self, status: HTTPStatus, why: str, /) -> Refusal: ...  # noqa: D102


class Server:
    """Answers on a listening socket; belongs to the running event loop.

    Requests find their `Connection` in ``scope["state"]["connection"]``.
    """

    def __init__(
        self, application: Any, gatekeeper: Gatekeeper, listener: socket.socket, limits: Limits
    ) -> None:
        self.gatekeeper = gatekeeper
        self.limits = limits
        self.state = ServerState()
        self.config = Config(
            application,
            log_config=None,
            log_level="critical",  # what a client sends is no trouble of the daemon's
            access_log=False,
            lifespan="off",
            ws="none",
            http="h11",
            interface="asgi3",
            proxy_headers=False,
            timeout_keep_alive=limits.idle_seconds,
            h11_max_incomplete_event_size=limits.head_bytes,
        )
        self.config.load()
        self.places = Places(limits.connections, lambda _owner: Connection(self))
        self.reception: Reception | None = None
        self._acceptor: Acceptor | None = None
        if limits.waiting:
            self.reception = Reception(
                listener,
                gatekeeper.owner,
                self.places.let_in,
                refusal=http_refusal(1, limits.busy),
                most=limits.waiting,
                apart=limits.apart,
                seconds=limits.seconds,
                share=limits.share,
            )
        else:
            self._acceptor = Acceptor(
                listener, lambda channel: self.places.let_in(channel, None), share=limits.share
            )

    async def stop(self) -> None:
        """Accept no more, and hang up on everybody."""
        for front in (self.reception, self._acceptor):
            if front is not None:
                front.stop()
        await self.places.clear()
        answering = list(self.state.tasks)
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)


async def serve(application: Any, gatekeeper: Gatekeeper, listener: socket.socket, limits: Limits) -> None:
    """Answer until cancelled. The listener stays its owner's."""
    server = Server(application, gatekeeper, listener, limits)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        await server.stop()


class _HeadFirst:
    """A transport that sends an answer's head together with what follows: one system call, and one waking, less."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""
        self.is_closing = transport.is_closing
        self.abort = transport.abort
        self.resume_reading = transport.resume_reading

    def write(self, data: bytes) -> None:
        if not self._head and data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 1"):
            self._head = data  # but for 100 Continue, which is all that comes
        else:
            head, self._head = self._head, b""
            self._transport.write(head + data)

    def close(self) -> None:
        if self._head:
            self.write(b"")
        self._transport.close()


class Connection(H11Protocol):
    """One client that was let in."""

    def __init__(self, server: Server) -> None:
        super().__init__(server.config, server.state, {})
        self._server = server
        self._gatekeeper = server.gatekeeper
        self._visitor: Visitor | None = None
        self._request_timer: asyncio.TimerHandle | None = None
        self._answer_timer: asyncio.TimerHandle | None = None
        #: The answer has no end: each piece of it has its own time to be taken.
        self.endless = False

    @property
    def idle(self) -> bool:
        """Whether it waits for no answer."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def take_a_turn(self) -> None:
        """A request costs as much as a connection: those who wait are let in later."""
        if self._server.reception is not None:
            self._server.reception.charge(1)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See who it is."""
        super().connection_made(transport)
        # Whatever is not taken at once counts as not taken: a few kilobytes that nobody reads would stay for ever.
        transport.set_write_buffer_limits(high=0)
        self.transport = _HeadFirst(transport)  # type: ignore[assignment]
        self._visitor = visitor = self._gatekeeper.enter(transport.get_extra_info("socket"))
        self.app_state = {"access": visitor, "connection": self}
        if visitor.turned_away is not None:
            self._refuse(visitor.turned_away)
        else:
            self._await_request()

    def data_received(self, data: bytes) -> None:
        """Read on; a whole request ends the time that it has to come."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._await_request()
        elif self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Give back its place."""
        super().connection_lost(exc)
        self._server.places.leave(self)
        self._unset_keepalive_if_required()
        if self._request_timer is not None:
            self._request_timer.cancel()
        self._no_answer_timer()
        if self._visitor is not None:
            self._gatekeeper.leave(self._visitor)
            self._visitor = None

    # -- time ---------------------------------------------------------------------------------------

    def _await_request(self) -> None:
        if self._request_timer is None and not self.transport.is_closing():
            self._request_timer = self.loop.call_later(self._server.limits.seconds, self._request_is_late)

    def _request_is_late(self) -> None:
        self._request_timer = None
        if self.conn.our_state is h11.IDLE and not self.conn.trailing_data[0]:
            self.transport.close()  # it never said anything
            return
        self._gatekeeper.counters["dropped_slow"] += 1
        why = f"the request did not come within {self._server.limits.seconds:g} s"
        self._refuse(self._gatekeeper.refusal(HTTPStatus.REQUEST_TIMEOUT, why))

    def pause_writing(self) -> None:
        """The client does not read as fast as is written."""
        super().pause_writing()
        if self._answer_timer is None:
            self._answer_timer = self.loop.call_later(self._server.limits.seconds, self._answer_is_not_taken)

    def resume_writing(self) -> None:
        """The client has taken all that was written."""
        super().resume_writing()
        if self.endless or self.idle:
            self._no_answer_timer()

    def on_response_complete(self) -> None:
        """All of the answer is written, if not taken."""
        if not self.flow.write_paused:
            self._no_answer_timer()
        super().on_response_complete()

    def _no_answer_timer(self) -> None:
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None

    def _answer_is_not_taken(self) -> None:
        self._gatekeeper.counters["dropped_slow"] += 1
        self.transport.abort()

    # -- refusals -------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP. Called while the parser's error is handled."""
        status, why = HTTPStatus.BAD_REQUEST, f"this is not HTTP/1.1 ({sys.exception() or msg})"
        if getattr(sys.exception(), "error_status_hint", 400) == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            why = f"the headers are longer than {self._server.limits.head_bytes} bytes"
        self._refuse(self._gatekeeper.refusal(status, why))

    def handle_websocket_upgrade(self, event: h11.Request) -> None:  # noqa: ARG002
        """There is nothing to upgrade to."""
        self._refuse(self._gatekeeper.refusal(HTTPStatus.BAD_REQUEST, "this is no WebSocket"))

    def _refuse(self, refusal: Refusal) -> None:
        """Say why and hang up, whatever state the conversation is in."""
        self._gatekeeper.counters["refused_requests"] += 1
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not answering or not self.cycle.response_started:
            head = [
                f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}",
                f"Content-Type: {refusal.media_type}",
                f"Content-Length: {len(refusal.body)}",
                *(f"{name}: {value}" for name, value in refusal.headers),
                "Connection: close",
            ]
            self.transport.write("\r\n".join([*head, "", ""]).encode("latin-1") + refusal.body)
        self.transport.close()
