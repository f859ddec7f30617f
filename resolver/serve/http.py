"""HTTP with a limit on everything, for the API's sockets and for ``/metrics``. The parser is h11's.

There are no periodic timers while no client is connected. A connection is one task, which waits for at most one thing:
a request, the rest of it, or the client's reading of the answer; each wait has a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import unquote

import h11

from resolver.serve.reception import Acceptor, Reception, refuse

if TYPE_CHECKING:
    from collections.abc import Hashable


PLAIN = "text/plain; charset=utf-8"
#: Read from a connection in one go.
_READ_BYTES = 64 << 10


class Limits(NamedTuple):
    """Limits on the clients of one listening socket.

    At most ``connections`` are open at a time, and accepting them uses at most ``share`` of a CPU. The client has
    ``seconds`` to send the whole request and as long to read the answer; between two requests it may be idle for
    ``idle_seconds``. With ``waiting``, a `Reception` holds up to that many connections and admits one every ``apart``
    seconds; a rejected client gets ``busy``.
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
    """Answer after which the server closes the connection."""

    status: int
    media_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()

    def encoded(self) -> bytes:
        """Return it as HTTP."""
        head = [
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            f"Content-Type: {self.media_type}",
            f"Content-Length: {len(self.body)}",
            *(f"{name}: {value}" for name, value in self.headers),
            "Connection: close",
        ]
        return "\r\n".join([*head, "", ""]).encode("latin-1") + self.body


class Visitor(Protocol):
    """Client of a connection. Requests find it in ``scope["state"]["access"]``."""

    @property
    def turned_away(self) -> Refusal | None:
        """Return the answer that refuses the client before a request is read, or None if its requests are read."""


class Gatekeeper(Protocol):
    """Identifies clients, and counts ``refused_requests`` and ``dropped_slow``.

    ``owner`` returns the key under which a connection is queued. None rejects the connection; OSError means that
    descriptors have run out. ``refusal`` makes the answer to a request that isn't HTTP (400), is too long (431) or
    arrives too slowly (408).
    """

    counters: Counter[str]

    def owner(self, connection: socket.socket, /) -> Hashable | None: ...  # noqa: D102
    def enter(self, connection: Any, /) -> Visitor: ...  # noqa: D102
    def leave(self, visitor: Any, /) -> None: ...  # noqa: D102
    def refusal(self, status: HTTPStatus, why: str, /) -> Refusal: ...  # noqa: D102


class Server:
    """Answers on a listening socket; belongs to the running event loop.

    ``application`` is an ASGI application. Its ``scope["state"]`` has the `Connection` and the `Visitor` (``access``).
    One connection more than ``limits.connections`` costs the owner that has most of them its oldest idle one.
    """

    def __init__(
        self, application: Any, gatekeeper: Gatekeeper, listener: socket.socket, limits: Limits
    ) -> None:
        self.application, self.gatekeeper, self.limits = application, gatekeeper, limits
        self._inside: dict[asyncio.Task[None], tuple[Connection, Hashable]] = {}  # oldest first
        self.reception: Reception | None = None
        self._front: Reception | Acceptor
        if limits.waiting:
            busy = Refusal(503, PLAIN, f"{limits.busy}\n".encode(), (("Retry-After", "1"),))
            self._front = self.reception = Reception(
                listener,
                gatekeeper.owner,
                self.let_in,
                refusal=busy.encoded(),
                most=limits.waiting,
                apart=limits.apart,
                seconds=limits.seconds,
                share=limits.share,
            )
        else:
            self._front = Acceptor(listener, lambda channel: self.let_in(channel, None), share=limits.share)

    def let_in(self, channel: socket.socket, owner: Hashable) -> None:
        """Serve this connection from now on. It may have data already."""
        if len(self._inside) >= self.limits.connections:
            self._turn_one_out()
        connection = Connection(self, channel)
        task = asyncio.get_running_loop().create_task(connection.run())
        self._inside[task] = connection, owner
        task.add_done_callback(lambda task: self._left(task, channel))

    def _left(self, task: asyncio.Task[None], channel: socket.socket) -> None:
        self._inside.pop(task, None)
        with contextlib.suppress(OSError):
            channel.recv(_READ_BYTES)  # or the kernel discards an answer that is under way
        channel.close()

    def _turn_one_out(self) -> None:
        ((greedy, _),) = Counter(owner for _, owner in self._inside.values()).most_common(1)
        theirs = [task for task, (_, owner) in self._inside.items() if owner == greedy]
        oldest = next((task for task in theirs if self._inside[task][0].idle), theirs[0])
        del self._inside[oldest]
        oldest.cancel()

    async def stop(self) -> None:
        """Stop accepting, and close all connections."""
        self._front.stop()
        for task in (inside := list(self._inside)):
            task.cancel()
        await asyncio.gather(*inside, return_exceptions=True)


async def serve(application: Any, gatekeeper: Gatekeeper, listener: socket.socket, limits: Limits) -> None:
    """Answer until cancelled. The listener stays its owner's."""
    server = Server(application, gatekeeper, listener, limits)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        await server.stop()


