"""Imports packages without what they bring along and nobody here calls: TLS, a command line, a web server of their own.

A daemon and its children carry every module for as long as they run. `lean` keeps some from being loaded while its
block imports the package, and afterwards the names are free again: who imports one of them later gets the real one. A
module that is loaded already is used as it is.

Those that are absent fail to import, which the package is prepared for. Hollow ones import, and every name in them is
an empty class: enough to inherit from and to name as a type, and a loud failure if it is ever used.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing itself is half a MiB
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Self

_Module = type(sys)

#: By package: modules that are absent, and modules that are hollow.
_PACKAGES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # `inspect` is needed, its parser is not; a traceback imports its own.
    "asyncio": (("ssl",), ("ast",)),
    "msgspec": (("_uuid", "typing_extensions"), ("decimal",)),
    "prometheus_client": (
        (),
        (
            *("gzip", "http.server", "socketserver", "ssl", "urllib.error", "urllib.request"),
            *("wsgiref", "wsgiref.simple_server"),
        ),
    ),
    "pynvml": ((), ("ctypes.util",)),
    # argparse asks it for the width of the terminal.
    "shutil": (("bz2", "lzma", "zlib"), ()),
    # It draws tracebacks with rich if it is there: 6 MiB.
    "structlog": (
        ("better_exceptions", "rich"),
        ("pickle", "structlog.stdlib", "structlog.testing", "structlog.threadlocal"),
    ),
    "uvicorn": (
        (),
        (
            *(
                "configparser",
                "email",
                "email.utils",
                "logging.config",
                "pathlib",
                "random",
                "ssl",
                "uvicorn.main",
            ),
            *("uvicorn.middleware.asgi2", "uvicorn.middleware.message_logger"),
            *("uvicorn.middleware.proxy_headers", "uvicorn.middleware.wsgi"),
        ),
    ),
}


class lean:  # noqa: N801 - a context manager
    """``with lean("asyncio"): import asyncio``."""

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
