"""Show the settings in force, and where each comes from: default, file, environment or command line.

A daemon that runs is asked for its own. Without one, or with any option that `resolver run` takes, the settings are
those that `resolver run` would start with, here and with the same options: so a file can be tried before it is used.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from resolver import client
from resolver.cli.ask_daemon import understood
from resolver.cli.show import print_json, print_table
from resolver.config import options
from resolver.errors import ResolverError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

HELP = "show the settings, and where each comes from"
COLUMNS = ("NAME", "VALUE", "FROM")


class SettingRow(NamedTuple):
    """One setting; ``value`` as JSON has it, durations in seconds."""

    name: str
    value: Any
    origin: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of ``run``, and how to print."""
    options.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print them. Wrong settings are the dispatcher's: one sentence, exit code 2."""
    from resolver import config

    flags = options.given(args)
    settings, origins = config.load_with_origins(flags, args.config)
    rows: Iterable[SettingRow] = (
        SettingRow(each.name, each.value, each.origin) for each in config.described(settings, origins)
    )
    of, why = "", "options were given"
    if not args.config and flags.keys() <= {"socket"}:
        of = client.socket_of(args.socket)
        try:
            rows, why = _of_daemon(of), ""
        except ResolverError as error:
            of, why = "", str(error).partition(". ")[0]
    if args.json:
        values = {row.name: {"value": row.value, "origin": row.origin} for row in rows}
        print_json({"daemon": of or None, "settings": values})
        return 0
    about = (
        f"those of the daemon at {of}" if of else f"those that `resolver run` would start with here ({why})"
    )
    print(f"resolver config: {about}", file=sys.stderr)
    print_table(COLUMNS, [(row.name, config.text_of(row.value), row.origin) for row in rows])
    return 0


def _of_daemon(socket_path: str) -> list[SettingRow]:
    status = client.get_json("/v1/status", socket_path)
    with understood():
        return [SettingRow(each["name"], each["value"], each["origin"]) for each in status["settings"]]
