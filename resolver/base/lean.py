"""Imports packages without the modules that they import but this project never uses: TLS, a web server, ast.

Importing an absent module fails, which the packages handle. Every name of a hollow module is an empty class: packages
can inherit from it, and calling its methods fails. After the block, an import gets the real module.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

#: Optional imports of structlog (rich for tracebacks: 5 MiB, 20 ms) and of msgspec (6 ms).
_ABSENT = ("better_exceptions", "rich", "_uuid", "typing_extensions")
#: Imports of asyncio and prometheus_client: 4.3 MiB and 15 ms of the daemon's start (Python 3.11).
_HOLLOW = (
    *("ast", "gzip", "http.server", "socketserver", "ssl", "urllib.error", "urllib.request"),
    *("wsgiref", "wsgiref.simple_server"),
)


class _Hollow(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        empty = type(name, (), {"__module__": self.__name__})
        setattr(self, name, empty)
        return empty


@contextmanager
def lean() -> Iterator[None]:
    """Import packages without unused parts in this block."""
    stand_ins: dict[str, ModuleType | None] = dict.fromkeys(_ABSENT)  # None: it can't be imported
    stand_ins |= {name: _Hollow(name) for name in _HOLLOW}
    stand_ins = {name: module for name, module in stand_ins.items() if name not in sys.modules}
    sys.modules.update(stand_ins)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name, module in stand_ins.items():
            if sys.modules.get(name, stand_ins) is module:
                del sys.modules[name]
