"""Every command as data, by its own parser: what the man pages and tables are made of."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from resolver.cli import COMMANDS, parser_of


class Argument(NamedTuple):
    """An option, or a positional argument (``flags`` empty).

    ``value`` is the placeholder, empty for a flag.
    """

    flags: tuple[str, ...]
    value: str
    choices: tuple[str, ...]
    help: str
    repeated: bool
    required: bool


class Command(NamedTuple):
    """One command; ``summary`` is its line in ``resolver --help``."""

    name: str
    summary: str
    description: str
    epilog: str
    usage: str
    arguments: tuple[Argument, ...]

    @property
    def options(self) -> tuple[Argument, ...]:
        """Those with flags."""
        return tuple(argument for argument in self.arguments if argument.flags)

    @property
    def positionals(self) -> tuple[Argument, ...]:
        """Those without, in order."""
        return tuple(argument for argument in self.arguments if not argument.flags)


def commands() -> tuple[Command, ...]:
    """All, in the order of ``resolver --help``."""
    return tuple(_command(name, summary) for name, summary in COMMANDS.items())


def _command(name: str, summary: str) -> Command:
    parser, module = parser_of(name)
    return Command(
        name=name,
        summary=summary,
        description=(module.__doc__ or "").strip(),
        epilog=(parser.epilog or "").strip(),
        usage=" ".join(parser.format_usage().removeprefix("usage: ").split()),
        arguments=tuple(map(_argument, parser._actions)),  # noqa: SLF001 - argparse has no other list of them
    )


def _argument(action: argparse.Action) -> Argument:
    flag = bool(action.option_strings) and action.nargs == 0
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    choices = tuple(map(str, action.choices or ()))
    if choices and action.metavar is None:
        metavar = "|".join(choices)
    return Argument(
        flags=tuple(action.option_strings),
        value="" if flag else metavar,
        choices=choices,
        help=action.help or "",
        repeated=isinstance(action, argparse._AppendAction) or action.nargs in ("*", "+"),  # noqa: SLF001 - no public name
        required=action.required,
    )
