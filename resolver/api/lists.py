"""Lists of the daemon's knowledge: each answer is made from one snapshot."""

import asyncio
import contextlib
import zlib
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from resolver.api import shapes
from resolver.api.context import Context
from resolver.api.own import OwnProcesses, OwnSlots, OwnUsage
from resolver.api.request import Answer, Query, Request, Route, decoded, encode
from resolver.api.status import Status, state_of

_WAIT = "seconds to wait for a version that If-None-Match does not name; then the answer is 304"


class Wait(Query, frozen=True):
    """How long to wait."""

    wait: Annotated[int, Meta(ge=1, le=600, description=_WAIT)] | UnsetType = UNSET


class Cordon(Struct, frozen=True, forbid_unknown_fields=True):
    """UUIDs of the GPUs that an operator has marked; ``*`` marks all."""

    gpus: Annotated[list[Annotated[str, Meta(max_length=100)]], Meta(max_length=256)]


def _list(name: str, shape: type, summary: str, own: type | None = None) -> Route:
    """Return a list's route. On the tenants' socket it answers with the caller's ``own``, if there is such a shape."""
    parts = getattr(shapes, name)

    async def handler(context: Context, request: Request) -> Answer:
        if (tenant := request.access.tenant) is not None:
            document = await getattr(context.own, name)(tenant)
            tenant.require_alive()  # while the process lives, its container id and namespace are not reused
            return Answer(encode(document))
        return await context.listed(parts)

    return Route(f"/v1/{name}", shape, summary, handler, tenants=own is not None, own=own)


async def gpus(context: Context, request: Request) -> Answer:
    """Answer 304 to a client that has this version; with ``wait``, wait for the next one first."""
    etags = [etag.strip().removeprefix("W/") for etag in request.headers.get("if-none-match", "").split(",")]
    if wait := request.query.wait:
        with context.gatekeeper.stream(), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                while _gpus_tag(context) in etags:
                    await context.view.inventories.wait(context.view.inventories.number)
    tag = _gpus_tag(context)
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if tag in etags or "*" in etags:
        return Answer(b"", status=304, headers=headers)
    gpus = replace(shapes.whole(shapes.gpus(context.view.snapshot())), cordoned=context.cordoned)
    return Answer(encode(gpus), headers=headers)


def _gpus_tag(context: Context) -> str:
    """Tag the answer by daemon and version, and by failure and cordon, which change it without a new version."""
    picture = context.view.snapshot()
    more = "\n".join((picture.joined.error, *context.cordoned)).encode()
    return f'"{picture.started_at:.3f}-{picture.inventory.version}{f"-{zlib.crc32(more):x}" if more else ""}"'


async def cordon(context: Context, request: Request) -> Answer:
    """Take the operator's marks from the reporter, for ``/v1/gpus``: the daemon has no credentials of Kubernetes."""
    context.cordoned = decoded(await request.body(), Cordon).gpus
    context.view.inventories.publish("cordon", {})
    return Answer(encode(Cordon(context.cordoned)))


async def status(context: Context, _request: Request) -> Answer:
    """Return the daemon's state, with the counters of the API's sockets."""
    counted = dict(context.gatekeeper.counters) | {"connected": context.gatekeeper.inside}
    if context.tenants is not None:
        counted |= {f"tenants_{name}": count for name, count in context.tenants.counters.items()}
        counted["tenants_connected"] = context.tenants.inside
    return Answer(encode(state_of(context.view.snapshot(), counted)))


ROUTES = (
    _list("containers", shapes.Containers, "The containers that run on this node"),
    _list("regions", shapes.Regions, "HAMi's shared regions, and files that are skipped"),
    _list("slots", shapes.Slots, "Every slot in use, and its state", OwnSlots),
    _list("processes", shapes.Processes, "Every process on every GPU", OwnProcesses),
    _list("usage", shapes.ContainerUses, "Use of each GPU by each container", OwnUsage),
    _list("unresolved", shapes.Unresolved, "Slots and samples without an answer, by reason"),
    Route("/v1/gpus", shapes.Gpus, "The GPUs and their health; with ETag", gpus, query=Wait, refusals=(304,)),
    Route(
        "/v1/cordon",
        Cordon,
        "Marked GPUs, from the reporter",
        cordon,
        "POST",
        refusals=(413, 415),
        body=Cordon,
    ),
    Route("/v1/status", Status, "The daemon's state", status),
)
