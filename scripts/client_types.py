"""Writes `resolver/client_types.py` from the API's own description: `make client-types`."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, cast

from resolver.api.app import Api
from resolver.api.context import Context
from resolver.api.openapi import describe
from resolver.log.journal import Journal

TARGET = Path(__file__).parent.parent / "resolver" / "client_types.py"
_HEAD = '''"""What the daemon answers, as types for programs that ask it by `resolver.client`.

Written by ``make client-types`` from the API's description; ``docs/stability.md`` says what is promised of it.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

'''
_PLAIN = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
#: Questions, and what is raised as an error: nobody gets them from `resolver.client`.
_LEFT_OUT = {"Pair", "Pairs", "ProblemDocument"}


def description() -> dict[str, Any]:
    """The API's, without an API."""
    routes = Api(cast("Context", None), Journal()).routes
    return describe(route for by_method in routes.values() for route in by_method.values())


def source() -> str:
    """The module's text."""
    schemas = description()["components"]["schemas"]
    objects = {name: each for name, each in schemas.items() if "properties" in each and name not in _LEFT_OUT}
    return _HEAD + "\n".join(_class(name, each, schemas) for name, each in sorted(objects.items()))


def _class(name: str, schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    lines = [f"class {name}(TypedDict):"]
    text = inspect.cleandoc(schema["description"])
    closed = text + ("\n" if "\n" in text else "")
    lines += [textwrap.indent(f'"""{closed}"""', "    "), ""]
    for field, of in schema["properties"].items():
        hint = _hint(of, schemas)
        lines.append(f"    {field}: {hint if field in required else f'NotRequired[{hint}]'}")
    return "\n" + "\n".join(lines) + "\n"


def _hint(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        # A later daemon may have more reasons than the client knows.
        return name if "properties" in schemas[name] else "str"
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(_hint(each, schemas) for each in schema["anyOf"]))
    kind = schema.get("type")
    if kind == "array":
        return f"list[{_hint(schema['items'], schemas)}]"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"dict[str, {_hint(values, schemas) if isinstance(values, dict) else 'Any'}]"
    return _PLAIN.get(str(kind), "Any")


if __name__ == "__main__":
    TARGET.write_text(source())
    sys.stdout.write(f"{len(re.findall('^class ', source(), re.MULTILINE))} types in {TARGET}\n")
