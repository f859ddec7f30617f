"""The command line: finds the command's module and imports that one only.

A person at a terminal pays for every import, so nothing but the parser is loaded before the command is known.
Each module in this package has ``HELP`` (one line), ``add_arguments(parser)`` and ``run(args) -> int``.
"""

from __future__ import annotations

import gc
import os
import sys

from resolver import __version__
from resolver.errors import CannotKnow, ResolverError, UsageError

TYPE_CHECKING = False  # as typing's, which takes longer to load than all that a short command needs
if TYPE_CHECKING:
    import argparse
    from types import ModuleType

#: The commands in the order that ``resolver --help`` shows them, each with its line there.
COMMANDS = {
    "run": "the daemon: repair slots, join with NVML, until stopped",
    "lookup": "print the host PID of a PID inside a container",
    "reverse": "print the container and the PIDs of a host PID",
    "slots": "show HAMi's cache files slot by slot",
    "explain": "explain why a pod's utilization is what it is, and where the chain breaks",
    "doctor": "check everything the daemon needs here, with causes and fixes",
    "top": "show live who uses the GPUs",
    "containers": "list the containers of this node",
    "status": "show how the daemon is",
    "devices": "show the node's GPUs and their health",
    "report-devices": "keep the node's GPUs in the API server, for schedulers",
    "events": "print what happened, and what happens",
    "config": "show the settings, and where each comes from",
    "bundle": "put what a bug report needs into one file",
    "version": "print the versions of this command and of the daemon",
    "completion": "print what makes a shell complete resolver's commands and options",
}

EXIT_NOT_FOUND = 1
EXIT_USAGE = 2
EXIT_CANNOT_KNOW = 4


def main(argv: list[str] | None = None) -> int:
    """Entry point of the ``resolver`` command; returns the exit code."""
    gc.disable()  # loading modules sets it off a dozen times, and all that they are made of stays
    try:
        try:
            return _dispatch(sys.argv[1:] if argv is None else argv)
        finally:
            # A short answer is still in the buffer: whether its reader is there shows only now.
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe (head, less) went away: not an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    finally:
        gc.enable()


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in COMMANDS:
        return _top_level(arguments)
    command = arguments[0]
    try:
        if command == "lookup":
            from resolver.cli import lookup

            plain = lookup.parsed(arguments[1:])
            if plain is not None:
                return lookup.run(plain)
        if arguments == ["doctor", "--list"]:  # without its parser, which is made of all settings
            from resolver.cli import doctor

            return doctor.print_list()
        parser, module = parser_of(command)
        args = parser.parse_args(arguments[1:])
        gc.freeze()
        gc.enable()
        return int(module.run(args))
    except ResolverError as error:
        print(f"resolver {command}: {error}", file=sys.stderr)
        if isinstance(error, UsageError):
            return EXIT_USAGE
        return EXIT_CANNOT_KNOW if isinstance(error, CannotKnow) else EXIT_NOT_FOUND


def parser_of(command: str) -> tuple[argparse.ArgumentParser, ModuleType]:
    """A command's parser and the module that it is made by."""
    from resolver.cli.parser import Parser

    parser = Parser(prog=f"resolver {command}")
    return parser, add_command(command, parser)


def add_command(command: str, parser: argparse.ArgumentParser) -> ModuleType:
    """Give a parser what belongs to a command; the module that it comes from."""
    import importlib

    module = importlib.import_module(f"resolver.cli.{command.replace('-', '_')}")
    parser.description = module.__doc__
    module.add_arguments(parser)
    return module


def _top_level(arguments: list[str]) -> int:
    from resolver.cli.parser import Parser, nearest

    if arguments and not arguments[0].startswith("-"):
        near = nearest(arguments[0].lower(), COMMANDS)
        print(
            f"resolver: no command {arguments[0]!r}{near and f': did you mean {near}?'}; the commands are: "
            f"{', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return EXIT_USAGE
    width = max(map(len, COMMANDS))
    parser = Parser(
        prog="resolver",
        usage="resolver COMMAND [OPTIONS]",
        description="Which container a GPU process belongs to, and HAMi's slots kept true.",
        epilog="commands:\n"
        + "\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items())
        + "\n\nSee resolver COMMAND --help.",
    )
    parser.add_argument("--version", action="version", version=f"resolver {__version__}")
    parser.parse_args(arguments)  # refuses what it does not know
    parser.print_help()
    return 0
