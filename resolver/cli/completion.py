"""Print the file that makes a shell complete resolver's commands, options and their values.

In bash and zsh:  source <(resolver completion bash)   source <(resolver completion zsh)
In fish:          resolver completion fish | source

Packages put the same files where the shells look for them.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from resolver.errors import ResolverError

if TYPE_CHECKING:
    import argparse

HELP = "print what makes a shell complete resolver's commands and options"

#: Each shell's file, by the name that it is found under in a directory of the shell's.
FILES = {"bash": "resolver", "zsh": "_resolver", "fish": "resolver.fish"}
_DIRECTORIES = {
    "bash": "share/bash-completion/completions",
    "zsh": "share/zsh/site-functions",
    "fish": "share/fish/vendor_completions.d",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("shell", choices=list(FILES), help="whose file it is to be")


def run(args: argparse.Namespace) -> int:
    """Print it."""
    name = FILES[args.shell]
    checkout = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    places = (
        os.path.join(checkout, "deploy/completion", name),
        os.path.join(sys.prefix, _DIRECTORIES[args.shell], name),
    )
    for path in places:
        try:
            with open(path, encoding="utf-8") as file:
                sys.stdout.write(file.read())
        except FileNotFoundError:
            continue
        return 0
    raise ResolverError(f"{places[-1]} is not there: install the package anew, with its data files")