class _Refused(Exception):
    """The request can't be read."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal)
        self.refusal = refusal


class Connection:
    """One admitted client: its requests are read and answered one after the other, each within its time limits."""

    def __init__(self, server: Server, channel: socket.socket) -> None:
        self._server, self._limits, self._gatekeeper = server, server.limits, server.gatekeeper
        self._channel, self._loop = channel, asyncio.get_running_loop()
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=server.limits.head_bytes)
        #: No answer is pending.
        self.idle = True
        #: The answer has no end: the client gets time for each piece.
        self.endless = False
        self._complete_by = self._loop.time() + server.limits.seconds  # the request
        self._taken_by = 0.0  # the answer
        self._head = b""  # of the answer: sent with the first piece of its body, in one system call
        self._is_head = False
        self._refused: _Refused | None = None
        self._task: asyncio.Task[None] | None = None

    def take_a_turn(self) -> None:
        """Charge a request like a new connection: waiting clients are admitted later."""
        if self._server.reception is not None:
            self._server.reception.charge(1)

    async def run(self) -> None:
        """Serve the client until it leaves, is refused or is cancelled. The caller closes the socket."""
        self._task = asyncio.current_task()
        visitor = self._gatekeeper.enter(self._channel)
        try:
            if visitor.turned_away is not None:
                raise _Refused(visitor.turned_away)
            while await self._exchange(visitor):
                pass
        except _Refused as why:
            self._refuse(why.refusal)
        except OSError:
            pass  # it has gone, or is idle for too long
        finally:
            self._loop.remove_reader(self._channel)
            self._gatekeeper.leave(visitor)

    async def _exchange(self, visitor: Visitor) -> bool:
        """Answer one request; return True if another one may follow. Raises `_Refused` and OSError."""
        event = await self._event()
        path, _, query = event.target.partition(b"?")
        scope = {
            "type": "http",
            "method": event.method.decode(),
            "path": unquote(path.decode()),
            "query_string": query,
            "headers": list(event.headers),
            "state": {"access": visitor, "connection": self},
        }
        self.idle, self._is_head = False, event.method == b"HEAD"
        self._taken_by = self._loop.time() + self._limits.seconds
        self._watch()
        await self._server.application(scope, self._receive, self._send)
        self._loop.remove_reader(self._channel)
        if self._refused is not None:
            raise self._refused
        if self._http.our_state is not h11.DONE:
            return False
        while self._http.their_state is h11.SEND_BODY:
            await self._event()
        self._http.start_next_cycle()
        self.idle = True
        begun = self._http.trailing_data[0]
        seconds = self._limits.seconds if begun else self._limits.idle_seconds
        self._complete_by = self._loop.time() + seconds
        return True

    # -- the request --------------------------------------------------------------------------------

    async def _event(self) -> Any:
        """Return the parser's next event. Raises `_Refused`, and OSError for a client that is gone or says nothing."""
        http = self._http
        try:
            while (event := http.next_event()) is h11.NEED_DATA:
                between = http.their_state is h11.IDLE and not http.trailing_data[0]
                async with asyncio.timeout_at(self._complete_by):
                    data = await self._loop.sock_recv(self._channel, _READ_BYTES)
                if not data:
                    raise ConnectionResetError
                if between:
                    self._complete_by = self._loop.time() + self._limits.seconds
                http.receive_data(data)
        except h11.RemoteProtocolError as error:
            status, why = HTTPStatus.BAD_REQUEST, f"this is not HTTP/1.1 ({error})"
            if error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
                status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
                why = f"the headers are longer than {self._limits.head_bytes} bytes"
            raise _Refused(self._gatekeeper.refusal(status, why)) from None
        except TimeoutError:
            if between:
                raise
            self._gatekeeper.counters["dropped_slow"] += 1
            why = f"the request did not come within {self._limits.seconds:g} s"
            raise _Refused(self._gatekeeper.refusal(HTTPStatus.REQUEST_TIMEOUT, why)) from None
        return event

    async def _receive(self) -> dict[str, Any]:
        """Return the next piece of the body, for the application."""
        self._loop.remove_reader(self._channel)
        if self._http.they_are_waiting_for_100_continue:
            await self._write(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))
        try:
            event = await self._event()
        except _Refused as why:
            self._refused = why
            event = None
        except OSError:
            event = None
        if isinstance(event, h11.Data):
            return {"type": "http.request", "body": bytes(event.data), "more_body": True}
        if isinstance(event, h11.EndOfMessage):
            self._watch()
            return {"type": "http.request", "body": b"", "more_body": False}
        return {"type": "http.disconnect"}

    # -- the answer ---------------------------------------------------------------------------------

    async def _send(self, message: dict[str, Any]) -> None:
        """Send a piece of the answer, for the application, and wait until the client's kernel has it."""
        if message["type"] == "http.response.start":
            status = message["status"]
            reason = HTTPStatus(status).phrase.encode()
            response = h11.Response(status_code=status, headers=message["headers"], reason=reason)
            self._head = self._http.send(response) or b""
            self._taken_by = self._loop.time() + self._limits.seconds
            return
        piece = h11.Data(data=b"" if self._is_head else message["body"])
        await self._write(piece, *(() if message.get("more_body") else (h11.EndOfMessage(),)))

    async def _write(self, *events: h11.Event) -> None:
        head, self._head = self._head, b""
        data = head + b"".join(self._http.send(event) or b"" for event in events)
        until = self._loop.time() + self._limits.seconds if self.endless else self._taken_by
        try:
            async with asyncio.timeout_at(until):
                await self._loop.sock_sendall(self._channel, data)
        except OSError as error:
            self._gatekeeper.counters["dropped_slow"] += isinstance(error, TimeoutError)
            self._cancel()
            await asyncio.sleep(0)  # ends here

    def _watch(self) -> None:
        """Cancel the answer when the client hangs up."""
        self._loop.add_reader(self._channel, self._on_readable)

    def _on_readable(self) -> None:
        self._loop.remove_reader(self._channel)  # data of a further request is read after the answer
        try:
            gone = not self._channel.recv(1, socket.MSG_PEEK)
        except OSError as error:
            gone = not isinstance(error, BlockingIOError)
        if gone:
            self._cancel()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _refuse(self, refusal: Refusal) -> None:
        """Send the reason in place of an answer, if none has begun."""
        self._gatekeeper.counters["refused_requests"] += 1
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            refuse(self._channel, refusal.encoded())
