"""HTTP on a Unix socket: uvicorn's protocol without its server, limits on time and size, and a look at who connects.

Nothing is done by the clock while nobody is connected. Each connection has at most one timer: for the request that
it owes, for the answer that it does not read, or (uvicorn's own) for the silence between two requests.

Root's clients are let in as they come. Tenants wait in a `resolver.serve.reception.Reception` and take turns by
container, so that what one of them does, or all of them, costs the others little and root's socket nothing.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from resolver.api.access import MOST_TENANTS
from resolver.api.problems import Problem, Reason
from resolver.serve.admission import Places
from resolver.serve.reception import Acceptor, Reception, http_refusal

if TYPE_CHECKING:
    import socket
    from collections.abc import Hashable

    from resolver.api.access import Access, Door

_HEADER_BYTES = 16 << 10
#: Seconds for a whole request to come, for an answer to be taken, and between two requests.
_REQUEST_SECONDS, _ANSWER_SECONDS, _IDLE_SECONDS = 10.0, 10.0, 30
#: Shares of a CPU for accepting. Root's clients have no other limit than their number.
_ROOT_SHARE, _TENANT_SHARE = 0.5, 0.1
_MOST_OF_ROOT = 1024  # one beyond `MOST_CONNECTIONS` is told so
_TENANTS_APART = 0.004  # seconds between two tenants' connections that are let in
_BUSY = http_refusal(1, "too many connections of this container are waiting; come back in a second")


class Server:
    """Answers on a listening socket; belongs to the running event loop.

    Requests find their `Access` in ``scope["state"]["access"]``.
    """

    def __init__(self, application: Any, door: Door, listener: socket.socket) -> None:
        self.door = door
        self.state = ServerState()
        self.config = uvicorn.Config(
            application,
            log_config=None,
            log_level="critical",  # what a client sends is no trouble of the daemon's
            access_log=False,
            lifespan="off",
            ws="none",
            http="h11",
            interface="asgi3",
            proxy_headers=False,
            timeout_keep_alive=_IDLE_SECONDS,
            h11_max_incomplete_event_size=_HEADER_BYTES,
        )
        self.config.load()
        if door.tenants:
            self.places = Places(MOST_TENANTS, self._serve)
            self._front: Acceptor | Reception = Reception(
                listener,
                door.owner,
                self.places.let_in,
                refusal=_BUSY,
                most=MOST_TENANTS,
                apart=_TENANTS_APART,
                seconds=_REQUEST_SECONDS,
                share=_TENANT_SHARE,
            )
        else:
            self.places = Places(_MOST_OF_ROOT, self._serve)
            self._front = Acceptor(
                listener, lambda channel: self.places.let_in(channel, "root"), share=_ROOT_SHARE
            )

    async def stop(self) -> None:
        """Accept no more, and hang up on everybody."""
        self._front.stop()
        await self.places.clear()
        answering = list(self.state.tasks)
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)

    def _serve(self, owner: Hashable) -> _Connection:  # noqa: ARG002
        return _Connection(self)


async def serve(application: Any, door: Door, listener: socket.socket) -> None:
    """Answer until cancelled."""
    server = Server(application, door, listener)
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


class _Connection(H11Protocol):
    _access: Access | None = None
    _request_timer: asyncio.TimerHandle | None = None
    _answer_timer: asyncio.TimerHandle | None = None

    def __init__(self, server: Server) -> None:
        super().__init__(server.config, server.state, {})
        self._server = server
        self._door = server.door

    @property
    def idle(self) -> bool:
        """Whether it waits for no answer."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Whatever is not taken at once counts as not taken: a few kilobytes that nobody reads would stay for ever.
        transport.set_write_buffer_limits(high=0)
        self.transport = _HeadFirst(transport)  # type: ignore[assignment]
        self._access = access = self._door.enter(transport.get_extra_info("socket"))
        self.app_state = {"access": access}
        if access.refusal is not None and access.refusal.status == 503:
            self._refuse(access.refusal)
        else:
            self._await_request()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._await_request()
        elif self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._server.places.leave(self)
        self._unset_keepalive_if_required()
        for timer in (self._request_timer, self._answer_timer):
            if timer is not None:
                timer.cancel()
        if self._access is not None:
            self._door.leave(self._access)
            self._access = None

    # -- time ---------------------------------------------------------------------------------------

    def _await_request(self) -> None:
        if self._request_timer is None and not self.transport.is_closing():
            self._request_timer = self.loop.call_later(_REQUEST_SECONDS, self._request_is_late)

    def _request_is_late(self) -> None:
        self._request_timer = None
        if self.conn.our_state is h11.IDLE and not self.conn.trailing_data[0]:
            self.transport.close()  # it never said anything
            return
        self._door.counters["dropped_slow"] += 1
        self._refuse(Problem(408, Reason.TOO_SLOW, f"the request did not come within {_REQUEST_SECONDS:g} s"))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._answer_timer is None:
            self._answer_timer = self.loop.call_later(_ANSWER_SECONDS, self._answer_is_not_taken)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None

    def _answer_is_not_taken(self) -> None:
        self._door.counters["dropped_slow"] += 1
        self.transport.abort()

    # -- refusals -------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP. Called while the parser's error is handled."""
        status = getattr(sys.exception(), "error_status_hint", 400)
        if status == 431:
            self._refuse(
                Problem(431, Reason.HEADERS_TOO_LARGE, f"the headers are longer than {_HEADER_BYTES} bytes")
            )
        else:
            self._refuse(Problem(400, Reason.BAD_REQUEST, f"this is not HTTP/1.1 ({sys.exception() or msg})"))

    def handle_websocket_upgrade(self, event: h11.Request) -> None:  # noqa: ARG002
        """There is nothing to upgrade to."""
        self._refuse(Problem(400, Reason.BAD_REQUEST, "this is no WebSocket"))

    def _refuse(self, problem: Problem) -> None:
        """Say why and hang up, whatever state the conversation is in."""
        self._door.counters["refused_requests"] += 1
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not answering or not self.cycle.response_started:
            body = msgspec.json.encode(problem.document())
            head = [
                f"HTTP/1.1 {problem.status} {problem.document().title}",
                "Content-Type: application/problem+json",
                f"Content-Length: {len(body)}",
                *(f"{name}: {value}" for name, value in problem.headers.items()),
                "Connection: close",
            ]
            self.transport.write("\r\n".join([*head, "", ""]).encode("latin-1") + body)
        self.transport.close()
