"""Show GPU use live: GPU > container > process, with utilization, memory and repaired slots.

Needs a running daemon. In a pipe, or with --once, it prints a plain table and exits.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from resolver.base.errors import UsageError
from resolver.cli.ask_daemon import add_socket

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    about = "only this pod or container: NAMESPACE/POD[/NAME], POD_UID[/NAME], NAME or an id"
    add("name", nargs="?", default="", metavar="POD", help=about)
    add("--once", action="store_true", help="print a plain table, as in a pipe, and exit")
    add("--interval", metavar="TIME", default="1s", help="time between two updates (default 1s)")
    add_socket(parser, "print the same as JSON, once")


def run(args: argparse.Namespace) -> int:
    """Show it; returns 4 without a daemon, 1 if no container has the name, else 0."""
    interval = _seconds(args.interval)
    from resolver.cli._top.reading import Reading, read

    tree = read(args.socket, args.name)
    if args.name and not tree.gpus:
        from resolver.cli.container_names import not_found

        raise not_found(args.name, ". Containers without a GPU are not shown")
    plain_terminal = not sys.stdin.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown")
    if args.json or args.once or plain_terminal or not sys.stdout.isatty():
        from resolver.cli._top import plain
        from resolver.cli.show import print_json

        if args.json:
            print_json(plain.as_json(tree))
        else:
            plain.print_plain(tree)
        return 0
    from resolver.cli._top.screen import watch

    return watch(args.socket, interval, Reading(tree, time.time()), args.name)


def _seconds(text: str) -> float:
    from resolver.config import parse_duration

    try:
        seconds = parse_duration(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise UsageError(f"--interval {text}: it takes a time from 100ms to 1h, such as 500ms or 2s")
    return seconds
