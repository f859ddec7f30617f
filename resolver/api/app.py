"""The application: finds the route, checks access, and turns exceptions into refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resolver.api import lists, lookups, stream
from resolver.api.problems import PROBLEM, Problem, Reason, problem_of
from resolver.api.request import Answer, ClientGone, Request, Route, encode
from resolver.base.errors import ResolverError

if TYPE_CHECKING:
    from resolver.api.access import ApiGatekeeper
    from resolver.api.context import Context
    from resolver.base.journal import Journal


class Api:
    """An ASGI application; the caller is in ``scope["state"]["access"]``."""

    def __init__(self, context: Context, journal: Journal) -> None:
        self._context = context
        self._journal = journal
        self._description = b""
        self.routes: dict[str, dict[str, Route]] = {}
        described = Route("/v1/openapi.json", None, "This description", self._describe, tenants=True)
        for route in (*lookups.ROUTES, *lists.ROUTES, *stream.ROUTES, described):
            self.routes.setdefault(route.path, {})[route.method] = route

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        gatekeeper = scope["state"]["access"].gatekeeper
        gatekeeper.counters["requests"] += 1
        try:
            answer = await self._answer(scope, receive, send)
        except ClientGone:
            return
        except Exception as error:
            if not isinstance(error, Problem | ResolverError | OSError):
                self._journal.log.exception("internal_error", step="api", path=scope["path"])
            answer = _refusal(gatekeeper, problem_of(error))
        if answer is not None:
            await _send(answer, send)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> Answer | None:
        access = scope["state"]["access"]
        access.spend(1)
        by_method = self.routes.get(scope["path"])
        if by_method is None:
            access.require(everything=True)
            known = ", ".join(self.routes)
            raise Problem(
                404, Reason.NO_SUCH_ROUTE, f"there is no {scope['path'][:80]!r} here; there are: {known}"
            )
        route = by_method.get("GET" if scope["method"] == "HEAD" else scope["method"])
        if route is None:
            allowed = ", ".join([*by_method, "HEAD"])
            why = f"{scope['path']} answers {allowed} and nothing else"
            raise Problem(405, Reason.METHOD_NOT_ALLOWED, why, headers={"Allow": allowed})
        access.require(everything=not route.tenants)
        request = Request(scope, receive, send, route)
        try:
            return await route.handler(self._context, request)
        finally:
            request.free()

    async def _describe(self, _context: Context, _request: Request) -> Answer:
        """``GET /v1/openapi.json``; made when it is first asked for."""
        if not self._description:
            from resolver.api.openapi import describe

            routes = [route for by_method in self.routes.values() for route in by_method.values()]
            self._description = encode(describe(routes))
        return Answer(self._description)


def _refusal(gatekeeper: ApiGatekeeper, problem: Problem) -> Answer:
    gatekeeper.counters["refused_requests"] += 1
    return Answer(
        body=encode(problem.document()),
        media_type=PROBLEM,
        status=problem.status,
        headers=tuple(problem.headers.items()),
    )


async def _send(answer: Answer, send: Any) -> None:
    headers = [(b"content-type", answer.media_type.encode()), (b"content-length", b"%d" % len(answer.body))]
    if answer.status == 304:
        headers.clear()
    headers += [(name.lower().encode(), value.encode()) for name, value in answer.headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})
