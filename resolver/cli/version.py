"""Print the versions of this command and of the running daemon.

They differ only between an upgrade and the daemon's restart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resolver import __version__, client
from resolver.base.errors import ResolverError
from resolver.cli.ask_daemon import add_socket
from resolver.cli.show import print_json, print_pairs

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_socket(parser, "print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print them; 0, also without a daemon."""
    daemon, why = None, ""
    try:
        daemon = str(client.get_json("/v1/status", args.socket, seconds=1.0)["version"])
    except ResolverError as error:
        why = str(error).partition(". ")[0]
    except (KeyError, TypeError):
        why = "its answer is not understood: it is of another version"
    if args.json:
        print_json({"resolver": __version__, "daemon": daemon, "daemon_unknown": why or None})
    else:
        print_pairs([("resolver", __version__), ("daemon", daemon or f"unknown: {why}")])
    return 0
