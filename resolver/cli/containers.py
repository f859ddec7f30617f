"""List the containers that run on this node, as the daemon knows them.

A container that shares another's PID namespace and uses neither a GPU nor HAMi is not listed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from resolver.cli.ask_daemon import add_socket, ask, duration, moment, understood
from resolver.cli.show import on_terminal, print_json, print_table, short_id, size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from resolver.cli._top.tree import Amount, Tree
    from resolver.cli.show import Cell

    Row = tuple[Cell, ...]

#: A terminal leaves at least so much of a pod's name.
_SHORTEST_POD = 12
_NAMES = ("CONTAINER", "NAMESPACE", "POD", "NAME", "POD UID")
COLUMNS = (*_NAMES, "PIDNS", "HOST PID", "REGIONS", "SINCE", "CORE", "MEMORY")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_socket(parser)
    parser.add_argument("--json", action="store_true", help="print the daemon's answer as it is")


def _uses(tree: Tree) -> dict[str, tuple[str, str]]:
    """Return use and limit of cores and memory of each GPU by container id, with ``!`` above the limit."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for gpu in tree.gpus:
        for each in gpu.containers:
            cores, memory = found.setdefault(each.container_id, ([], []))
            over = each.over()
            limit = "" if each.core_limit is None else f"/{each.core_limit}%"
            cores.append(f"{_amount(each.utilization, '{}%'.format)}{limit}{'!' * ('core' in over)}")
            limit = "" if each.memory_limit is None else f"/{size(each.memory_limit)}"
            memory.append(f"{_amount(each.memory, size)}{limit}{'!' * ('memory' in over)}")
    return {each: (" ".join(cores), " ".join(memory)) for each, (cores, memory) in found.items()}


def _amount(amount: Amount, text: Callable[[int], str]) -> str:
    return "?" if amount.value is None else (">" if amount.at_least else "") + text(amount.value)


def run(args: argparse.Namespace) -> int:
    """Print them, by name."""
    from resolver.cli._top.reading import read

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
    uses = _uses(read(args.socket))
    rows = [
        (*row, *uses.get(each["container_id"], (None, None)))
        for row, each in zip(rows, answer["containers"], strict=True)
    ]
    # Those without a name come last.
    rows.sort(key=lambda row: [(not value, str(value)) for value in (*row[1:4], row[0])])
    # A person has 80 columns, and knows a pod by its name; programs get all.
    narrow = ("POD UID", "PIDNS", "HOST PID", "REGIONS") if person else ()
    right = ("PIDNS", "HOST PID", "REGIONS")
    print_table(COLUMNS, rows, right=right, without=narrow, shorten_to=("POD", _SHORTEST_POD))
    return 0
