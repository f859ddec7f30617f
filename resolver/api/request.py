"""Questions and answers as values: what a route gets, what it gives, and what it says of itself."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec

from resolver.api.problems import Problem, Reason

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from resolver.api.access import Access
    from resolver.serve.http import Connection

JSON, TEXT, STREAM = "application/json", "text/plain; charset=utf-8", "text/event-stream"
MOST_BODY_BYTES = 2 << 20
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


class Answer(NamedTuple):
    """What is sent back."""

    body: bytes
    media_type: str = JSON
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()


class Route(NamedTuple):
    """What is served under one path by one method.

    ``shape`` is the type of its JSON; ``others`` are other media types that it can answer with. ``tenants`` may ask it,
    too, about their own processes. ``refusals`` are the statuses that are its own, beside those of every route.
    """

    method: str
    path: str
    handler: Callable[[Any, Request], Awaitable[Answer | None]]
    summary: str
    shape: Any
    parameters: tuple[Parameter, ...] = ()
    tenants: bool = False
    refusals: tuple[int, ...] = ()
    others: tuple[str, ...] = ()
    body: Any = None


class Request:
    """One question, with its parameters checked against those of its route."""

    def __init__(self, scope: Any, receive: Any, send: Any, route: Route) -> None:
        self.access: Access = scope["state"]["access"]
        self.connection: Connection = scope["state"]["connection"]
        self.receive = receive
        self.send = send
        self.headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            self.headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        self._values = _checked(scope["query_string"], route.parameters)

    def text(self, name: str) -> str:
        """A parameter; empty if it was not given."""
        return self._values.get(name, [""])[0]

    def number(self, name: str) -> int | None:
        """A parameter that is a number."""
        values = self._values.get(name)
        return int(values[0]) if values else None

    def every(self, name: str) -> list[str]:
        """A parameter that may come more than once."""
        return self._values.get(name, [])

    def accepts(self, media_type: str) -> bool:
        """Whether the client asks for this one by its name."""
        ranges = self.headers.get("accept", "").lower().split(",")
        return any(each.partition(";")[0].strip() == media_type for each in ranges)

    async def gone(self) -> None:
        """Return when the client has hung up."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def body(self) -> bytes:
        """All of the body, if it is JSON and not too large. Raises `Problem`."""
        if self.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            raise Problem(415, Reason.NO_JSON, f"send {JSON}, and say so in Content-Type")
        too_large = Problem(
            413,
            Reason.TOO_LARGE,
            f"the body is longer than {MOST_BODY_BYTES} bytes: ask for fewer pairs at once",
            headers={"Connection": "close"},
        )
        length = self.headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:12]) > MOST_BODY_BYTES:
            raise too_large
        chunks, total, more = [], 0, True
        while more:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunks.append(message["body"])
            total += len(message["body"])
            if total > MOST_BODY_BYTES:
                raise too_large
            more = message["more_body"]
        return b"".join(chunks)


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def _checked(query: bytes, parameters: Iterable[Parameter]) -> dict[str, list[str]]:
    """The values by name. What is not known, not a value, or there too often is refused rather than overlooked."""
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
