"""The questions about single processes: by container and PID, by host PID, and thousands at once."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from resolver.api.access import Tenant
from resolver.api.context import Context
from resolver.api.problems import Problem, Reason, problem_of
from resolver.api.request import TEXT, Answer, Query, Request, Route, decoded, encode
from resolver.base.budget import Slices
from resolver.base.errors import AccessDenied, NotFound, ProcessGone, ResolverError
from resolver.linux.cgroup import strip_scheme
from resolver.linux.procfs import Procfs
from resolver.lookup.cached import NO_SUCH_PROCESS, Answers, Batch, Hit, find_own
from resolver.lookup.forward import ContainerProcess, lookup, lookup_many, walk_own
from resolver.lookup.reverse import ReversedProcess, reverse

MOST_PAIRS = 10_000
_MOST_PID, _MOST_INODE = 2**31 - 1, 2**32 - 1
_PAIRS_PER_REQUEST = 100
_WALK_SECONDS = 5.0
#: Pairs of a batch that are looked up at once.
_STEP = 500

Pid = Annotated[int, Meta(ge=1, le=_MOST_PID)]
Cid = Annotated[str, Meta(min_length=1, max_length=300)]
_CONTAINER = (
    "the container's id, the first 6 or more characters of one, or <podUID>/<containerName>; a caller that "
    "may ask only about its PID namespace can leave it out"
)
_PIDNS = "inode of a PID namespace nested in the container's, if the PID is a number there"


class Inside(Query, frozen=True):
    """A process by its number in a container."""

    pid: Annotated[Pid, Meta(description="the PID as the container sees it")]
    container: Annotated[Cid, Meta(description=_CONTAINER)] | UnsetType = UNSET
    pidns: Annotated[int, Meta(ge=1, le=_MOST_INODE, description=_PIDNS)] | UnsetType = UNSET


class OnHost(Query, frozen=True):
    """A process by its number on the host."""

    host_pid: Annotated[Pid, Meta(description="the PID, or a thread's id, as the host sees it")]


#: `ContainerProcess` in JSON; the id is null if its cgroup has none.
FoundProcess = msgspec.defstruct(
    "FoundProcess",
    (ContainerProcess.__annotations__ | {"container_id": "str | None"}).items(),
    namespace={"__doc__": ContainerProcess.__doc__},
    frozen=True,
)


class Pair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One question of a batch. Callers that may ask only about their PID namespace can leave out ``container``."""

    pid: Pid
    container: Cid | None = None


class Pairs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A batch: each pair as ``["<cid>", <pid>]`` or as an object."""

    pairs: Annotated[list[tuple[Cid, Pid] | Pair], Meta(max_length=MOST_PAIRS)]


class PairAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One answer of a batch: ``host_pid`` and ``start_time``, or the ``reason`` why there is none."""

    host_pid: int | None = None
    start_time: int | None = None
    reason: Reason | None = None


class PairAnswers(msgspec.Struct, frozen=True):
    """The answers in the order of the pairs. ``source`` is where the daemon's PIDs come from."""

    source: str
    answers: list[PairAnswer]


