"""Requests and answers as values: a route's input, output and description."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar
from urllib.parse import parse_qsl

import msgspec

from resolver.api.access import Access
from resolver.api.problems import Problem, Reason
from resolver.serve.http import Connection

JSON, TEXT, STREAM = "application/json", "text/plain; charset=utf-8", "text/event-stream"
#: Most bytes of one body: from root and the socket's group, and from tenants.
MOST_BODY_BYTES, MOST_TENANT_BODY_BYTES = 2 << 20, 64 << 10
_MOST_FIELDS = 64

T = TypeVar("T")

encode = msgspec.json.Encoder(enc_hook=str, order="deterministic").encode


class Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A route's parameters, each with its limits and its description; those in ``many`` may come more than once."""

    many: ClassVar[frozenset[str]] = frozenset()


class Answer(NamedTuple):
    """Response to a request."""

    body: bytes
    media_type: str = JSON
    status: int = 200
    headers: Mapping[str, str] | None = None


Handler = Callable[[Any, "Request"], Awaitable["Answer | None"]]


class Route(NamedTuple):
    """Path and method with their handler. ``shape`` is the type of its JSON, ``others`` are further media types.

    ``tenants`` may use it, and get the shape ``own`` instead if there is one. ``refusals`` are its statuses in addition
    to those of every route.
    """

    path: str
    shape: Any
    summary: str
    handler: Handler
    method: str = "GET"
    query: type[Query] = Query
    tenants: bool = False
    refusals: tuple[int, ...] = ()
    others: tuple[str, ...] = ()
    body: Any = None
    own: Any = None


class Request:
    """One question. ``query`` has the parameters, as the route's `Query`."""

    def __init__(self, connection: Connection, route: Route) -> None:
        self.connection, self.headers = connection, connection.headers
        self.access: Access = connection.visitor
        self.query: Any = _decoded(connection.query, route.query)
        self._held = 0  # bytes of the body

    def accepts(self, media_type: str) -> bool:
        """Check if the client names this media type."""
        ranges = self.headers.get("accept", "").lower().split(",")
        return any(media_range.partition(";")[0].strip() == media_type for media_range in ranges)

    async def body(self) -> bytes:
        """Read the whole body; `free` gives its memory back. Raises `Problem` unless it is JSON and not too large."""
        if self.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            raise Problem(415, Reason.NO_JSON, f"send {JSON}, and say so in Content-Type")
        most = MOST_BODY_BYTES if self.access.everything else MOST_TENANT_BODY_BYTES
        too_large = Problem(
            413,
            Reason.TOO_LARGE,
            f"the body is longer than {most} bytes: ask for fewer pairs at once",
            headers={"Connection": "close"},
        )
        length = self.headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:12]) > most:
            raise too_large
        chunks = []
        while piece := await self.connection.receive():
            chunks.append(piece)
            self._held += len(piece)
            self.access.gatekeeper.hold(len(piece))
            if self._held > most:
                raise too_large
        return b"".join(chunks)

    def free(self) -> None:
        """Give back the memory of the body."""
        self.access.gatekeeper.hold(-self._held)
        self._held = 0


def decoded(body: bytes, shape: type[T]) -> T:
    """Return a body of this shape. Raises `Problem`."""
    try:
        return msgspec.json.decode(body, type=shape)
    except (ValueError, RecursionError) as error:  # also Unicode's and msgspec's
        raise Problem(400, Reason.BAD_REQUEST, f"the body cannot be read: {error}") from None


def _decoded(text: bytes, shape: type[Query]) -> Query:
    """Return the parameters. Unknown, invalid, missing and repeated ones are refused."""
    values: dict[str, Any] = {}
    try:
        for name, value in parse_qsl(
            text.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=bool(text),
            errors="strict",
            max_num_fields=_MOST_FIELDS,
        ):
            if name in shape.many:
                values.setdefault(name, []).append(value)
            elif name in values:
                raise ValueError(f"`{name}` is there twice")
            else:
                values[name] = value
        return msgspec.convert(values, shape, strict=False)
    except ValueError as error:
        fields = ", ".join(shape.__struct_fields__) or "none at all"
        why = f"the query cannot be read ({error}); the parameters here are: {fields}"
        raise Problem(400, Reason.BAD_REQUEST, why) from None
