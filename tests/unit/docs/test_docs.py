"""The documents: every option is described, and every link and path has a target."""

import re
from pathlib import Path

import pytest

from resolver.cli import COMMANDS, parser_of
from resolver.config import SETTINGS
from tests.fakes.documents import documents


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_documented(command: str, root: Path) -> None:
    text = "".join(path.read_text() for path in documents(root))
    listed = re.findall(r"(?m)^  +(-\S.*?)(?:  |$)", parser_of(command)[0].format_help())
    options = {flag for line in listed for flag in re.findall(r"(?<![\w-])--?[a-z][\w-]*", line)}
    options -= {setting.flag for setting in SETTINGS.values()}  # their table is generated
    assert {flag for flag in options if not re.search(rf"(?<![\w-]){flag}(?![\w-])", text)} == set()


def test_links_and_paths_of_pages_exist(root: Path) -> None:
    linked = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)|src(?:set)?=\"([^\":]+)\"")
    named = re.compile(r"`((?:resolver|tests|scripts|docs|bpf|deploy)/[\w./-]+)`")
    for document in documents(root):
        text = document.read_text()
        targets = {document.parent / name for pair in linked.findall(text) for name in pair if name}
        targets |= {root / path for path in named.findall(text) if not path.startswith("resolver/_bpf")}
        assert [target for target in targets if not target.exists()] == [], document.name
