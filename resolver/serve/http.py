"""One HTTP/1.1 connection, for the API's sockets and for ``/metrics``. The parser is h11's.

A connection is one task, which waits for a request, the rest of it, or the client's reading of the answer; each wait
has a limit. No timer runs while no client is connected.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import h11

if TYPE_CHECKING:
    from resolver.serve.tls import Session  # OpenSSL, 7 MiB

PLAIN = "text/plain; charset=utf-8"
#: Read from a connection in one go, and of a long answer written: a slow client has no more of it in memory.
_PIECE_BYTES = 64 << 10


class Limits(NamedTuple):
    """Limits on the clients of one listening socket.

    At most ``connections`` are open; accepting uses at most ``share`` of a CPU. A client has ``seconds`` to send a
    request, as long to read the answer, and ``idle_seconds`` between two. With ``waiting``, so many more connections
    wait, one is admitted every ``apart`` seconds, and a rejected client gets ``busy``.
    """

    connections: int
    head_bytes: int
    seconds: float
    idle_seconds: int
    share: float
    waiting: int = 0
    apart: float = 0.0
    busy: str = ""


class HangUp(Exception):
    """Raised to close a connection. ``answer`` is sent before, unless another answer has begun."""

    def __init__(self, answer: bytes = b"") -> None:
        super().__init__(answer)
        self.answer = answer


def refusal(status: int, media_type: str, body: bytes, headers: Mapping[str, str] | None = None) -> HangUp:
    """Return the error that refuses a client."""
    head = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        f"Content-Type: {media_type}",
        f"Content-Length: {len(body)}",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
        "Connection: close",
    ]
    return HangUp("\r\n".join([*head, "", ""]).encode("latin-1") + body)


class Gatekeeper:
    """Identifies clients, and counts ``refused_requests`` and ``dropped_slow``. This one admits everyone."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        #: Called when the kernel refuses resources for a connection.
        self.refused: Callable[[OSError], None] = lambda _: None

    def owner(self, channel: socket.socket) -> Hashable | None:
        """Return the key under which a connection waits, None to reject it. Raises OSError."""
        try:
            return str(channel.getpeername()[0])
        except OSError:
            return None  # it has gone

    def enter(self, _channel: socket.socket) -> Any:
        """Return a connection's ``visitor``, for its requests. Raises `HangUp`."""

    def leave(self, visitor: Any) -> None:
        """Release the visitor of a closed connection."""

    def session(self) -> Session | None:
        """Return the TLS of a new connection."""

    def refusal(self, status: HTTPStatus, why: str) -> HangUp:
        """Refuse a request that isn't HTTP (400), is too long (431) or arrives too slowly (408)."""
        return refusal(status, PLAIN, f"{why}\n".encode())


