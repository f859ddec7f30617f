"""The command line. It imports only the named command's module, because imports delay the answer."""

from __future__ import annotations

import errno
import gc
import os
import sys

from resolver.base.errors import AccessDenied, Ambiguous, CannotKnow, NoDaemon, ResolverError, UsageError

TYPE_CHECKING = False  # typing takes longer to load than everything else that a short command needs
if TYPE_CHECKING:
    import argparse
    from types import ModuleType

#: Commands and their descriptions, in the order of ``resolver --help``.
COMMANDS = {
    "run": "run the daemon, which repairs HAMi's slots",
    "lookup": "print the host PID of a process in a container",
    "reverse": "print the container and PIDs of a host process",
    "slots": "show HAMi's cache files slot by slot",
    "explain": "explain a pod's utilization, and where it goes wrong",
    "doctor": "check everything that the daemon needs, with causes and fixes",
    "top": "show GPU use live",
    "containers": "list this node's containers",
    "usage": "show each container's GPU use over time, and whether its core limit holds",
    "status": "show the daemon's state",
    "devices": "show the node's GPUs and their health",
    "report-devices": "report the node's GPUs to the API server, for schedulers",
    "events": "print past events, or follow new ones",
    "config": "show the settings and the origin of each",
    "bundle": "collect everything that a bug report needs in one file",
}

#: The example at the end of a command's help.
_EXAMPLES = {
    "run": "resolver run --dry-run --once",
    "lookup": "resolver lookup ml-prod/trainer-0 7",
    "reverse": "resolver reverse 24399",
    "slots": "resolver slots /usr/local/vgpu/containers",
    "explain": "resolver explain ml-prod/trainer-0",
    "doctor": "resolver doctor --only nvml",
    "top": "resolver top ml-prod/trainer-0",
    "usage": "resolver usage --json",
    "status": "resolver status --brief",
    "events": "resolver events --pod ml-prod/trainer-0 --follow",
    "config": "resolver config --config /etc/resolver.toml",
    "bundle": "resolver bundle --redact --output node-7.tar.gz",
}

_WITHOUT = "These work without a daemon: resolver lookup, reverse, slots, explain, config, doctor"

EXIT_NOT_FOUND = 1
EXIT_USAGE = 2
EXIT_AMBIGUOUS = 3
EXIT_CANNOT_KNOW = 4
EXIT_NO_SPACE = 5
_EXITS = ((UsageError, EXIT_USAGE), (Ambiguous, EXIT_AMBIGUOUS), (CannotKnow, EXIT_CANNOT_KNOW))


def main(argv: list[str] | None = None) -> int:
    """Entry point of the ``resolver`` command; returns the exit code."""
    gc.disable()  # loading modules would trigger a dozen collections that free nothing
    try:
        try:
            return _dispatch(sys.argv[1:] if argv is None else argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # a short answer is still in the buffer
    except BrokenPipeError:  # the reader of a pipe (head, less) went away
        _discard_output()
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _discard_output()
        print(f"resolver: the output is not complete ({error.strerror}): make room for it", file=sys.stderr)
        return EXIT_NO_SPACE
    except KeyboardInterrupt:
        return 130
    finally:
        gc.enable()


def _discard_output() -> None:
    """Redirect standard output to /dev/null, because a later flush would fail."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    if not arguments or arguments[0] not in COMMANDS:
        return _top_level(arguments)
    command = arguments[0]
    try:
        if command == "lookup":
            from resolver.cli import lookup

            plain = lookup.parsed(arguments[1:])
            if plain is not None:
                return lookup.run(plain)
        parser, module = parser_of(command)
        args = parser.parse_args(arguments[1:])
        gc.freeze()
        gc.enable()
        try:
            return int(module.run(args))
        except AccessDenied:
            if not (parts := getattr(module, "OWN_PARTS", ())):
                raise
            from resolver import client
            from resolver.cli.own_view import show

            every = getattr(args, "every", None)
            return show(
                lambda route: client.get_bytes(route, args.socket), parts, as_json=args.json, every=every
            )
    except ResolverError as error:
        more = f". {_without_daemon()}" if isinstance(error, NoDaemon) and os.geteuid() == 0 else ""
        print(
            f"resolver {command}: {error}{more}",
            *getattr(error, "candidates", ()),
            sep="\n  ",
            file=sys.stderr,
        )
        return next((code for kind, code in _EXITS if isinstance(error, kind)), EXIT_NOT_FOUND)


def _without_daemon() -> str:
    from resolver.base.lock_holder import unit_says

    if not os.path.isdir("/proc/self"):
        return "/proc is not a mounted proc file system: mount -t proc proc /proc"
    sentence = unit_says()
    return f"The unit's last line: {sentence}" if sentence else _WITHOUT


def parser_of(command: str) -> tuple[argparse.ArgumentParser, ModuleType]:
    from resolver.cli.parser import Parser

    parser = Parser(prog=f"resolver {command}")
    return parser, add_command(command, parser)


def add_command(command: str, parser: argparse.ArgumentParser) -> ModuleType:
    """Add a command's arguments to a parser; returns its module."""
    import importlib

    module = importlib.import_module(f"resolver.cli.{command.replace('-', '_')}")
    parser.description = module.__doc__
    module.add_arguments(parser)
    if example := _EXAMPLES.get(command):
        parser.epilog = "\n\n".join(filter(None, (parser.epilog, f"example: {example}")))
    return module


def _pages() -> str:
    places = (f"{sys.prefix}/share/doc/hami-resolver", "/usr/share/doc/hami-resolver")
    checkout = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return next((place for place in places if os.path.isdir(f"{place}/docs")), checkout)


def _top_level(arguments: list[str]) -> int:
    from resolver.cli.parser import Parser

    if arguments and not arguments[0].startswith("-"):
        from difflib import get_close_matches

        near = get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are: {', '.join(COMMANDS)}"
        print(f"resolver: no command {arguments[0][:40]!r}; {hint}", file=sys.stderr)
        return EXIT_USAGE
    from resolver.base.version import VERSION

    width = max(map(len, COMMANDS))
    parser = Parser(
        prog="resolver",
        usage="resolver COMMAND [OPTIONS]",
        description="Find the host PID and container of every GPU process, and repair HAMi's slots.",
        epilog="commands:\n"
        + "\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items())
        + f"\n\nSee resolver help COMMAND. Messages name pages as docs/...: these are in {_pages()}.",
    )
    parser.add_argument("--version", action="version", version=f"resolver {VERSION}")
    parser.parse_args(arguments)  # refuses unknown options
    parser.print_help()
    return 0
