"""What the daemon knows, as lists: each answer is made of one picture, and kept until there is another."""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING, Any

from resolver.api import shapes
from resolver.api.request import Answer, ClientGone, Parameter, Request, Route, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from msgspec import Struct

    from resolver.api.app import Api
    from resolver.state import RegionReport, SlotReport, Snapshot

#: Objects that are made and encoded at a time, before others get their turn: a millisecond or two.
_PIECE = 500
_MOST_KEPT_BYTES = 1 << 20

Slots = tuple["RegionReport", "SlotReport"]


class Kept:
    """The last answer of each route, with the picture it was made of."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[Snapshot, bytes]] = {}

    async def answer(
        self, path: str, picture: Snapshot, head: Struct, items: Iterable[Any], make: Callable[[Any], Struct]
    ) -> Answer:
        """``head`` with ``items`` in the place of its last field, an empty list."""
        known = self._answers.get(path)
        if known is not None and known[0] is picture:
            return Answer(known[1])
        parts, piece = [], []
        for number, item in enumerate(items, 1):
            piece.append(make(item))
            if number % _PIECE == 0:
                parts.append(encode(piece)[1:-1])
                piece.clear()
                await asyncio.sleep(0)
        if piece:
            parts.append(encode(piece)[1:-1])
        body = encode(head)[: -len(b"]}")] + b",".join(parts) + b"]}"
        self._answers.pop(path, None)
        if len(body) <= _MOST_KEPT_BYTES:
            self._answers[path] = picture, body
        return Answer(body)


async def containers(api: Api, request: Request) -> Answer:  # noqa: ARG001
    """``GET /v1/containers``."""
    picture = api.view.snapshot()
    head = shapes.Containers(picture.at, [])
    return await api.kept.answer("/v1/containers", picture, head, picture.containers, shapes.Container.of)


async def regions(api: Api, request: Request) -> Answer:  # noqa: ARG001
    """``GET /v1/regions``."""
    picture = api.view.snapshot()
    rejected = [shapes.RejectedFile(path, reason) for path, reason in picture.rejected.items()]
    head = shapes.Regions(picture.at, rejected, list(picture.missing_dirs), [])
    return await api.kept.answer("/v1/regions", picture, head, picture.regions, shapes.Region.of)


async def slots(api: Api, request: Request) -> Answer:  # noqa: ARG001
    """``GET /v1/slots``."""
    picture = api.view.snapshot()
    return await api.kept.answer("/v1/slots", picture, shapes.Slots(picture.at, []), _slots(picture), _slot)


async def unresolved(api: Api, request: Request) -> Answer:  # noqa: ARG001
    """``GET /v1/unresolved``."""
    picture = api.view.snapshot()
    samples = [shapes.Sample.of(each) for each in picture.joined.orphans]
    head = shapes.Unresolved(picture.at, shapes.unresolved_counts(picture), samples, [])
    return await api.kept.answer("/v1/unresolved", picture, head, picture.unresolved(), _slot)


def _slots(picture: Snapshot) -> Iterator[Slots]:
    return ((region, slot) for region in picture.regions for slot in region.slots)


def _slot(of: Slots) -> shapes.Slot:
    return shapes.Slot.of(*of)


async def processes(api: Api, request: Request) -> Answer:  # noqa: ARG001
    """``GET /v1/processes``."""
    picture = api.view.snapshot()
    head = shapes.Processes(picture.at, picture.collected_at or None, picture.joined.error or None, [])
    return await api.kept.answer("/v1/processes", picture, head, picture.gpu_processes, shapes.Process.of)


async def gpus(api: Api, request: Request) -> Answer:
    """``GET /v1/gpus``: not sent again to who has the same version; who asks for that is kept waiting for the next."""
    known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
    wait = request.number("wait")
    if wait is not None:
        await _wait_for_gpus(api, request, known, wait)
    picture = api.view.snapshot()
    tag = _gpus_tag(picture)
    headers = (("ETag", tag), ("Cache-Control", "no-cache"))
    if tag in known or "*" in known:
        return Answer(b"", status=304, headers=headers)
    return Answer(encode(shapes.Gpus.of(picture.inventory, picture.joined.error)), headers=headers)


def _gpus_tag(picture: Snapshot) -> str:
    """Versions begin anew with each daemon. A failure of NVML changes the answer, and not the version."""
    error = picture.joined.error
    failed = f"-{zlib.crc32(error.encode()):x}" if error else ""
    return f'"{picture.started_at:.3f}-{picture.inventory.version}{failed}"'


async def _wait_for_gpus(api: Api, request: Request, known: Collection[str], seconds: int) -> None:
    """Until there are other GPUs than the known ones, for that long at most, or as long as the client is there."""
    api.door.open_stream()
    gone = asyncio.create_task(request.gone())
    try:
        async with asyncio.timeout(seconds):
            while not gone.done():
                number = api.view.inventories.number
                if _gpus_tag(api.view.snapshot()) not in known:
                    return
                news = asyncio.create_task(api.view.inventories.wait(number))
                try:
                    await asyncio.wait({news, gone}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    news.cancel()
    except TimeoutError:
        return
    finally:
        gone.cancel()
        api.door.close_stream()
    raise ClientGone


async def status(api: Api, request: Request) -> Answer:  # noqa: ARG001
    """``GET /v1/status``."""
    counted = dict(api.door.counters) | {"connected": api.door.inside}
    if api.tenants is not None:
        counted |= {f"tenants_{name}": count for name, count in api.tenants.counters.items()}
        counted["tenants_connected"] = api.tenants.inside
    return Answer(encode(shapes.status(api.view.snapshot(), counted)))


WAIT = Parameter(
    "wait",
    {"type": "integer", "minimum": 1, "maximum": 600},
    "seconds to wait for another version than those in If-None-Match, before that is answered with 304",
)

ROUTES: tuple[Route, ...] = (
    Route("GET", "/v1/containers", containers, "The containers that run on this node", shapes.Containers),
    Route(
        "GET", "/v1/regions", regions, "HAMi's shared regions, and files that are left alone", shapes.Regions
    ),
    Route("GET", "/v1/slots", slots, "Every slot in use, and what became of it", shapes.Slots),
    Route("GET", "/v1/processes", processes, "Every process on every GPU", shapes.Processes),
    Route(
        "GET", "/v1/gpus", gpus, "The GPUs and their health; with ETag", shapes.Gpus, (WAIT,), refusals=(304,)
    ),
    Route(
        "GET",
        "/v1/unresolved",
        unresolved,
        "Slots and samples without an answer, by reason",
        shapes.Unresolved,
    ),
    Route("GET", "/v1/status", status, "How the daemon is", shapes.Status),
)
