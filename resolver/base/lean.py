"""Imports packages without parts that are never used here: TLS, a web server, a parser of Python.

A later import gets the real modules. Absent modules fail to import, which the packages handle. In hollow ones every
name is an empty class: enough to inherit from, a loud failure if used.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

#: Optional imports of structlog (rich for tracebacks: 5 MiB, 20 ms) and of msgspec (6 ms).
_ABSENT = ("better_exceptions", "rich", "_uuid", "typing_extensions")
#: 4.3 MiB of the daemon and 15 ms of its start, with asyncio and prometheus_client (Python 3.11).
_HOLLOW = (
    *("ast", "gzip", "http.server", "socketserver", "ssl", "urllib.error", "urllib.request"),
    *("wsgiref", "wsgiref.simple_server"),
)


class _Hollow(ModuleType):
    def __getattr__(self, wanted: str) -> type:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        made = type(wanted, (), {"__module__": self.__name__})
        setattr(self, wanted, made)
        return made


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
