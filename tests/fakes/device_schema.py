"""What the API server holds a ``Device`` to: the rules of Koordinator's published definition, as a JSON schema.

Written from the definition's fields (``scheduling.koordinator.sh/v1alpha1``): what is required, which patterns hold,
and that a field that is not known is refused, as it is with ``fieldValidation=Strict``.
"""

from typing import Any, Final

import jsonschema_rs

_INT32: Final = {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}
_TEXTS: Final = {"type": "object", "additionalProperties": {"type": "string"}}
_SUFFIX: Final = r"([KMGTPE]i|[numkMGTPE]|[eE][+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+))?"
_QUANTITY: Final = {
    "anyOf": [
        {"type": "integer"},
        {"type": "string", "pattern": rf"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+){_SUFFIX}$"},
    ]
}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    known = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**known, "required": list(required)}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_CONDITION: Final = _object(
    {
        "type": {
            "type": "string",
            "maxLength": 316,
            "pattern": r"^([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$",
        },
        "status": {"enum": ["True", "False", "Unknown"]},
        "reason": {
            "type": "string",
            "minLength": 1,
            "maxLength": 1024,
            "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        },
        "message": {"type": "string", "maxLength": 32768},
        "lastTransitionTime": {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"},
    },
    *("type", "status", "reason", "message", "lastTransitionTime"),
)
_TOPOLOGY: Final = _object(
    {"socketID": _INT32, "nodeID": _INT32, "pcieID": {"type": "string"}, "busID": {"type": "string"}},
    *("socketID", "nodeID", "pcieID"),
)
_DEVICE: Final = _object(
    {
        "type": {"type": "string"},
        "id": {"type": "string"},
        "minor": _INT32,
        "moduleID": _INT32,
        "health": {"type": "boolean"},
        "labels": _TEXTS,
        "resources": {"type": "object", "additionalProperties": _QUANTITY},
        "topology": _TOPOLOGY,
        "conditions": _list(_CONDITION),
    },
    "health",
)
SCHEMA: Final = _object(
    {
        "apiVersion": {"const": "scheduling.koordinator.sh/v1alpha1"},
        "kind": {"const": "Device"},
        "metadata": {"type": "object"},
        "spec": _object({"devices": _list(_DEVICE)}),
        "status": _object({"allocations": _list(_object({"type": {"type": "string"}}))}),
    },
    *("apiVersion", "kind", "metadata"),
)
_VALIDATOR: Final = jsonschema_rs.Draft202012Validator(SCHEMA)


def wrong_with(device: Any) -> list[str]:
    return [
        f"{'.'.join(map(str, error.instance_path))}: {error.message}"
        for error in _VALIDATOR.iter_errors(device)
    ]
