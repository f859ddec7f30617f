"""Text of settings' values: durations, addresses, lists of paths."""

import re
from typing import Any

OFF = "off"  # for ``metrics_addr``

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h)?\s*")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


def parse_duration(text: str) -> float:
    """Parse ``250ms``, ``1s``, ``2m``, ``1h`` or plain seconds into seconds. Raises ValueError."""
    match = _DURATION.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is not a duration such as 250ms, 1s or 2m")
    return float(match[1]) * _UNITS[match[2]]


def parse_bool(text: str) -> bool:
    """Parse ``true``, ``yes``, ``on`` or ``1``, or an opposite. Raises ValueError."""
    if text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    raise ValueError("neither true nor false")


def parse_address(text: str) -> tuple[str, int] | None:
    """Parse ``HOST:PORT``; an empty host means every address. None for ``off``. Raises ValueError.

    Names other than ``localhost`` are refused: resolving one would delay the start.
    """
    if text == OFF:
        return None
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > 65535:
        raise ValueError("write HOST:PORT, :PORT for every address, or off; the highest PORT is 65535")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 address goes in brackets: [::1]:9395")
    if host == "localhost":
        return "127.0.0.1", int(port)
    if host:
        import socket  # only where one is given

        try:
            socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except (OSError, UnicodeError):
            raise ValueError(
                f"{host!r} is not an address: write one such as 127.0.0.1 or [::1], not a name"
            ) from None
    return host, int(port)


def check_path(path: str) -> None:
    """Raise ValueError for a relative path, because the daemon runs in another directory than its caller."""
    if path and not path.startswith("/"):
        raise ValueError("it is not an absolute path: begin it with /")


def check_paths(paths: tuple[str, ...]) -> None:
    """Raise ValueError for an empty list, and for a path that is empty or relative."""
    if not paths or "" in paths:
        raise ValueError("write a list of paths, none of them empty")
    for path in paths:
        if path != "auto" and not path.startswith("/"):
            raise ValueError(f"{path!r} is not an absolute path: begin it with /, or write auto")


def text_of(value: Any) -> str:
    """Format a value as in the environment; floats are durations: ``250ms``, ``1.5s``."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ":".join(value)
    if isinstance(value, float):
        return f"{value:g}s" if value >= 1 else f"{value * 1000:g}ms"
    return str(value)
