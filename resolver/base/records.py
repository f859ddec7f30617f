"""A `NamedTuple` without typing, because look-ups import this: typing takes as long as starting Python.

The class is that of `collections.namedtuple`; mypy sees typing's.
"""

from __future__ import annotations

__all__ = ["NamedTuple"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NamedTuple
else:
    from collections import namedtuple

    class _Record(type):
        """Turns a class into a named tuple: its annotations become fields, its methods stay."""

        def __new__(cls, name: str, _bases: tuple[type, ...], body: dict[str, Any]) -> type:
            fields = body.pop("__annotations__", {})
            defaults = [body.pop(field) for field in fields if field in body]
            made = namedtuple(name, fields, defaults=defaults, module=body.pop("__module__"))  # noqa: PYI024
            made.__annotations__ = fields
            for key, value in body.items():
                setattr(made, key, value)
            return made

    NamedTuple = type.__new__(_Record, "NamedTuple", (), {})
