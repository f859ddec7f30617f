"""``GET /v1/events``: what happens, as server-sent events, or what is still kept of it, as JSON."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from resolver.api.problems import Problem, Reason
from resolver.api.request import STREAM, Answer, Parameter, Request, Route, encode
from resolver.api.shapes import Events
from resolver.log.event_names import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resolver.api.context import Context
    from resolver.log.event_log import Event

#: A silent stream says so, so that both ends notice when the other is gone.
_SILENCE = 30.0

KIND = Parameter(
    "kind",
    {"type": "array", "items": {"type": "string", "enum": list(KINDS)}},
    "only events of this kind; may be given more than once",
    many=True,
)
AFTER = Parameter(
    "after",
    {"type": "string", "minLength": 1, "maxLength": 40, "pattern": "^(0|[0-9]{1,12}-[0-9]{1,18})$"},
    "the id of the last event that is known, as in the header Last-Event-ID; 0: all that are still kept come first",
)


async def events_route(context: Context, request: Request) -> Answer | None:
    """A stream, unless JSON is asked for."""
    kinds = frozenset(request.every("kind"))
    known = request.text("after") or request.headers.get("last-event-id", "")
    if request.accepts("application/json") and not request.accepts(STREAM):
        kept = context.view.events.after(_number(context, known or "0"))
        picture = context.view.snapshot()
        return Answer(encode(Events(picture.at, [each for each in kept if _wanted(each, kinds)])))
    context.gatekeeper.open_stream()
    try:
        await _stream(
            context, request, _number(context, known) if known else context.view.events.number, kinds
        )
    finally:
        context.gatekeeper.close_stream()
    return None


def _epoch(context: Context) -> int:
    return int(context.view.snapshot().started_at)


def _number(context: Context, known: str) -> int:
    """The number in an event's id; 0, which is before all of them, if it is of an earlier daemon's."""
    epoch, _, number = known.partition("-")
    if not number.isdecimal() or len(number) > 18:
        if known == "0":
            return 0
        raise Problem(400, Reason.BAD_REQUEST, "Last-Event-ID is no id of an event")
    return int(number) if epoch == str(_epoch(context)) else 0


def _wanted(event: Event, kinds: frozenset[str]) -> bool:
    return not kinds or event.kind in kinds


async def _stream(context: Context, request: Request, number: int, kinds: frozenset[str]) -> None:
    request.connection.endless = True
    headers = [(b"content-type", STREAM.encode()), (b"cache-control", b"no-store")]
    await request.send({"type": "http.response.start", "status": 200, "headers": headers})
    await _say(request, b": these are the events of resolver\n\n")
    gone = asyncio.create_task(request.gone())
    waiting: asyncio.Task[list[Event]] | None = None
    try:
        while not gone.done():
            waiting = waiting or asyncio.create_task(context.view.events.wait(number))
            done, _ = await asyncio.wait(
                {waiting, gone}, timeout=_SILENCE, return_when=asyncio.FIRST_COMPLETED
            )
            if waiting in done:
                news, waiting = waiting.result(), None
                text = _lines(_epoch(context), news, number, kinds)
                number = news[-1].number
            else:
                text = b": nothing happened\n\n"
            if text and not gone.done():
                await _say(request, text)
    finally:
        for task in (gone, waiting):
            if task is not None:
                task.cancel()


async def _say(request: Request, text: bytes) -> None:
    """Waits until what was said before is taken; the server hangs up on who does not take it."""
    message: dict[str, Any] = {"type": "http.response.body", "body": text, "more_body": True}
    await request.send(message)


def _lines(epoch: int, news: Iterable[Event], number: int, kinds: frozenset[str]) -> bytes:
    parts = []
    for event in news:
        if event.number > number + 1:
            parts.append(b": %d events are not kept any more\n\n" % (event.number - number - 1))
        number = event.number
        if _wanted(event, kinds):
            data = encode(event)
            parts.append(b"id: %d-%d\nevent: %s\ndata: %s\n\n" % (epoch, number, event.kind.encode(), data))
    return b"".join(parts)


ROUTES: tuple[Route, ...] = (
    Route(
        method="GET",
        path="/v1/events",
        handler=events_route,
        summary="What happens: server-sent events as they come, or, as JSON, those that are still kept",
        shape=Events,
        parameters=(KIND, AFTER),
        others=(STREAM,),
    ),
)
