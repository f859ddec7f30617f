"""``GET /v1/events``: new events as server-sent events, or the kept ones as JSON."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from resolver.api.context import Context
from resolver.api.problems import Problem, Reason
from resolver.api.request import STREAM, Answer, Query, Request, Route, encode
from resolver.api.shapes import Events
from resolver.base.event_log import KINDS, Event

#: Seconds of silence before a sign of life, by which both ends notice if the other has gone.
SILENCE = 30.0

_KIND = "only events of this kind; may be given more than once"
_AFTER = "the id of the last event that is known, as in the header Last-Event-ID; 0: all that are still kept come first"
_ID = "^(0|[0-9]{1,12}-[0-9]{1,18})$"
Kind = Annotated[str, Meta(extra_json_schema={"enum": list(KINDS)})]


class Which(Query, frozen=True):
    """The wanted events."""

    many = frozenset({"kind"})
    kind: Annotated[list[Kind], Meta(description=_KIND)] | UnsetType = UNSET
    after: Annotated[str, Meta(min_length=1, max_length=40, pattern=_ID, description=_AFTER)] | UnsetType = (
        UNSET
    )


async def events(context: Context, request: Request) -> Answer | None:
    """Answer with a stream, unless JSON is requested."""
    which: Which = request.query
    kinds = frozenset(which.kind or KINDS)
    if unknown := kinds.difference(KINDS):
        why = f"there is no kind {min(unknown)[:40]!r} of event; there are: {', '.join(KINDS)}"
        raise Problem(400, Reason.BAD_REQUEST, why)
    last_id = which.after or request.headers.get("last-event-id", "")
    if request.accepts("application/json") and not request.accepts(STREAM):
        kept = context.view.events.after(_number(context, last_id or "0"))
        picture = context.view.snapshot()
        return Answer(encode(Events(picture.at, [event for event in kept if event.kind in kinds])))
    with context.gatekeeper.stream():
        number = _number(context, last_id) if last_id else context.view.events.number
        await request.connection.stream(_pieces(context, number, kinds), STREAM)
    return None


def _number(context: Context, event_id: str) -> int:
    """Return the number in an event's id; 0, which precedes all, for an earlier daemon's."""
    epoch, _, number = event_id.partition("-")
    if not number.isdecimal() or len(number) > 18:
        if event_id == "0":
            return 0
        raise Problem(400, Reason.BAD_REQUEST, "Last-Event-ID is not an event id")
    return int(number) if epoch == str(int(context.view.snapshot().started_at)) else 0


async def _pieces(context: Context, number: int, kinds: frozenset[str]) -> AsyncIterator[bytes]:
    """Yield the events after ``number`` as text, for ever."""
    yield b": these are the events of resolver\n\n"
    while True:
        try:
            async with asyncio.timeout(SILENCE):
                news = await context.view.events.wait(number)
        except TimeoutError:
            yield b": nothing happened\n\n"
        else:
            yield _lines(int(context.view.snapshot().started_at), news, number, kinds)
            number = news[-1].number


def _lines(epoch: int, news: Iterable[Event], number: int, kinds: frozenset[str]) -> bytes:
    parts = []
    for event in news:
        if event.number > number + 1:
            parts.append(b": %d events are not kept any more\n\n" % (event.number - number - 1))
        number = event.number
        if event.kind in kinds:
            data = encode(event)
            parts.append(b"id: %d-%d\nevent: %s\ndata: %s\n\n" % (epoch, number, event.kind.encode(), data))
    return b"".join(parts)


ROUTES = (
    Route(
        "/v1/events",
        Events,
        "Events: live as server-sent events, or the recent ones as JSON",
        events,
        query=Which,
        others=(STREAM,),
    ),
)