class Connection:
    """One admitted client; its requests are answered one after the other.

    The application gets it for each request, and calls `answer` or `stream`. ``headers`` have lower-case names.
    """

    def __init__(
        self, channel: socket.socket, application: Application, gatekeeper: Gatekeeper, limits: Limits
    ) -> None:
        self.channel = channel
        self.method, self.path, self.query = "", "", b""
        self.headers: dict[str, str] = {}
        self.visitor: Any = None
        #: No answer is pending.
        self.idle = True
        #: The refusal that is sent when the connection is closed.
        self.last_words = b""
        self._application, self._gatekeeper, self._limits = application, gatekeeper, limits
        self._counters = gatekeeper.counters
        self._tls = gatekeeper.session()
        self._loop = asyncio.get_running_loop()
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
        self._complete_by = self._loop.time() + limits.seconds  # the request
        self._taken_by = 0.0  # the answer
        self._head = b""  # of the answer: sent with the first piece of its body, in one system call
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve the client until it leaves or is refused. The caller closes the socket."""
        self._task = asyncio.current_task()
        try:
            self.visitor = self._gatekeeper.enter(self.channel)
            try:
                while await self._exchange():
                    pass
            finally:
                self._loop.remove_reader(self.channel)
                self._task = None  # a cancelled task keeps all that its request holds
                self._gatekeeper.leave(self.visitor)
        except HangUp as end:
            self._counters["refused_requests"] += bool(end.answer)
            if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                with contextlib.suppress(OSError):  # the TLS handshake may be incomplete
                    self.last_words = self._tls.to_send(end.answer) if self._tls else end.answer

    async def _exchange(self) -> bool:
        """Answer one request; return True if another one may follow. Raises `HangUp`."""
        request = await self._event()
        self.method = request.method.decode()
        path, _, self.query = request.target.partition(b"?")
        self.path = unquote(path.decode())
        self.headers = {}
        for name, value in request.headers:
            before = self.headers.get(name.decode())
            text = value.decode("latin-1")
            self.headers[name.decode()] = text if before is None else f"{before}, {text}"
        self.idle, self._taken_by = False, self._loop.time() + self._limits.seconds
        self._watch()
        await self._application(self)
        self._loop.remove_reader(self.channel)
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

    async def receive(self) -> bytes:
        """Return the next piece of the request's body, empty at its end. Raises `HangUp`."""
        self._loop.remove_reader(self.channel)
        if self._http.they_are_waiting_for_100_continue:
            await self._send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))
        event = await self._event()
        if isinstance(event, h11.Data):
            return bytes(event.data)
        self._watch()
        return b""

    async def _event(self) -> Any:
        """Return the parser's next event. Raises `HangUp`."""
        http, refuse = self._http, self._gatekeeper.refusal
        try:
            while (event := http.next_event()) is h11.NEED_DATA:
                between = http.their_state is h11.IDLE and not http.trailing_data[0]
                async with asyncio.timeout_at(self._complete_by):
                    data = await self._received()
                if not data:
                    raise HangUp
                if between:
                    self._complete_by = self._loop.time() + self._limits.seconds
                http.receive_data(data)
        except h11.RemoteProtocolError as error:
            status, why = HTTPStatus.BAD_REQUEST, f"this is not HTTP/1.1 ({error})"
            if error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
                status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
                why = f"the headers are longer than {self._limits.head_bytes} bytes"
            raise refuse(status, why) from None
        except TimeoutError:
            if between:
                raise HangUp from None
            self._counters["dropped_slow"] += 1
            why = f"the request did not come within {self._limits.seconds:g} s"
            raise refuse(HTTPStatus.REQUEST_TIMEOUT, why) from None
        except OSError:
            raise HangUp from None
        return event

    async def _received(self) -> bytes:
        """Return data, decrypted; empty at its end. Raises OSError and `HangUp`."""
        while (data := await self._loop.sock_recv(self.channel, _PIECE_BYTES)) and self._tls:
            try:
                plain = self._tls.take(data)
            except OSError as error:
                if getattr(error, "reason", "") == "HTTP_REQUEST":
                    self._tls = None
                    raise self._gatekeeper.refusal(HTTPStatus.BAD_REQUEST, "use https:// here") from None
                with contextlib.suppress(OSError):
                    self.channel.send(self._tls.to_send())  # the alert
                raise
            await self._loop.sock_sendall(self.channel, self._tls.to_send())
            if plain:
                return plain
            await asyncio.sleep(0)  # sock_recv() gives no turn to others while data is there
        return data

    def _watch(self) -> None:
        """Cancel the answer when the client hangs up, if the kernel allows a further epoll watch."""
        with contextlib.suppress(OSError):
            self._loop.add_reader(self.channel, self._on_readable)

    def _on_readable(self) -> None:
        self._loop.remove_reader(self.channel)  # data of a further request is read after the answer
        try:
            gone = not self.channel.recv(1, socket.MSG_PEEK)
        except OSError as error:
            gone = not isinstance(error, BlockingIOError)
        if gone and self._task is not None:
            self._task.cancel()

    async def answer(
        self, body: bytes, media_type: str, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a whole answer. Raises `HangUp`."""
        fields = {} if status == 304 else {"content-type": media_type, "content-length": str(len(body))}
        self._begin(status, fields | dict(headers or {}))
        view = memoryview(b"" if self.method == "HEAD" else body)
        for start in range(0, len(view), _PIECE_BYTES):
            await self._send(h11.Data(data=bytes(view[start : start + _PIECE_BYTES])))
        await self._send(h11.EndOfMessage())

    async def stream(self, pieces: AsyncIterator[bytes], media_type: str) -> None:
        """Send an answer without end; the client has its time for each piece. Raises `HangUp`."""
        self._begin(200, {"content-type": media_type, "cache-control": "no-store"})
        if self.method != "HEAD":
            async for piece in pieces:
                self._taken_by = self._loop.time() + self._limits.seconds
                await self._send(h11.Data(data=piece))
        await self._send(h11.EndOfMessage())

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        named = [(name.lower(), value) for name, value in headers.items()]
        reason = HTTPStatus(status).phrase.encode()
        self._head = self._http.send(h11.Response(status_code=status, headers=named, reason=reason)) or b""
        self._taken_by = self._loop.time() + self._limits.seconds

    async def _send(self, event: h11.Event) -> None:
        head, self._head = self._head, b""
        if not (data := head + (self._http.send(event) or b"")):
            return
        try:
            data = self._tls.to_send(data) if self._tls else data
            async with asyncio.timeout_at(self._taken_by):
                await self._loop.sock_sendall(self.channel, data)
        except OSError as error:
            self._counters["dropped_slow"] += isinstance(error, TimeoutError)
            raise HangUp from None


Application = Callable[[Connection], Awaitable[None]]
