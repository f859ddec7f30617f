"""Show the settings in force and the origin of each: default, file, environment or command line.

Shows a running daemon's settings. Without a daemon, or with any option of `resolver run`, shows the settings with
which `resolver run` would start: `--config FILE` tries out a file.
"""

import argparse
import sys
from collections.abc import Iterable

from resolver import client, config
from resolver.api.status import Status
from resolver.base.errors import ResolverError
from resolver.cli.ask_daemon import ask
from resolver.cli.show import print_json, print_table
from resolver.config import Setting

COLUMNS = ("NAME", "VALUE", "FROM")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    flags = config.given(args)
    rows: Iterable[Setting] = config.described(*config.load(flags, args.config))
    address, why = "", "options were given"
    if not args.config and flags.keys() <= {"socket"}:
        try:
            rows, address = ask(Status, "/v1/status", args.socket).settings, client.socket_of(args.socket)
        except ResolverError as error:
            why = str(error).partition(". ")[0]
    if args.json:
        values = {row.name: {"value": row.value, "origin": row.origin} for row in rows}
        print_json({"daemon": address or None, "settings": values})
        return 0
    would_be = f"those that `resolver run` would start with here ({why})"
    print(f"resolver config: {f'those of the daemon at {address}' if address else would_be}", file=sys.stderr)
    print_table(COLUMNS, [(row.name, config.text_of(row.value), row.origin) for row in rows])
    return 0
