"""Print a shell completion file for resolver's commands, options and values.

In bash and zsh:  source <(resolver completion bash)   source <(resolver completion zsh)
In fish:          resolver completion fish | source

Packages install these files.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from resolver.base.errors import ResolverError

if TYPE_CHECKING:
    import argparse


#: Each shell's file below ``share``, where the shell itself looks for it.
PATHS = {
    "bash": "bash-completion/completions/resolver",
    "zsh": "zsh/site-functions/_resolver",
    "fish": "fish/vendor_completions.d/resolver.fish",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("shell", choices=list(PATHS), help="the shell")


def run(args: argparse.Namespace) -> int:
    """Print the shell's file. Raises ResolverError if it isn't installed."""
    path = os.path.join(sys.prefix, "share", PATHS[args.shell])
    try:
        with open(path, encoding="utf-8") as file:
            sys.stdout.write(file.read())
    except FileNotFoundError:
        raise ResolverError(f"{path} is missing: install the package again, with its data files") from None
    return 0
