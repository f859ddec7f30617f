"""List the containers that run on this node, as the daemon knows them.

Leaves out containers that share another's PID namespace and use neither a GPU nor HAMi.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from resolver.cli.ask_daemon import add_socket, ask, duration, moment, understood
from resolver.cli.show import on_terminal, print_json, print_table, short_id

if TYPE_CHECKING:
    import argparse

    from resolver.cli.show import Cell

    Row = tuple[Cell, ...]

#: A terminal leaves at least so much of a pod's name.
_SHORTEST_POD = 12
_NAMES = ("CONTAINER", "NAMESPACE", "POD", "NAME", "POD UID")
COLUMNS = (*_NAMES, "PIDNS", "HOST PID", "REGIONS", "SINCE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_socket(parser)
    parser.add_argument("--json", action="store_true", help="print the daemon's answer as it is")


def run(args: argparse.Namespace) -> int:
    """Print them, by name."""
    answer = ask("/v1/containers", args.socket)
    if args.json:
        print_json(answer)
        return 0
    person = on_terminal()
    with understood():
        rows: list[Row] = [
            (
                short_id(each["container_id"]),
                each["namespace"],
                each["pod"],
                each["container_name"],
                each["pod_uid"],
                each["pidns"],
                each["init_host_pid"],
                len(each["regions"]),
                duration(answer["at"] - each["since"]) if person else moment(each["since"]),
            )
            for each in answer["containers"]
        ]
    if not rows:
        print("No container runs on this node.", file=sys.stderr)
        return 0
    # Those without a name come last.
    rows.sort(key=lambda row: [(not value, str(value)) for value in (*row[1:4], row[0])])
    # A person has 80 columns, and knows a pod by its name; programs get all.
    narrow = ("POD UID", "PIDNS", "HOST PID", "REGIONS") if person else ()
    right = ("PIDNS", "HOST PID", "REGIONS")
    print_table(COLUMNS, rows, right=right, without=narrow, shorten_to=("POD", _SHORTEST_POD))
    return 0
