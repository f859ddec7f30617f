"""The man pages are those of the commands as they are, and roff that a linter finds no fault with."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from resolver.cli import COMMANDS
from resolver.cli.describe import commands

NAMES = ("resolver.1", *(f"resolver-{command}.1" for command in COMMANDS))


@pytest.fixture(scope="module")
def made(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("man")
    subprocess.run([sys.executable, root / "scripts/man.py", place], cwd=root, check=True)
    return place


def mandoc(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("mandoc") is None:
        pytest.fail("mandoc is not installed: make setup-dev installs it", pytrace=False)
    return subprocess.run(["mandoc", *arguments], capture_output=True, text=True, check=False)


def shown(page: Path) -> str:
    """As a person reads it, in one line, without bold and italics."""
    done = mandoc("-Tascii", "-Owidth=1000", page)
    assert (done.returncode, done.stderr) == (0, "")
    text = done.stdout
    while (at := text.find("\b")) > 0:
        text = text[: at - 1] + text[at + 1 :]
    return " ".join(text.split())


def test_the_pages_are_those_of_the_parsers(made: Path, root: Path) -> None:
    assert {page.name for page in made.iterdir()} == set(NAMES)
    assert {page.name for page in (root / "docs/man").iterdir()} == set(NAMES)
    for name in NAMES:
        now, then = (made / name).read_text(), (root / "docs/man" / name).read_text()
        assert now == then, f"docs/man/{name} is not what the commands say now: make man"


@pytest.mark.parametrize("name", NAMES)
def test_a_linter_finds_no_fault(made: Path, name: str) -> None:
    done = mandoc("-Tlint", "-Wwarning", made / name)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_page_tells_all(made: Path, command: str) -> None:
    (described,) = [each for each in commands() if each.name == command]
    text = shown(made / f"resolver-{command}.1")
    assert f"resolver-{command} - {described.summary}" in text
    for word in described.description.split():
        assert word in text
    for option in described.options:
        assert ", ".join(option.flags) + (f" {option.value}" if option.value else "") in text
    assert described.summary[1:] in shown(made / "resolver.1")


def test_what_looks_like_a_request_is_text(tmp_path: Path, root: Path) -> None:
    text_of = runpy.run_path(str(root / "scripts/man.py"))["_text"]
    odd = (".so /etc/passwd", "'tis a `quote' -- \\n")
    page = tmp_path / "x.1"
    page.write_text("\n".join([".TH X 1 2026-01-01", ".SH NAME", r"x \- y", ".SH Z", *map(text_of, odd)]))
    assert " ".join(odd) in shown(page)
