"""List the containers that run on this node, as the daemon knows them.

Leaves out containers that share another's PID namespace and use neither a GPU nor HAMi.
"""

import argparse
import sys

from resolver.api.shapes import Containers
from resolver.cli.ask_daemon import AS_IT_IS, add_socket, ask, print_answer
from resolver.cli.show import Cell, print_table, short_id, since

_NUMBERS = ("PIDNS", "HOST PID", "REGIONS")
COLUMNS = ("CONTAINER", "NAMESPACE", "POD", "NAME", "POD UID", *_NUMBERS, "SINCE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_socket(parser, AS_IT_IS)


def run(args: argparse.Namespace) -> int:
    if args.json:
        print_answer("/v1/containers", args.socket)
        return 0
    answer = ask(Containers, "/v1/containers", args.socket)
    rows: list[tuple[Cell, ...]] = [
        (
            short_id(container.container_id),
            container.namespace,
            container.pod,
            container.container_name,
            container.pod_uid,
            container.pidns,
            container.init_host_pid,
            len(container.regions),
            since(container.since, answer.at),
        )
        for container in answer.containers
    ]
    if not rows:
        print("No container runs on this node.", file=sys.stderr)
        return 0
    # Those without a name come last.
    rows.sort(key=lambda row: [(not value, str(value)) for value in (*row[1:4], row[0])])
    # A terminal has 80 columns, and people know a pod by its name.
    print_table(COLUMNS, rows, right=_NUMBERS, for_programs=("POD UID", *_NUMBERS), shorten="POD")
    return 0
