"""Show GPU use live: GPU > container > process, with utilization, memory and repaired slots.

Needs a running daemon. In a pipe, or with --once, it prints a plain table and exits. In a container it shows that
container's GPUs and processes, through the socket of the setting tenant_socket.

Keys: q quit; arrows, j, k, Page Up, Page Down, Home, End move; u, m, n, i sort by utilization, memory, name, idle time,
r reverses; f hides or shows processes; / filters, Esc shows all; Ctrl-Z suspends. A ? is an unknown value: the line
above the keys has the details of the selected row.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from resolver.base.errors import UsageError
from resolver.cli.ask_daemon import add_socket
from resolver.cli.container_names import not_found
from resolver.cli.parser import seconds
from resolver.cli.show import print_json, print_table

if TYPE_CHECKING:
    import argparse

    from resolver.api.status import Status
    from resolver.cli._top.rows import Row

COLUMNS = ("KIND", "GPU", "CONTAINER", "PROCESS", "HOST_PID", "PID", "UTIL", "MEMORY", "NOTE")
_RIGHT = ("GPU", "HOST_PID", "PID", "UTIL", "MEMORY")
_NO_LINES = ("empty", "unresolved")

OWN_PARTS = "gpus", "processes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    from resolver.cli._top.rows import no_gpu, rows_of
    from resolver.cli.documents import from_daemon

    def read() -> tuple[Status, list[Row]]:
        documents = from_daemon(args.socket)
        return documents.status, rows_of(documents, args.name)

    plain_terminal = not sys.stdin.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown")
    once = args.json or args.once or plain_terminal or not sys.stdout.isatty()
    args.every = None if once else args.interval
    status, rows = read()
    if args.name and not any(row.kind == "gpu" for row in rows):
        raise not_found(args.name, ". Containers without a GPU are not shown")
    if args.json:
        driver, lost = status.driver, [row for row in rows if row.kind != "gpu"]
        state = {"at": status.at, "driver_version": driver.version, "driver_error": driver.error}
        gpus = [row.facts for row in rows if row.kind == "gpu"]
        print_json(
            {**state, "gpus": gpus, "unresolved": [row.facts for heading in lost for row in heading.below]}
        )
    elif once:
        print_plain(rows)
        if not rows:
            print(f"resolver top: {no_gpu(status)}", file=sys.stderr)
    else:
        from resolver.cli._top.screen import watch

        return watch(read, args.interval, status, rows)
    return 0


def print_plain(rows: list[Row]) -> None:
    """Print the rows with the kind first on each line; ``-`` means none, ``?`` unknown."""
    from resolver.cli._top.rows import Choice, chosen

    lines, gpu, container = [], "", ""
    for row in chosen(rows, Choice()):
        if row.kind in _NO_LINES:
            continue
        note = row.note.replace("✓", "repaired")
        if row.depth == 0:
            gpu, container = row.title.partition(" ")[0], ""
            note = row.detail.replace(" ·", ";")
        elif row.depth == 1:
            container = row.title
            gpu = gpu if row.kind == "container" else ""
        process = row.title if row.depth == 2 else ""
        use = (text.replace("≥", ">") for text in (*row.numbers(), row.percent(), row.bytes()))
        lines.append((row.kind, gpu, container, process, *use, note))
    print_table(COLUMNS, lines, right=_RIGHT)
