"""Writes the man pages, the completion of three shells and the documents' pages into the wheel, and its address.

    .venv/bin/python scripts/build_hook.py DIRECTORY        the same files, to look at

Hatchling calls this. Pages and completion are made from the commands' parsers; exit codes, environment and files are
added here.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import shtab
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # an isolated build has only the packages that pyproject.toml requires

from resolver.base.version import VERSION  # noqa: E402
from resolver.cli import COMMANDS, add_command, parser_of  # noqa: E402
from scripts.published import published  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

SUMMARY: Final = "find the host PID and container of every GPU process, and repair HAMi's slots"
DESCRIPTION: Final = """\
HAMi shares GPUs between containers, and records each container's use in a cache file. The host PIDs in it are often
missing or wrong, and then the container's utilization reads 0. The daemon, `resolver run`, finds the right PIDs,
repairs the files and answers questions; the other commands ask the daemon, or the kernel."""
#: The last sections of the main page: a heading, or a name and its text with two spaces between them.
SECTIONS: Final = """\
OPTIONS
-h, --help  Show the commands.
--version  Show the version.
EXIT STATUS
0  Done, found.
1  Not found, not ready, left unresolved; a failed check, a broken file or chain.
2  The command line or the settings are wrong.
3  More than one container or process fits (lookup, explain).
4  The answer cannot be seen from here, or no daemon answers.
5  No space left for the output.
130  Interrupted.
ENVIRONMENT
RESOLVER_SOCKET  The daemon's socket, for the commands that ask it and for run.
RESOLVER_CONFIG  The settings file of run, config and doctor.
RESOLVER_*  Each setting under its name in capitals, such as RESOLVER_NVML_INTERVAL.
NO_COLOR  If it is set and not empty, nothing is coloured.
FILES
/run/resolver/resolver.sock  The daemon's socket.
/usr/local/vgpu/containers  HAMi's directory of containers.
/var/log/pods  Kubelet's directory of logs: the names of pods and namespaces come from it.
share/doc/hami-resolver/docs  The pages that messages name, below /usr or the virtual environment."""


class MetadataHook(MetadataHookInterface):
    """Gives the wheel its addresses."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add them if there is a public address."""
        address = published()["ADDRESS"]
        pages = {"Homepage": "", "Changelog": "/blob/main/CHANGELOG.md", "Issues": "/issues"}
        metadata["urls"] = {name: address + path for name, path in pages.items() if address}


class BuildHook(BuildHookInterface[Any]):
    """Writes into ``build/share``, which pyproject.toml puts into the wheel as ``share``."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write all files. Called by hatchling, before it collects the wheel's content."""
        del version, build_data
        write(ROOT / "build/share")


def write(place: Path) -> None:
    """Write all files below a directory."""
    pages = {f"resolver-{name}.1": _command_page(name) for name in COMMANDS} | {"resolver.1": _main_page()}
    files = {f"man/man1/{name}": "\n".join(lines) + "\n" for name, lines in pages.items()}
    files |= {PATHS[shell]: text for shell, text in completions().items()}
    files |= {f"doc/hami-resolver/docs/{page.name}": page.read_text() for page in ROOT.glob("docs/*.md")}
    for path, text in files.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)


# --- man pages ----------------------------------------------------------------------------------------------------


def _main_page() -> Iterator[str]:
    yield from _head("resolver", SUMMARY)
    yield from (".B resolver", ".I COMMAND", ".RI [ OPTIONS ]", ".SH DESCRIPTION", *_paragraphs(DESCRIPTION))
    yield ".SH COMMANDS"
    for name, summary in COMMANDS.items():
        yield from (".TP", f".BR resolver\\-{name} (1)", _sentence(summary))
    for line in SECTIONS.splitlines():
        name, gap, text = line.partition("  ")
        yield from (".TP", f".B {_text(name)}", _text(text)) if gap else (f".SH {name}",)


def _command_page(name: str) -> Iterator[str]:
    parser, module = parser_of(name)
    actions = parser._actions  # noqa: SLF001 - argparse has no other list of them
    yield from _head(f"resolver-{name}", COMMANDS[name])
    yield from (".nh", f".B resolver {_text(name)}", *map(_usage, actions), ".hy")
    yield from (".SH DESCRIPTION", *_paragraphs((module.__doc__ or "").strip()))
    for heading, flagged in (("ARGUMENTS", False), ("OPTIONS", True)):
        shown = [action for action in actions if bool(action.option_strings) is flagged]
        yield from (f".SH {heading}",) if shown else ()
        for action in shown:
            names = ", ".join(f"\\fB{_text(flag)}\\fR" for flag in action.option_strings)
            yield from (".TP", f"{names} {_value(action)}".strip(), _sentence(_help(action)))
    if parser.epilog:
        yield from (".SH NOTES", *_paragraphs(parser.epilog.strip()))
    yield from (".SH SEE ALSO", ".BR resolver (1)")


