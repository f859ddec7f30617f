"""Print what happened on this node: repairs, containers that come and go, changes of the source, of GPUs, of NVML.

One event a line: when, what, and its fields. The daemon keeps the last thousand.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from resolver.cli.ask_daemon import add_socket, ask, follow, moment, understood
from resolver.cli.show import printable, styled
from resolver.errors import UsageError
from resolver.events import KINDS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection

HELP = "print what happened, and what happens"
_SHOWN_BEFORE = 10
_BAD = frozenset(
    ("conflict", "region_quarantined", "source_failed", "slot_stuck", "gpu_unhealthy", "gpu_gone")
)
_GOOD = frozenset(("repair", "gpu_healthy", "nvml_available"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_socket(parser)
    parser.add_argument("--follow", "-f", action="store_true", help="wait for more, until interrupted")
    parser.add_argument(
        "--kind",
        metavar="KIND",
        action="append",
        choices=list(KINDS),
        help="only these; may be given several times",
    )
    parser.add_argument(
        "--last",
        metavar="N",
        type=int,
        help=f"only the last N of those that were (default all; {_SHOWN_BEFORE} with --follow)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.epilog = "kinds of events:\n" + "\n".join(f"  {kind:20} {text}" for kind, text in KINDS.items())


def run(args: argparse.Namespace) -> int:
    """Print the kept ones, then perhaps those that come."""
    if args.last is not None and args.last < 0:
        raise UsageError(f"--last {args.last}: 0 or more are meant")
    # Numbers begin anew with each daemon: an event's id has the daemon's start in it.
    status = ask("/v1/status", args.socket) if args.follow else None
    kept = ask("/v1/events", args.socket)
    last = args.last if args.last is not None or not args.follow else _SHOWN_BEFORE
    with understood():
        lines = [_line(event, as_json=args.json) for event in kept["events"] if _is_wanted(event, args.kind)]
        number = kept["events"][-1]["number"] if kept["events"] else 0
        last_id = f"{int(status['started_at'])}-{number}" if status is not None else ""
    for line in lines if last is None else lines[max(0, len(lines) - last) :]:
        print(line)
    if args.follow:
        sys.stdout.flush()
        for event in follow(args.socket, last_id, args.kind or ()):
            with understood():
                line = _line(event, as_json=args.json) if _is_wanted(event, args.kind) else ""
            if line:
                print(line, flush=True)  # whoever reads a pipe waits for it
    return 0


def _is_wanted(event: dict[str, Any], kinds: Collection[str] | None) -> bool:
    return not kinds or event["kind"] in kinds


def _line(event: dict[str, Any], *, as_json: bool) -> str:
    if as_json:
        return json.dumps({name: event[name] for name in ("number", "at", "kind", "fields")})
    kind = event["kind"]
    color = "red" if kind in _BAD else "green" if kind in _GOOD else "bold"
    fields = " ".join(
        f"{styled(printable(name) + '=', 'dim')}{_value(value)}" for name, value in event["fields"].items()
    )
    return f"{moment(event['at'])}  {styled(printable(kind).ljust(18), color)}  {fields}".rstrip()


def _value(value: Any) -> str:
    """Bare where it is one plain word, else as JSON has it."""
    text = value if isinstance(value, str) else json.dumps(value)
    plain = (
        isinstance(value, str) and text.isascii() and text.isprintable() and not set(text) & set(" \"'=\\")
    )
    return text if text and (plain or not isinstance(value, str)) else json.dumps(text)
