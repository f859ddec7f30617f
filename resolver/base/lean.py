"""Imports packages without parts that are never used here: TLS, a web server, a parser of Python.

A later import gets the real modules. Absent modules fail to import, which the package handles. In hollow ones every
name is an empty class: enough to inherit from, a loud failure if used.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing itself is half a MiB
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Self

_Module = type(sys)

#: By package: modules that are absent, and modules that are hollow. The figures are for Python 3.11.
_PACKAGES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # With prometheus_client's, 4.3 MiB of the daemon and 15 ms of its start.
    "asyncio": (("ssl",), ("ast",)),
    # 6 ms of a short command
    "msgspec": (("_uuid", "typing_extensions"), ()),
    "prometheus_client": (
        (),
        (
            *("gzip", "http.server", "socketserver", "ssl", "urllib.error", "urllib.request"),
            *("wsgiref", "wsgiref.simple_server"),
        ),
    ),
    # Where rich is installed, 5 MiB and 20 ms: it would draw tracebacks.
    "structlog": (("better_exceptions", "rich"), ()),
}


class lean:  # noqa: N801 - a context manager
    """Import without unused parts: ``with lean("asyncio"): import asyncio``."""

    def __init__(self, package: str) -> None:
        absent, hollow = _PACKAGES[package]
        self._stand_ins: dict[str, ModuleType | None] = dict.fromkeys(absent)  # None: it cannot be imported
        self._stand_ins |= {name: _hollow(name) for name in hollow}

    def __enter__(self) -> Self:
        self._stand_ins = {name: each for name, each in self._stand_ins.items() if name not in sys.modules}
        sys.modules.update(self._stand_ins)  # type: ignore[arg-type]
        return self

    def __exit__(self, *exc: object) -> None:
        for name, module in self._stand_ins.items():
            if sys.modules.get(name, self) is module:
                del sys.modules[name]


def _hollow(name: str) -> ModuleType | None:
    module = _Module(name)

    def attribute(wanted: str) -> type:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        made = type(wanted, (), {"__module__": name})
        setattr(module, wanted, made)
        return made

    module.__getattr__ = attribute  # type: ignore[method-assign]
    return module
