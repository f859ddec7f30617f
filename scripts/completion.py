"""Writes what shells complete resolver's commands and options by, from the commands' parsers, into deploy/completion.

    .venv/bin/python scripts/completion.py [DIRECTORY]

The files are installed like the man pages; ``resolver completion`` prints them. A test holds them to what this writes.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import shtab

from resolver import __version__
from resolver.cli import COMMANDS, add_command
from resolver.cli.completion import FILES

ROOT = Path(__file__).resolve().parent.parent

#: What a shell offers for a value, by its placeholder; for others nothing.
_OFFERED = {"FILE": shtab.FILE, "PATH": shtab.FILE, "DIR": shtab.DIRECTORY}


def whole_parser() -> argparse.ArgumentParser:
    """All commands' parsers as one."""
    parser = argparse.ArgumentParser(prog="resolver")
    parser.add_argument("--version", action="version", version=__version__, help="show the version")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, summary in COMMANDS.items():
        below = commands.add_parser(name, help=summary)
        add_command(name, below)
        below.description = None  # a list of commands has room for the summary only
        for action in below._actions:  # noqa: SLF001 - argparse has no other list of them
            if action.nargs != 0 and not action.choices and action.metavar in _OFFERED:
                action.complete = _OFFERED[action.metavar]  # type: ignore[attr-defined]
    return parser


#: bash takes --option=value for three words, and shtab knows two. Nothing is offered where nothing is known: no files.
_BASH = """\
_resolver() {
  local word words=() number=$COMP_CWORD
  for word in "${COMP_WORDS[@]:0:COMP_CWORD}"; do
    if [[ $word == = ]]; then number=$((number - 1)); else words+=("$word"); fi
  done
  words+=("${COMP_WORDS[COMP_CWORD]#=}")
  local COMP_WORDS=("${words[@]}") COMP_CWORD=$number
  _shtab_resolver
}
complete -F _resolver resolver
"""
#: What is changed in what shtab writes for a shell: a pattern, and what takes its place.
_CHANGES = (
    ("bash", r"(?m)^complete -o bashdefault -F _shtab_resolver resolver$", _BASH.replace("\\", r"\\")),
    # `source` is no `eval`: only what zsh loads by itself, from its fpath, is called at once
    ("zsh", r"(?<=zsh_eval_context\[-1\] )== eval(?= ]])", "!= loadautofunc"),
    ("zsh", r'(?m)^( *"\*?--[a-z-]+)(?=\[.*\]:)', r"\1="),  # --option=value as well
)


def written() -> dict[str, str]:
    """``{file name: text}`` of every shell's file."""
    parser, texts = whole_parser(), dict[str, str]()
    for shell, name in FILES.items():
        texts[name] = shtab.complete(parser, shell).rstrip() + "\n"
    for shell, pattern, ours in _CHANGES:
        texts[FILES[shell]], changed = re.subn(pattern, ours, texts[FILES[shell]])
        if not changed:
            raise SystemExit(
                f"completion: what shtab writes for {shell} has no {pattern} any more: look at it anew"
            )
    return texts


def main() -> None:
    """Write all."""
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "deploy/completion"
    place.mkdir(parents=True, exist_ok=True)
    for name, text in written().items():
        (place / name).write_text(text)


if __name__ == "__main__":
    main()
