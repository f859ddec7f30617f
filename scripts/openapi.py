"""The description of the API, made of the same table that serves it: the daemon sends it as `make tables` wrote it."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from resolver.api.app import DESCRIPTION, DESCRIPTION_FOR_TENANTS, ROUTES
from resolver.api.problems import PROBLEM, ProblemDocument
from resolver.api.request import JSON, Query, Route, encode
from resolver.base.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Errors of any route: bad request, not allowed, too often, a defect, no answer.
EVERYWHERE = (400, 403, 408, 429, 431, 500, 503)
_REFERENCE = "#/components/schemas/{name}"


def files() -> dict[str, str]:
    """Return the description for each kind of caller, by the file's name."""
    tenants = [route._replace(shape=route.own or route.shape) for route in ROUTES if route.tenants]
    documents = {DESCRIPTION: describe(ROUTES), DESCRIPTION_FOR_TENANTS: describe(tenants)}
    return {f"resolver/api/{name}": encode(document).decode() + "\n" for name, document in documents.items()}


def describe(routes: Iterable[Route]) -> dict[str, Any]:
    """OpenAPI 3.1."""
    routes = list(routes)
    shapes = [route.shape for route in routes if route.shape is not None]
    bodies = [route.body for route in routes if route.body is not None]
    types = [*shapes, *bodies, ProblemDocument]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    asked = msgspec.json.schema_components(bodies)[1]
    partial = {
        struct.__name__
        for struct in msgspec.Struct.__subclasses__()
        if struct.__struct_config__.omit_defaults
    }
    # Generators refuse the `items: false` of a pair, and its `maxItems` suffices.
    components["Pairs"]["properties"]["pairs"]["items"]["anyOf"][0].pop("items")
    for name, schema in components.items():
        if "properties" in schema and name not in asked and name not in partial:
            schema["required"] = list(schema["properties"])  # answers have every field, default or not
    of = dict(zip([id(shape) for shape in types], schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation: dict[str, Any] = {
            "operationId": f"{route.method.lower()}_{route.path.rsplit('/', 1)[-1].partition('.')[0]}",
            "summary": route.summary,
            "parameters": _parameters(route.query),
            "responses": _responses(route, of),
        }
        if route.body is not None:
            operation["requestBody"] = {"required": True, "content": {JSON: {"schema": of[id(route.body)]}}}
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "resolver",
            "version": VERSION,
            "summary": "Containers of processes, and the state of GPUs. It changes nothing on the node.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://resolver", "description": "the Unix socket /run/resolver/resolver.sock"}],
        "paths": paths,
        "components": {"schemas": components},
    }


def _parameters(query: type[Query]) -> list[dict[str, Any]]:
    described = msgspec.json.schema_components([query])[1][query.__name__]
    return [
        {
            "name": name,
            "in": "query",
            "required": name in described["required"],
            "description": schema.pop("description"),
            "schema": schema,
        }
        for name, schema in described["properties"].items()
    ]


def _responses(route: Route, of: dict[int, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {JSON: {"schema": of[id(route.shape)] if route.shape is not None else {}}}
    for media_type in route.others:
        content[media_type] = {"schema": {"type": "string"}}
    responses: dict[str, Any] = {"200": {"description": HTTPStatus(200).phrase, "content": content}}
    problem = {PROBLEM: {"schema": of[id(ProblemDocument)]}}
    for status in sorted({*EVERYWHERE, *route.refusals}):
        responses[str(status)] = {"description": HTTPStatus(status).phrase}
        if status != HTTPStatus.NOT_MODIFIED:
            responses[str(status)]["content"] = problem
    return responses
