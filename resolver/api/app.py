"""The application: finds the route, checks access, and turns exceptions into refusals."""

import functools
from pathlib import Path

from resolver.api import lists, lookups, stream
from resolver.api.access import Access
from resolver.api.context import Context
from resolver.api.problems import PROBLEM, Problem, Reason, problem_of
from resolver.api.request import Answer, Request, Route, encode
from resolver.base.errors import ResolverError
from resolver.base.journal import Journal
from resolver.serve.http import Connection, HangUp

#: OpenAPI descriptions that `make tables` writes from `ROUTES`: of all routes, and of the tenants'.
DESCRIPTION, DESCRIPTION_FOR_TENANTS = "openapi.json", "openapi-tenants.json"


async def describe(_context: Context, request: Request) -> Answer:
    """``GET /v1/openapi.json``."""
    return Answer(_read(DESCRIPTION if request.access.everything else DESCRIPTION_FOR_TENANTS))


@functools.cache
def _read(name: str) -> bytes:
    return Path(__file__).with_name(name).read_bytes()


ROUTES = (
    *lookups.ROUTES,
    *lists.ROUTES,
    *stream.ROUTES,
    Route("/v1/openapi.json", None, "This description", describe, tenants=True),
)


class Api:
    """Application of both sockets. A connection's visitor is its `Access`."""

    def __init__(self, context: Context, journal: Journal) -> None:
        self._context = context
        self._journal = journal
        self.routes: dict[str, dict[str, Route]] = {}
        for route in ROUTES:
            self.routes.setdefault(route.path, {})[route.method] = route

    async def __call__(self, connection: Connection) -> None:
        counters = connection.visitor.gatekeeper.counters
        counters["requests"] += 1
        try:
            answer = await self._answer(connection)
        except HangUp:
            raise
        except Exception as error:
            if not isinstance(error, Problem | ResolverError | OSError):
                self._journal.log.exception("internal_error", step="api", path=connection.path)
            counters["refused_requests"] += 1
            problem = problem_of(error)
            answer = Answer(encode(problem.document), PROBLEM, problem.status, problem.headers)
        if answer is not None:
            await connection.answer(*answer)

    async def _answer(self, connection: Connection) -> Answer | None:
        access: Access = connection.visitor
        access.spend(1)
        path, method = connection.path, connection.method
        by_method = self.routes.get(path)
        if by_method is None:
            access.require(everything=True)
            routes = ", ".join(self.routes)
            raise Problem(404, Reason.NO_SUCH_ROUTE, f"there is no {path[:80]!r} here; there are: {routes}")
        route = by_method.get("GET" if method == "HEAD" else method)
        if route is None:
            allowed = ", ".join([*by_method, "HEAD"])
            why = f"{path} answers {allowed} and nothing else"
            raise Problem(405, Reason.METHOD_NOT_ALLOWED, why, headers={"Allow": allowed})
        access.require(everything=not route.tenants)
        request = Request(connection, route)
        try:
            return await route.handler(self._context, request)
        finally:
            request.free()
