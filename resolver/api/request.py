"""Requests and answers as values: a route's input, output and description."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec

from resolver.api.problems import Problem, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from resolver.api.access import Access
    from resolver.serve.http import Connection

JSON, TEXT, STREAM = "application/json", "text/plain; charset=utf-8", "text/event-stream"
#: Of one body: from root and the socket's group, and from tenants.
MOST_BODY_BYTES, MOST_TENANT_BODY_BYTES = 2 << 20, 64 << 10
_MOST_FIELDS = 64
_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")

encode = msgspec.json.Encoder(enc_hook=str, order="deterministic").encode


class Parameter(NamedTuple):
    """One parameter of a query. ``schema`` is its JSON schema; ``many``: it may come more than once."""

    name: str
    schema: dict[str, Any]
    description: str
    required: bool = False
    many: bool = False


def integer(name: str, most: int, description: str, *, required: bool = False) -> Parameter:
    """Return a parameter with a number from 1 to ``most``."""
    return Parameter(name, {"type": "integer", "minimum": 1, "maximum": most}, description, required)


class Answer(NamedTuple):
    """Response to a request."""

    body: bytes
    media_type: str = JSON
    status: int = 200
    headers: Mapping[str, str] | None = None


Handler = Callable[[Any, "Request"], Awaitable["Answer | None"]]


class Route(NamedTuple):
    """Path and method with their handler. ``shape`` is the type of its JSON, ``others`` are further media types.

    ``tenants`` may use it. ``refusals`` are its statuses in addition to those of every route.
    """

    path: str
    shape: Any
    summary: str
    handler: Handler
    method: str = "GET"
    parameters: tuple[Parameter, ...] = ()
    tenants: bool = False
    refusals: tuple[int, ...] = ()
    others: tuple[str, ...] = ()
    body: Any = None


class Routes(list[Route]):
    """Routes in the order of their declaration."""

    def add(self, path: str, shape: Any, summary: str, **more: Any) -> Callable[[Handler], Handler]:
        """Declare the decorated function as the handler; ``more`` are further fields of `Route`."""

        def declare(handler: Handler) -> Handler:
            self.append(Route(path, shape, summary, handler, **more))
            return handler

        return declare


class Request:
    """One question, with its parameters checked against those of its route."""

    def __init__(self, connection: Connection, route: Route) -> None:
        self.connection, self.headers = connection, connection.headers
        self.access: Access = connection.visitor
        self._values = _checked(connection.query, route.parameters)
        self._held = 0  # bytes of the body

    def text(self, name: str) -> str:
        """Return a parameter; empty if it was not given."""
        return self._values.get(name, [""])[0]

    def number(self, name: str) -> int | None:
        """Return a numeric parameter."""
        values = self._values.get(name)
        return int(values[0]) if values else None

    def every(self, name: str) -> list[str]:
        """Return a repeatable parameter."""
        return self._values.get(name, [])

    def accepts(self, media_type: str) -> bool:
        """Check if the client names this media type."""
        ranges = self.headers.get("accept", "").lower().split(",")
        return any(each.partition(";")[0].strip() == media_type for each in ranges)

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


def _checked(query: bytes, parameters: Iterable[Parameter]) -> dict[str, list[str]]:
    """Return the values by name. Unknown, invalid and repeated parameters are refused."""
    known = {parameter.name: parameter for parameter in parameters}
    try:
        pairs = parse_qsl(
            query.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=bool(query),
            errors="strict",
            max_num_fields=_MOST_FIELDS,
        )
    except ValueError as error:
        raise _bad(f"the query cannot be read ({error})") from None
    values: dict[str, list[str]] = {}
    for name, value in pairs:
        parameter = known.get(name)
        if parameter is None:
            allowed = ", ".join(known) or "none at all"
            raise _bad(f"there is no parameter {name[:40]!r} here; there are: {allowed}")
        if name in values and not parameter.many:
            raise _bad(f"the parameter {name} is there twice")
        _check(parameter, value)
        values.setdefault(name, []).append(value)
    missing = [name for name, parameter in known.items() if parameter.required and name not in values]
    if missing:
        raise _bad(f"the parameter {missing[0]} is missing: {known[missing[0]].description}")
    return values


def _check(parameter: Parameter, value: str) -> None:
    schema = parameter.schema["items"] if parameter.many else parameter.schema
    if schema["type"] == "integer":
        if not _NUMBER.fullmatch(value) or not schema["minimum"] <= int(value) <= schema["maximum"]:
            raise _bad(
                f"the parameter {parameter.name} is a number from {schema['minimum']} to {schema['maximum']}"
            )
    elif "enum" in schema:
        if value not in schema["enum"]:
            raise _bad(f"the parameter {parameter.name} is one of {', '.join(schema['enum'])}")
    elif not schema.get("minLength", 0) <= len(value) <= schema["maxLength"]:
        raise _bad(f"the parameter {parameter.name} has from 1 to {schema['maxLength']} characters")
    elif "pattern" in schema and not re.search(schema["pattern"], value):
        raise _bad(f"the parameter {parameter.name} does not look like one: {parameter.description}")


def _bad(detail: str) -> Problem:
    return Problem(400, Reason.BAD_REQUEST, detail)
