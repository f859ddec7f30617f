"""Questions to the running daemon, answered by the records of `resolver.api.shapes`."""

from __future__ import annotations

from resolver import client
from resolver.base.errors import CannotKnow, NotFound

TYPE_CHECKING = False  # typing would slow down a look-up
if TYPE_CHECKING:
    import argparse
    from typing import TypeVar

    T = TypeVar("T")

_OTHER_VERSION = "Is it of this version? Restart it after an upgrade, or name its socket with --socket"
AS_IT_IS = "print the daemon's answer as it is"


def add_socket(parser: argparse.ArgumentParser, json: str = "") -> None:
    """Add ``--socket``, and ``--json`` with this help."""
    parser.add_argument("--socket", metavar="PATH", help="the daemon's socket (or RESOLVER_SOCKET)")
    if json:
        parser.add_argument("--json", action="store_true", help=json)


def ask(shape: type[T], path: str, socket_path: str | None, seconds: float = 5.0) -> T:
    """Return a route's answer as a record of this shape. Raises CannotKnow for another version's answer."""
    import msgspec  # a daemon that doesn't answer is reported without it

    try:
        return msgspec.json.decode(client.get_bytes(path, socket_path, seconds=seconds), type=shape)
    except NotFound as error:  # every daemon of this version has the route
        raise CannotKnow(f"the daemon does not know {path} ({error}). {_OTHER_VERSION}") from None
    except msgspec.DecodeError as error:
        raise CannotKnow(
            f"the daemon's answer to {path} is not understood ({error}). {_OTHER_VERSION}"
        ) from None


def print_answer(path: str, socket_path: str | None) -> None:
    """Print a route's answer as it is, with fields that only a newer daemon has."""
    from resolver.cli.show import print_json

    print_json(ask(dict[str, object], path, socket_path))