def _head(name: str, summary: str) -> Iterator[str]:
    """Yield everything up to the synopsis. The date is the last release's: equal sources give equal pages."""
    released = re.search(r"(?m)^## \[\d+\.\d+\.\d+\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text())
    if released is None:
        raise SystemExit("CHANGELOG.md names no release: it needs a line `## [1.2.3] - 2026-01-31`")
    yield f'.TH {name.upper()} 1 {released[1]} "resolver {VERSION}"'
    yield from (".SH NAME", f"{_text(name)} \\- {_text(summary)}", ".SH SYNOPSIS")


def _usage(action: argparse.Action) -> str:
    text = f"\\fB{_text(action.option_strings[-1])}\\fR " if action.option_strings else ""
    repeated = isinstance(action, argparse._AppendAction) or action.nargs in ("*", "+")  # noqa: SLF001 - no public name
    text = (text + _value(action)).strip()
    return (text if action.required else f"[{text}]") + (" ..." if repeated else "")


def _value(action: argparse.Action) -> str:
    if action.option_strings and action.nargs == 0:
        return ""
    word = action.metavar or "|".join(map(str, action.choices or ())) or action.dest.upper()
    return f"\\fI{_text(str(word))}\\fR"


def _help(action: argparse.Action) -> str:
    choices = ", ".join(map(str, action.choices or ())) if action.metavar else ""
    return (action.help or "") + (f" ({choices})" if choices else "")


def _sentence(text: str) -> str:
    return _text(text[0].upper() + text[1:] + ".")


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the blocks between empty lines; a block with columns or an indent keeps its lines."""
    for number, block in enumerate(text.split("\n\n")):
        lines = map(_text, block.splitlines())
        yield from (".PP",) if number else ()
        yield from (".nf", *lines, ".fi") if "  " in block else lines


def _text(text: str) -> str:
    """Escape for roff: hyphens that can be copied, and no request at the start of a line."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga").replace("'", "\\(aq")
    return "\\&" + escaped if escaped.startswith(".") else escaped


# --- completion ---------------------------------------------------------------------------------------------------

#: Each shell's file below ``share``, where the shell itself looks for it.
PATHS: Final = {
    "bash": "bash-completion/completions/resolver",
    "zsh": "zsh/site-functions/_resolver",
    "fish": "fish/vendor_completions.d/resolver.fish",
}
#: A value's placeholder, and its completion; other values have none.
_OFFERED: Final = {"FILE": shtab.FILE, "PATH": shtab.FILE, "DIR": shtab.DIRECTORY}

#: bash splits --option=value into three words, and shtab expects two. No file names where nothing is known.
_BASH: Final = r"""
_resolver() {
  local word words=() number=$COMP_CWORD
  for word in "${COMP_WORDS[@]:0:COMP_CWORD}"; do
    if [[ $word == = ]]; then number=$((number - 1)); else words+=("$word"); fi
  done
  words+=("${COMP_WORDS[COMP_CWORD]#=}")
  local COMP_WORDS=("${words[@]}") COMP_CWORD=$number
  _shtab_resolver
}
complete -F _resolver resolver"""
#: Changes to shtab's output: shell, pattern, replacement.
_CHANGES: Final = (
    ("bash", r"(?m)^complete -o bashdefault -F _shtab_resolver resolver$", _BASH[1:].replace("\\", r"\\")),
    # `source` is not `eval`: only a file that zsh loads from its fpath is called at once
    ("zsh", r"(?<=zsh_eval_context\[-1\] )== eval(?= ]])", "!= loadautofunc"),
    ("zsh", r'(?m)^( *"\*?--[a-z-]+)(?=\[.*\]:)', r"\1="),  # --option=value, too
)


def completions() -> dict[str, str]:
    """``{shell: text}``, from one parser of all commands."""
    parser = argparse.ArgumentParser(prog="resolver")
    parser.add_argument("--version", action="version", version=VERSION, help="show the version")
    below = parser.add_subparsers(metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = below.add_parser(name, help=summary)
        add_command(name, command)
        command.description = None  # a list of commands has room for the summary only
        for action in command._actions:  # noqa: SLF001 - argparse has no other list of them
            if action.nargs != 0 and not action.choices and action.metavar in _OFFERED:
                action.complete = _OFFERED[action.metavar]  # type: ignore[attr-defined]
    texts = {shell: shtab.complete(parser, shell).rstrip() + "\n" for shell in PATHS}
    for shell, pattern, replacement in _CHANGES:
        texts[shell], changed = re.subn(pattern, replacement, texts[shell])
        if not changed:
            raise SystemExit(f"completion: shtab's output for {shell} no longer has {pattern}")
    return texts


if __name__ == "__main__":
    write(Path(sys.argv[1]))