class _Split(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`Pairs` as text: as objects, 10,000 of them would leave memory in pieces."""

    pairs: Annotated[list[msgspec.Raw], Meta(max_length=MOST_PAIRS)]


_decode_step = msgspec.json.Decoder(list[tuple[Cid, Pid] | Pair]).decode


async def look_up(context: Context, request: Request) -> Answer:
    """``GET /v1/lookup``: the host PID of a process."""
    query: Inside = request.query
    ns_pid, pidns, cid = query.pid, query.pidns or None, query.container or ""
    tenant = request.access.tenant
    if tenant is not None:
        # The same refusal for all other namespaces, there or not.
        if pidns not in (None, tenant.own.pidns) or not _is_own(tenant, cid):
            raise _not_yours()
        own = (await _own(context, tenant, [ns_pid]))[ns_pid]
        if own is None:
            why = f"your PID namespace {tenant.own.pidns} has no process {ns_pid}"
            raise Problem(404, Reason.NO_SUCH_PROCESS, why)
        result = own
    else:
        if not cid:
            why = f"the parameter container is missing: {_CONTAINER}"
            raise Problem(400, Reason.BAD_REQUEST, why)
        quick = None
        if pidns is None:
            await context.view.live.look_for((cid,))
            quick = context.view.live.find(cid, ns_pid)
        if quick is not None:
            result = quick._replace(container_name=context.name_of(quick.container_id))
        else:
            walk = partial(lookup, context.view.procfs, cid, ns_pid, pidns=pidns)
            result = await context.walks.run(walk)
    if request.accepts("text/plain") and not request.accepts("application/json"):
        return Answer(f"{result.host_pid}\n".encode(), TEXT)
    document = FoundProcess(**result._asdict() | {"container_id": result.container_id or None})
    return Answer(msgspec.json.format(encode(document), indent=2))


async def _own(
    context: Context, tenant: Tenant, ns_pids: Iterable[int]
) -> Mapping[int, ContainerProcess | None]:
    """Look numbers up in the peer's own PID namespace, in any container."""
    procfs, own, pidmap, slices = context.view.procfs, tenant.own, context.view.live.pidmap, Slices()
    processes: dict[int, ContainerProcess | None] = {}
    missing = list(ns_pids)
    for late in (False, True):
        if not missing or (late and not await pidmap.catch_up(slices)):
            break
        for ns_pid in missing:
            processes[ns_pid] = find_own(procfs, pidmap, own, ns_pid)
            await slices.yield_if_due()
        missing = [ns_pid for ns_pid in missing if processes[ns_pid] is None]
    if missing and pidmap.source.exact() is None:
        processes |= await context.tenants_walks.run(walk_own, procfs, own, missing)
    tenant.require_alive()  # while the process lives, its namespace is not reused
    return processes


def _is_own(tenant: Tenant, cid: str) -> bool:
    """Check if that is the peer's container, by its id or the start of it; names never match."""
    wanted = strip_scheme(cid.strip())
    return not cid or (
        len(wanted) >= 6 and bool(tenant.container_id) and tenant.container_id.startswith(wanted)
    )


def _not_yours() -> Problem:
    return Problem(403, Reason.NOT_YOURS, "this client may look up only processes in its own PID namespace")


async def look_back(context: Context, request: Request) -> Answer:
    """Answer ``GET /v1/reverse``: the container of a host PID."""
    host_pid = request.query.host_pid
    tenant = request.access.tenant
    procfs = context.view.procfs
    if tenant is None:
        result = await context.walks.run(reverse, procfs, host_pid, context.pods)
    else:
        # The same refusal for other containers' processes and for missing ones.
        try:
            if tenant.own.pidns not in procfs.pidns_chain(procfs.tgid(host_pid)):
                raise _not_yours()
            result = await context.tenants_walks.run(reverse, procfs, host_pid, context.pods)
        except (NotFound, ProcessGone, AccessDenied):
            raise _not_yours() from None
        if all(level.pidns != tenant.own.pidns for level in result.levels) or not tenant.peer.alive():
            raise _not_yours()
    return Answer(encode(result))


async def look_up_many(context: Context, request: Request) -> Answer:
    """``POST /v1/lookup``: up to 10,000 pairs, answered in order."""
    body = await request.body()
    pairs = decoded(body, _Split).pairs
    request.access.spend(len(pairs) / _PAIRS_PER_REQUEST)
    steps = [b"[%b]" % b",".join(pairs[start : start + _STEP]) for start in range(0, len(pairs), _STEP)]
    del pairs
    every = answer_pairs if request.access.tenant is None else partial(_every_own, request.access.tenant)
    deadline = time.monotonic() + _WALK_SECONDS
    answers: list[bytes] = []
    for text in steps:
        try:
            step = _decode_step(text)
        except (ValueError, RecursionError):
            decoded(body, Pairs)  # its error names the place
            raise
        questions = [
            (question.container or "", question.pid) if isinstance(question, Pair) else question
            for question in step
        ]
        wanted: dict[str, dict[int, None]] = {}
        for cid, ns_pid in questions:
            wanted.setdefault(cid, {})[ns_pid] = None
        by_container = await every(context, wanted, deadline)
        results = [by_container[cid].get(ns_pid, Reason.TOO_SLOW) for cid, ns_pid in questions]
        answers.append(encode(list(map(_answer, results)))[1:-1])
        await asyncio.sleep(0)
    head = PairAnswers(context.view.live.pidmap.source.name, [])
    return Answer(encode(head)[: -len(b"]}")] + b",".join(answers) + b"]}")


def _answer(result: Hit | str) -> PairAnswer:
    return PairAnswer(*result) if isinstance(result, Hit) else PairAnswer(reason=Reason(result))


def _answers(processes: Mapping[int, ContainerProcess | None]) -> Answers:
    return {
        n: Hit(result.host_pid, result.start_time) if result else NO_SUCH_PROCESS
        for n, result in processes.items()
    }


async def answer_pairs(
    context: Context, wanted: dict[str, dict[int, None]], deadline: float
) -> dict[str, Answers]:
    """Answer from the map, and by walks for the rest until the deadline."""
    named = {cid: ns_pids for cid, ns_pids in wanted.items() if cid}
    batch = Batch(context.view.procfs, context.view.live)
    await batch.run(named)
    by_container: dict[str, Answers] = {
        "": dict.fromkeys(wanted.get("", ()), Reason.BAD_REQUEST),
        **batch.answers,
    }
    if batch.left:
        for cid, answers in (
            await context.walks.run(_walk, context.view.procfs, batch.left, deadline)
        ).items():
            by_container[cid] |= answers
    return by_container


def _walk(procfs: Procfs, left: dict[str, list[int]], deadline: float) -> dict[str, Answers]:
    """Answer the rest of a batch, container by container, until the deadline. Takes a thread."""
    answers: dict[str, Answers] = {}
    for cid, ns_pids in left.items():
        if time.monotonic() > deadline:
            break
        try:
            answers[cid] = _answers(lookup_many(procfs, cid, ns_pids))
        except ResolverError as error:
            answers[cid] = dict.fromkeys(ns_pids, problem_of(error).reason)
    return answers


async def _every_own(
    tenant: Tenant, context: Context, wanted: dict[str, dict[int, None]], _deadline: float
) -> dict[str, Answers]:
    """Answer from the peer's own PID namespace; the reason of all other pairs is the same, there or not."""
    ns_pids = {ns_pid: None for cid, numbers in wanted.items() if _is_own(tenant, cid) for ns_pid in numbers}
    own = _answers(await _own(context, tenant, ns_pids))
    answers: dict[str, Answers] = {}
    for cid, numbers in wanted.items():
        answers[cid] = own if _is_own(tenant, cid) else dict.fromkeys(numbers, Reason.NOT_YOURS)
    return answers


ROUTES = (
    Route(
        "/v1/lookup",
        FoundProcess,
        "The host PID of a process that is known by its PID inside a container",
        look_up,
        query=Inside,
        tenants=True,
        refusals=(404, 409),
        others=("text/plain",),
    ),
    Route(
        "/v1/reverse",
        ReversedProcess,
        "Container of a host PID, and its PID at every namespace level",
        look_back,
        query=OnHost,
        tenants=True,
        refusals=(404, 409),
    ),
    Route(
        "/v1/lookup",
        PairAnswers,
        "The same for up to 10,000 pairs of container and PID at once, answered in their order",
        look_up_many,
        method="POST",
        tenants=True,
        refusals=(408, 413, 415),
        body=Pairs,
    ),
)
