"""Check everything that the daemon needs on this node, and give the cause and fix of each problem.

Needs no running daemon, does not disturb one, and changes nothing. Uses a running daemon's settings, else those that
one would have; the options below override them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from resolver.base.errors import UsageError
from resolver.base.text import printable, several
from resolver.cli.show import print_indented, print_json, print_labelled, styled

if TYPE_CHECKING:
    import argparse

    from resolver.doctor.node import Node

_STYLES = {"ok": "green", "warning": "yellow", "unknown": "yellow", "failed": "red"}
_INDENT = 9  # indent of the text after the state


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from resolver import config

    add = parser.add_argument
    add("--only", action="append", metavar="CHECK", help="only this check; repeatable")
    about = "print a list of objects, one for each check; with a compiler's or verifier's last lines"
    add("--json", action="store_true", help=about)
    config.add_arguments(parser)
    parser.epilog = (
        "exit status: 0 all ok or warnings only, 1 a check failed, 2 wrong usage, 4 none failed, but one is\n"
        "unknown"
    )


def run(args: argparse.Namespace) -> int:
    """Print the result of each check; the worst one decides the exit code."""
    from resolver.doctor import CHECKS, bounded

    by_name = {check.name: check for check in CHECKS}
    for name in args.only or ():
        if name not in by_name:
            raise UsageError(f"there is no check {name!r}; there are: {', '.join(by_name)}")
    checks = [check for check in CHECKS if not args.only or check.name in args.only]
    node, results, width = _node(args), {}, max(len(check.name) for check in checks)
    for check in checks:
        finding = results[check.name] = bounded(check, node)
        if not args.json:
            head = f"{styled(f'{finding.state:{_INDENT}}', _STYLES[finding.state])}{check.name:{width}}  "
            print_indented(head, _INDENT + width + 2, printable(finding.found))
            print_labelled(_INDENT, cause=finding.cause, fix=finding.fix)
            sys.stdout.flush()
    states = [str(finding.state) for finding in results.values()]
    if args.json:
        print_json([{"check": name, **finding._asdict()} for name, finding in results.items()])
    else:
        counts = [
            styled(several(number, state, "warnings" if state == "warning" else state), style)
            for state, style in _STYLES.items()
            if (number := states.count(state))
        ]
        print(f"\n{several(len(states), 'check')}: {', '.join(counts)}")
    return 1 if "failed" in states else 4 if "unknown" in states else 0


def _node(args: argparse.Namespace) -> Node:
    """Return a node with the settings of a running daemon, or else of one started now; options override both."""
    from resolver import config
    from resolver.cli.in_force import environment
    from resolver.doctor.node import Node

    given = config.given(args)
    config.load(given, environ={})  # a wrong option is this command's error, and no finding
    try:
        settings, origins = config.load(given, args.config, environment())
    except UsageError as error:
        return Node(settings_error=str(error))
    node = Node(settings, settings_from=config.changed(config.described(settings, origins)))
    if args.config or node.status is None:
        return node
    try:
        settings, _ = config.load({**config.values_of(node.status.settings), **given}, environ={})
    except UsageError:
        return node  # a daemon of another version has other settings
    return Node(settings, settings_from=f"those of the daemon that runs, PID {node.status.host_pid}")
