"""What commands share that ask the running daemon."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from resolver import client
from resolver.errors import CannotKnow, NoDaemon, NotFound

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

_OTHER_VERSION = "is it of this version? Start it anew after an upgrade"
WITHOUT = "Without one there are: resolver lookup, reverse, slots, explain, config, doctor"


def add_socket(parser: argparse.ArgumentParser) -> None:
    """Where to ask."""
    parser.add_argument("--socket", metavar="PATH", help="where the daemon answers (or RESOLVER_SOCKET)")


def add_config(parser: argparse.ArgumentParser) -> None:
    """For who wants other settings than the daemon's."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="go by the settings in this file and the environment, not by the daemon's",
    )


def ask(path: str, socket_path: str | None) -> Any:
    """The JSON of a route; `NoDaemon` says what can be had all the same."""
    try:
        return client.get_json(path, socket_path)
    except NoDaemon as error:
        raise NoDaemon(f"{error}. {WITHOUT}") from None
    except NotFound as error:  # the lists are always there, if empty
        raise CannotKnow(f"the daemon does not know {path} ({error}): {_OTHER_VERSION}") from None


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """What another version's daemon answers may be made in another way: that is said, and no traceback."""
    try:
        yield
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        raise CannotKnow(f"the daemon's answer is not understood ({why}): {_OTHER_VERSION}") from error


def follow(socket_path: str | None, after: str, kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Events as they happen; `NoDaemon` when there will be no more."""
    try:
        yield from client.stream_events(socket_path, after=after, kinds=kinds)
    except NoDaemon as error:
        raise NoDaemon(f"{error}. {WITHOUT}") from None
    where = client.socket_of(socket_path)
    raise NoDaemon(f"the daemon at {where} ended, or let go of this one: ask again once it runs")


def moment(at: float) -> str:
    """Unix time as people and programs read it, in UTC with milliseconds."""
    whole, thousandths = divmod(round(at * 1000), 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{thousandths:03}Z"


def duration(seconds: float) -> str:
    """Its two largest units: ``3d 4h``, ``12m 5s``, ``0.4s``."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f}s"
    left, parts = int(seconds), list[str]()
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])
