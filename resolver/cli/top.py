"""Show GPU use live: GPU > container > process, with utilization, memory and repaired slots.

Needs a running daemon. In a pipe, or with --once, it prints a plain table and exits. In a container it shows that
container's GPUs and processes, through the socket of the setting tenant_socket.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from resolver.base.errors import UsageError
from resolver.cli.ask_daemon import add_socket
from resolver.cli.parser import seconds

if TYPE_CHECKING:
    import argparse

OWN_PARTS = "gpus", "processes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    about = "only this pod or container: NAMESPACE/POD[/NAME], POD_UID[/NAME], NAME or an id"
    add("name", nargs="?", default="", metavar="POD", help=about)
    add("--once", action="store_true", help="print a plain table, as in a pipe, and exit")
    about = "time between two updates, from 100ms to 1h (default 1s)"
    add("--interval", metavar="TIME", type=seconds, default="1s", help=about)
    add_socket(parser, "print the same as JSON, once")


def run(args: argparse.Namespace) -> int:
    """Show it; returns 4 without a daemon, 1 if no container has the name, else 0."""
    if not 0.1 <= args.interval <= 3600:
        raise UsageError(f"--interval {args.interval:g}s: it takes a time from 100ms to 1h")
    from resolver.cli._top.reading import Reading, read

    plain_terminal = not sys.stdin.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown")
    once = args.json or args.once or plain_terminal or not sys.stdout.isatty()
    args.every = None if once else args.interval
    tree = read(args.socket, args.name)
    if args.name and not tree.gpus:
        from resolver.cli.container_names import not_found

        raise not_found(args.name, ". Containers without a GPU are not shown")
    if once:
        from resolver.cli._top import plain
        from resolver.cli.show import print_json

        if args.json:
            print_json(plain.as_json(tree))
        else:
            plain.print_plain(tree)
        return 0
    from resolver.cli._top.screen import watch

    return watch(args.socket, args.interval, Reading(tree, time.time()), args.name)
