"""Show live who uses the GPUs: GPU > container > process, with utilization, memory and repaired slots.

Needs a running daemon. Into a pipe, and with --once, it prints what there is and ends.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from resolver.errors import UsageError

if TYPE_CHECKING:
    import argparse

    from resolver.cli._top.reading import Reading

HELP = "show live who uses the GPUs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add = parser.add_argument
    add(
        "name",
        nargs="?",
        default="",
        metavar="POD",
        help="only this pod or container: NAMESPACE/POD[/NAME], POD_UID[/NAME], NAME or an id",
    )
    add(
        "--gpu",
        action="append",
        default=[],
        metavar="N",
        help="only this GPU, by its index or UUID; may be given several times",
    )
    add("--once", action="store_true", help="print one frame and end; into a pipe: a plain table")
    add("--json", action="store_true", help="print the same as JSON, once")
    add("--interval", metavar="TIME", default="1s", help="between two readings (default 1s)")
    add("--socket", metavar="PATH", help="where the daemon listens (default /run/resolver/resolver.sock)")


def run(args: argparse.Namespace) -> int:
    """Show it; 0 unless there is no daemon to ask (4), or not what was asked for (1)."""
    interval = _seconds(args.interval)
    from resolver.cli._top.choose import ScreenPart
    from resolver.cli._top.reading import Reading, read

    part = ScreenPart(tuple(args.gpu), args.name)
    tree = read(args.socket)
    part.require(tree)
    tree = part.of(tree)
    if args.json or not sys.stdout.isatty():
        from resolver.cli._top import plain
        from resolver.cli.show import print_json

        if args.json:
            print_json(plain.as_json(tree))
        else:
            plain.print_plain(tree)
        return 0
    reading = Reading(tree, time.time())
    if args.once or not sys.stdin.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        _print_page(reading)
        return 0
    from resolver.cli._top.live import watch

    return watch(args.socket, interval, reading, part)


def _seconds(text: str) -> float:
    from resolver.config import parse_duration

    try:
        seconds = parse_duration(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise UsageError(f"--interval {text}: it takes a time from 100ms to 1h, such as 500ms or 2s")
    return seconds


def _print_page(reading: Reading) -> None:
    from resolver.cli._top.cells import glyphs_for
    from resolver.cli._top.frame import page
    from resolver.cli._top.rows import Choice, rows_of
    from resolver.cli._top.screen import Painter

    glyphs, painter = glyphs_for(sys.stdout.encoding, os.environ), Painter()
    width = os.get_terminal_size(sys.stdout.fileno()).columns or 80
    rows = rows_of(reading.tree, Choice(), glyphs)
    for line in page(reading, rows, width, glyphs, os.uname().nodename, time.time()):
        print(painter.paint(line).rstrip())
