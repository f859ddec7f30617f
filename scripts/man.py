"""Writes the man pages into docs/man: one of resolver, and one for each command, by the commands' own parsers.

    .venv/bin/python scripts/man.py [DIRECTORY]

What a parser does not know is said here: files, environment, exit codes. A test holds the pages to what this writes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from resolver import __version__
from resolver.cli.describe import commands

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resolver.cli.describe import Argument, Command

ROOT = Path(__file__).resolve().parent.parent

SUMMARY = "which container a GPU process belongs to, and HAMi's slots kept true"
DESCRIPTION = """\
HAMi shares GPUs between containers, and counts who uses how much in a file that each container has. What it writes
there for a process's PID on the host is often missing or wrong, and then the container's utilization reads 0. The
daemon, `resolver run`, finds the true PIDs, repairs the files and answers questions; the other commands ask it, or the
kernel."""

EXIT = (
    ("0", "Done, found."),
    (
        "1",
        (
            "Not found; a check failed (doctor); something stayed unresolved (run --once); a file is broken (slots); "
            "not ready (status); the chain breaks (explain)."
        ),
    ),
    ("2", "The command line or the settings are wrong."),
    ("3", "More than one container or process fits (lookup, explain)."),
    ("4", "The answer cannot be seen from here, or no daemon answers."),
    ("130", "Interrupted."),
)

ENVIRONMENT = (
    ("RESOLVER_SOCKET", "Where the daemon answers, for all that ask it; where it listens, for run."),
    ("RESOLVER_CONFIG", "The settings file of run, config and doctor."),
    ("RESOLVER_*", "Each setting under its name in capitals, such as RESOLVER_NVML_INTERVAL."),
    ("NO_COLOR", "If it is set and not empty, nothing is coloured."),
)

FILES = (
    ("/run/resolver/resolver.sock", "Where the daemon answers."),
    ("/usr/local/vgpu/containers", "HAMi's directory of containers."),
    ("/var/log/pods", "Kubelet's directory of logs; names of pods and namespaces are told by it."),
)


def pages() -> dict[str, str]:
    """``{file name: text}`` of all pages."""
    found = commands()
    texts = {f"resolver-{command.name}.1": _command_page(command) for command in found}
    return {"resolver.1": _main_page(found), **texts}


def _main_page(found: tuple[Command, ...]) -> str:
    lines = [
        *_head("resolver", SUMMARY),
        ".SH SYNOPSIS",
        ".B resolver",
        ".I COMMAND",
        ".RI [ OPTIONS ]",
        ".SH DESCRIPTION",
        *_paragraphs(DESCRIPTION),
        ".SH COMMANDS",
    ]
    for command in found:
        lines += [".TP", f".BR resolver\\-{command.name} (1)", _text(_whole(command.summary))]
    lines += [".SH OPTIONS"]
    for names, text in (
        ('.BR \\-h ", " \\-\\-help', "Show the commands."),
        (".B \\-\\-version", "Show the version."),
    ):
        lines += [".TP", names, text]
    for heading, rows in (("EXIT STATUS", EXIT), ("ENVIRONMENT", ENVIRONMENT), ("FILES", FILES)):
        lines.append(f".SH {heading}")
        for name, text in rows:
            lines += [".TP", f".B {_text(name)}", _text(text)]
    return "\n".join(lines) + "\n"


def _command_page(command: Command) -> str:
    lines = [
        *_head(f"resolver-{command.name}", command.summary),
        ".SH SYNOPSIS",
        ".nh",
        f".B resolver {_text(command.name)}",
        *(_in_synopsis(argument) for argument in command.arguments),
        ".hy",
        ".SH DESCRIPTION",
        *_paragraphs(command.description),
    ]
    if command.positionals:
        lines.append(".SH ARGUMENTS")
    for argument in command.positionals:
        lines += [".TP", f".I {_text(argument.value)}", _sentence(argument)]
    lines.append(".SH OPTIONS")
    for argument in command.options:
        value = f" \\fI{_text(argument.value)}\\fR" if argument.value else ""
        names = ", ".join(f"\\fB{_text(flag)}\\fR" for flag in argument.flags)
        lines += [".TP", names + value, _sentence(argument)]
    if command.epilog:
        lines += [".SH NOTES", *_paragraphs(command.epilog)]
    lines += [".SH SEE ALSO", ".BR resolver (1)"]
    return "\n".join(lines) + "\n"


def _head(name: str, summary: str) -> Iterator[str]:
    version, date = _release()
    yield ".\\\" Made by scripts/man.py: change the command's parser, not this."
    yield f'.TH {name.upper()} 1 {date} "resolver {version}"'
    yield ".SH NAME"
    yield f"{_text(name)} \\- {_text(summary)}"


def _release() -> tuple[str, str]:
    """The version, and the day of the last release: pages that are made again without a change are the same."""
    released = re.search(r"^## \[\d+\.\d+\.\d+\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if released is None:
        raise SystemExit("CHANGELOG.md names no release: there has to be a line `## [1.2.3] - 2026-01-31`")
    return __version__, released[1]


def _in_synopsis(argument: Argument) -> str:
    value = f"\\fI{_text(argument.value)}\\fR" if argument.value else ""
    text = " ".join(filter(None, (f"\\fB{_text(argument.flags[-1])}\\fR" if argument.flags else "", value)))
    if not argument.required:
        text = f"[{text}]"
    return text + (" ..." if argument.repeated else "")


def _sentence(argument: Argument) -> str:
    text = argument.help
    if argument.choices and argument.value not in ("|".join(argument.choices), ""):
        text += f" ({', '.join(argument.choices)})"
    return _text(_whole(text))


def _whole(text: str) -> str:
    """A line of help as a sentence."""
    return text[0].upper() + text[1:] + "."


def _paragraphs(text: str) -> Iterator[str]:
    """Blocks between empty lines; one with lines that are indented keeps its lines."""
    for number, block in enumerate(text.split("\n\n")):
        if number:
            yield ".PP"
        lines = block.splitlines()
        if any(line.startswith("  ") or "  " in line for line in lines):
            yield from (".nf", *map(_text, lines), ".fi")
        else:
            yield from map(_text, lines)


def _text(text: str) -> str:
    """As roff prints it: hyphens that can be copied, nothing at a line's begin that it takes for a request."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga").replace("'", "\\(aq")
    return "\\&" + escaped if escaped.startswith((".", "'")) else escaped


def main() -> None:
    """Write all, and remove those of commands that are no more."""
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/man"
    place.mkdir(parents=True, exist_ok=True)
    texts = pages()
    for old in place.glob("*.1"):
        if old.name not in texts:
            old.unlink()
    for name, text in texts.items():
        (place / name).write_text(text)


if __name__ == "__main__":
    main()
