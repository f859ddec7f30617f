"""Check everything that the daemon needs on this node, and give the cause and fix of each problem.

Needs no running daemon, and does not disturb one. Takes the settings of a daemon that runs, and else those that one
would have; the options below win. Changes nothing.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from resolver.cli.show import on_terminal, print_json, printable, styled
from resolver.errors import UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from resolver.doctor import Check, Result
    from resolver.doctor.node import Node

_STYLES = {"ok": "green", "warning": "yellow", "unknown": "yellow", "failed": "red"}
_INDENT = 9  # of what follows the state


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments, and those of the daemon, whose settings are checked."""
    from resolver.config import options

    parser.add_argument(
        "--only", action="append", metavar="CHECK", help="this check only; may be given several times"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the names of the checks, and what they check"
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="print also what a compiler or the kernel said of it, line by line",
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects, one for each check")
    options.add_arguments(parser)
    parser.epilog = (
        "exit status: 0 all well or warnings only, 1 something failed, 2 wrong usage, 4 nothing failed, but something\n"
        "could not be determined"
    )


def run(args: argparse.Namespace) -> int:
    """Print what each check finds; the exit code is by the worst."""
    from resolver.doctor import CHECKS

    if args.list:
        return print_list()
    known = {check.name: check for check in CHECKS}
    for name in args.only or ():
        if name not in known:
            raise UsageError(f"there is no check {name!r}; there are: {', '.join(known)}")
    checks = [check for check in CHECKS if not args.only or check.name in args.only]
    results = _examine(_node(args), checks, quiet=args.json, verbose=args.verbose)
    if args.json:
        print_json([result._asdict() for result in results])
    else:
        _print_summary(results)
    states = {str(result.state) for result in results}
    return 1 if "failed" in states else 4 if "unknown" in states else 0


def print_list() -> int:
    """The names of the checks, and what they check."""
    from resolver.doctor import CHECKS

    width = max(len(check.name) for check in CHECKS)
    for check in CHECKS:
        print(f"{check.name:{width}}  {check.about}")
    return 0


def _node(args: argparse.Namespace) -> Node:
    """Where to look: with the settings that were given, else a running daemon's, else those it would have."""
    from resolver import config
    from resolver.config import options
    from resolver.doctor.node import Node

    given = options.given(args)
    config.load(given, environ={})  # what is wrong on this command line is no finding
    try:
        settings, origins = config.load_with_origins(given, args.config)
    except UsageError as error:
        return Node(settings_error=str(error))
    node = Node(settings, settings_from=_origins(origins))
    if args.config or node.status is None:
        return node
    try:
        settings = config.load({**config.from_status(node.status), **given}, environ={})
    except UsageError:
        return node  # a daemon of another version, whose settings are others
    return Node(settings, settings_from=f"those of the daemon that runs, PID {node.status['host_pid']}")


def _origins(origins: dict[str, str]) -> str:
    """Where the settings that are not the defaults come from."""
    places = dict[str, list[str]]()
    for name, origin in origins.items():
        if origin != "default":
            places.setdefault(origin, []).append(name)
    return (
        "; ".join(f"{', '.join(names)} by {place}" for place, names in places.items())
        or "all at their defaults"
    )


def _examine(node: Node, checks: Sequence[Check], *, quiet: bool, verbose: bool) -> list[Result]:
    import shutil

    from resolver.doctor import Result, bounded

    results, width = [], max(len(check.name) for check in checks)
    drawing = not quiet and on_terminal() and os.environ.get("TERM") != "dumb"
    columns = shutil.get_terminal_size().columns if drawing else sys.maxsize
    for check in checks:
        if drawing:
            print(f"{'...':{_INDENT}}{check.name}", end="", flush=True)
        result = Result(check.name, *bounded(check, node))
        results.append(result)
        if drawing:
            print("\r\x1b[K", end="")
        if not quiet:
            _print(result, width, columns)
            if verbose:
                _print_detail(result)
    return results


def _print(result: Result, width: int, columns: int) -> None:
    state = styled(f"{result.state:{_INDENT}}", _STYLES[result.state])
    indent = _INDENT + width + 2
    first, *more = _wrapped(printable(result.found), indent, columns)
    print(f"{state}{result.check:{width}}  {first}")
    for line in more:
        print(f"{'':{indent}}{line}")
    for label, text in (("cause", result.cause), ("fix", result.fix)):
        lines = [
            line for each in text.splitlines() for line in _wrapped(printable(each), _INDENT + 8, columns)
        ]
        for number, line in enumerate(lines):
            print(" " * _INDENT + styled((label if number == 0 else "").ljust(8), "dim") + line)
    sys.stdout.flush()


def _print_detail(result: Result) -> None:
    """Not wrapped: a verifier's lines stand in columns."""
    for line in result.detail.splitlines():
        print(" " * _INDENT + styled("| ", "dim") + printable(line.expandtabs()))
    sys.stdout.flush()


def _wrapped(text: str, indent: int, columns: int) -> list[str]:
    """Lines that fit a terminal; into a pipe it stays one line. No command is broken within a word."""
    room = max(24, columns - indent)
    if len(text) <= room:
        return [text]
    import textwrap

    return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)


def _print_summary(results: Sequence[Result]) -> None:
    from resolver.doctor.findings import several

    words = {"ok": "ok", "warning": "warnings", "unknown": "unknown", "failed": "failed"}
    counted = {state: sum(result.state == state for result in results) for state in words}
    said = [
        styled(several(number, state, words[state]), _STYLES[state])
        for state, number in counted.items()
        if number
    ]
    print(f"\n{several(len(results), 'check')}: {', '.join(said)}")
