"""What the daemon knows, as lists: each answer is made of one picture, and kept until there is another."""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING

from resolver.api import shapes
from resolver.api.request import Answer, ClientGone, Parameter, Request, Route, encode

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from resolver.api.context import Context
    from resolver.state import RegionReport, SlotReport, Snapshot

Slots = tuple["RegionReport", "SlotReport"]


async def containers(context: Context, request: Request) -> Answer:  # noqa: ARG001
    """``GET /v1/containers``."""
    picture = context.view.snapshot()
    head = shapes.Containers(picture.at, [])
    return await context.kept.answer("/v1/containers", picture, head, picture.containers)


async def regions(context: Context, request: Request) -> Answer:  # noqa: ARG001
    """``GET /v1/regions``."""
    picture = context.view.snapshot()
    rejected = [shapes.RejectedFile(path, reason) for path, reason in picture.rejected.items()]
    head = shapes.Regions(
        at=picture.at, rejected=rejected, missing_dirs=list(picture.missing_dirs), regions=[]
    )
    return await context.kept.answer("/v1/regions", picture, head, picture.regions, shapes.Region.of)


async def slots(context: Context, request: Request) -> Answer:  # noqa: ARG001
    """``GET /v1/slots``."""
    picture = context.view.snapshot()
    return await context.kept.answer(
        "/v1/slots", picture, shapes.Slots(picture.at, []), _slots(picture), _slot
    )


async def unresolved(context: Context, request: Request) -> Answer:  # noqa: ARG001
    """``GET /v1/unresolved``."""
    picture = context.view.snapshot()
    samples = list(picture.joined.orphans)
    head = shapes.Unresolved(
        at=picture.at, by_reason=shapes.unresolved_counts(picture), samples=samples, slots=[]
    )
    return await context.kept.answer("/v1/unresolved", picture, head, picture.unresolved(), _slot)


def _slots(picture: Snapshot) -> Iterator[Slots]:
    return ((region, slot) for region in picture.regions for slot in region.slots)


def _slot(of: Slots) -> shapes.Slot:
    return shapes.Slot.of(*of)


async def processes(context: Context, request: Request) -> Answer:  # noqa: ARG001
    """``GET /v1/processes``."""
    picture = context.view.snapshot()
    head = shapes.Processes(
        at=picture.at,
        collected_at=picture.collected_at or None,
        error=picture.joined.error or None,
        processes=[],
    )
    return await context.kept.answer("/v1/processes", picture, head, picture.gpu_processes)


async def gpus(context: Context, request: Request) -> Answer:
    """``GET /v1/gpus``: not sent again to a client that has the same version; such a request waits for the next one."""
    known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
    wait = request.number("wait")
    if wait is not None:
        await _wait_for_gpus(context, request, known, wait)
    picture = context.view.snapshot()
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


async def _wait_for_gpus(context: Context, request: Request, known: Collection[str], seconds: int) -> None:
    """Until there are other GPUs than the known ones, for that long at most, or as long as the client is there."""
    context.gatekeeper.open_stream()
    gone = asyncio.create_task(request.gone())
    try:
        async with asyncio.timeout(seconds):
            while not gone.done():
                number = context.view.inventories.number
                if _gpus_tag(context.view.snapshot()) not in known:
                    return
                news = asyncio.create_task(context.view.inventories.wait(number))
                try:
                    await asyncio.wait({news, gone}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    news.cancel()
    except TimeoutError:
        return
    finally:
        gone.cancel()
        context.gatekeeper.close_stream()
    raise ClientGone


async def status(context: Context, request: Request) -> Answer:  # noqa: ARG001
    """``GET /v1/status``."""
    counted = dict(context.gatekeeper.counters) | {"connected": context.gatekeeper.inside}
    if context.tenants is not None:
        counted |= {f"tenants_{name}": count for name, count in context.tenants.counters.items()}
        counted["tenants_connected"] = context.tenants.inside
    return Answer(encode(shapes.status(context.view.snapshot(), counted)))


WAIT = Parameter(
    "wait",
    {"type": "integer", "minimum": 1, "maximum": 600},
    "seconds to wait for another version than those in If-None-Match, before that is answered with 304",
)

ROUTES: tuple[Route, ...] = (
    Route(
        method="GET",
        path="/v1/containers",
        handler=containers,
        summary="The containers that run on this node",
        shape=shapes.Containers,
    ),
    Route(
        method="GET",
        path="/v1/regions",
        handler=regions,
        summary="HAMi's shared regions, and files that are skipped",
        shape=shapes.Regions,
    ),
    Route(
        method="GET",
        path="/v1/slots",
        handler=slots,
        summary="Every slot in use, and what became of it",
        shape=shapes.Slots,
    ),
    Route(
        method="GET",
        path="/v1/processes",
        handler=processes,
        summary="Every process on every GPU",
        shape=shapes.Processes,
    ),
    Route(
        method="GET",
        path="/v1/gpus",
        handler=gpus,
        summary="The GPUs and their health; with ETag",
        shape=shapes.Gpus,
        parameters=(WAIT,),
        refusals=(304,),
    ),
    Route(
        method="GET",
        path="/v1/unresolved",
        handler=unresolved,
        summary="Slots and samples without an answer, by reason",
        shape=shapes.Unresolved,
    ),
    Route(method="GET", path="/v1/status", handler=status, summary="How the daemon is", shape=shapes.Status),
)
