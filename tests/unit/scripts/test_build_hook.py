"""The wheel's man pages: one page for each command, in valid roff."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from resolver.cli import COMMANDS, parser_of
from tests.programs import completed

NAMES = ("resolver.1", *(f"resolver-{command}.1" for command in COMMANDS))


@pytest.fixture(scope="module")
def made(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("share")
    subprocess.run([sys.executable, root / "scripts/build_hook.py", place], cwd=root, check=True)
    return place / "man/man1"


def mandoc(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("mandoc") is None:
        pytest.fail("mandoc is not installed: make setup-dev installs it", pytrace=False)
    return completed("mandoc", *arguments)


def shown(page: Path) -> str:
    """Return a page's text in one line, without bold and italics."""
    done = mandoc("-Tascii", "-Owidth=1000", page)
    assert (done.returncode, done.stderr) == (0, "")
    text = done.stdout
    while (at := text.find("\b")) > 0:
        text = text[: at - 1] + text[at + 1 :]
    return " ".join(text.split())


@pytest.mark.parametrize("name", NAMES)
def test_linter_accepts_the_man_pages(made: Path, name: str) -> None:
    done = mandoc("-Tlint", "-Wwarning", made / name)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_man_page_has_every_option(made: Path, command: str) -> None:
    parser, module = parser_of(command)
    text = shown(made / f"resolver-{command}.1")
    assert f"resolver-{command} - {COMMANDS[command]}" in text
    for word in (module.__doc__ or "").split():
        assert word in text
    for listed in re.findall(r"(?m)^  (\S.*?)(?:  | {|$)", parser.format_help()):
        assert re.sub(r"^(-\w) \S+, ", r"\1, ", listed) in text  # -s NAME, --long NAME
    assert COMMANDS[command][1:] in shown(made / "resolver.1")


def test_man_page_escapes_lines_like_requests(tmp_path: Path, root: Path) -> None:
    text_of = runpy.run_path(str(root / "scripts/build_hook.py"))["_text"]
    odd = (".so /etc/passwd", "'tis a `quote' -- \\n")
    page = tmp_path / "x.1"
    page.write_text("\n".join([".TH X 1 2026-01-01", ".SH NAME", r"x \- y", ".SH Z", *map(text_of, odd)]))
    assert " ".join(odd) in shown(page)
