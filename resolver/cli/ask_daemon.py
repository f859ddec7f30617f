"""Helpers of commands that ask the running daemon."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from resolver import client
from resolver.base.errors import CannotKnow, NotFound

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

_OTHER_VERSION = "is it of this version? Restart it after an upgrade"
AS_IT_IS = "print the daemon's answer as it is"


def add_socket(parser: argparse.ArgumentParser, json: str = "") -> None:
    """Add ``--socket``, and ``--json`` with this help."""
    parser.add_argument("--socket", metavar="PATH", help="the daemon's socket (or RESOLVER_SOCKET)")
    if json:
        parser.add_argument("--json", action="store_true", help=json)


def ask(path: str, socket_path: str | None, seconds: float = 5.0) -> Any:
    """Return the JSON of a route that every daemon of this version has."""
    try:
        return client.get_json(path, socket_path, seconds=seconds)
    except NotFound as error:  # the lists are always there, if empty
        raise CannotKnow(f"the daemon does not know {path} ({error}): {_OTHER_VERSION}") from None


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """Turn an answer of unknown form, from another version's daemon, into a sentence."""
    try:
        yield
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        raise CannotKnow(f"the daemon's answer is not understood ({why}): {_OTHER_VERSION}") from error
