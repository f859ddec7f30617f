"""The commands in the documents, and what is shown as their answer.

The convention: a fenced block `console` shows a terminal. Its commands begin with ``$ `` (or with ``# ``, root's
prompt, if its first line does) and go on after a backslash; what follows is their output, ``[...]`` in a line of its
own stands for lines that are left out. A block `sh` is a script: each line of it is a command.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final, NamedTuple

FOLDERS: Final = (".", "docs", "docs/runbooks", "bpf", "deploy/**", "tests/fakes")
_BLOCK: Final = re.compile(r"^```(console|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Command(NamedTuple):
    """One command of a document: as it is typed, in one line, and the lines that are shown after it."""

    document: str
    text: str
    shown: tuple[str, ...]

    @property
    def program(self) -> str:
        """What is started, without `sudo` and what is set before it."""
        words = [word for word in shlex.split(self.text, comments=True) if not re.match(r"\w+=", word)]
        words = words[1:] if words[:1] == ["sudo"] else words
        return words[0] if words else ""

    def __str__(self) -> str:
        return f"{self.document}: {self.text}"


def documents(root: Path) -> list[Path]:
    """Every page that people read."""
    found = {path for folder in FOLDERS for path in root.glob(f"{folder}/*.md")}
    assert len(found) > 10
    return sorted(found)


def commands(root: Path) -> list[Command]:
    """All of them, in the order of the documents."""
    return [
        command
        for path in documents(root)
        for language, body in _BLOCK.findall(path.read_text())
        for command in (_console if language == "console" else _script)(str(path.relative_to(root)), body)
    ]


def _console(document: str, body: str) -> list[Command]:
    prompt = "# " if body.startswith("# ") else "$ "
    assert body.startswith(prompt), f"{document}: a console block begins with a prompt: {body[:60]!r}"
    found: list[tuple[str, list[str]]] = []
    continued = False
    for line in body.splitlines():
        if continued:
            text, shown = found.pop()
            found.append((f"{text.removesuffix(chr(92))}{line.strip()}", shown))
        elif line.startswith(prompt):
            found.append((line.removeprefix(prompt), []))
        else:
            found[-1][1].append(line)
            continue
        continued = line.endswith("\\")
    return [Command(document, text, tuple(shown)) for text, shown in found]


def _script(document: str, body: str) -> list[Command]:
    lines = body.replace("\\\n", " ").splitlines()
    return [
        Command(document, line, ()) for line in lines if line.strip() and not line.lstrip().startswith("#")
    ]
