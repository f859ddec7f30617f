"""What the documents say is held against the code: names, defaults, options, reasons, paths and links."""

from __future__ import annotations

import re
import subprocess
import sys
from enum import StrEnum
from pathlib import Path

import msgspec
import pytest

from resolver.cli import COMMANDS
from resolver.config import Settings
from resolver.types import RegionReason, RepairReason, SampleReason, UnresolvedReason

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bpf/README.md", "docs")


def documents(root: Path) -> list[Path]:
    found = [path for name in DOCUMENTS for path in (sorted((root / name).glob("*.md")) or [root / name])]
    assert len(found) > len(DOCUMENTS)
    return found


def first_cells(text: str) -> list[str]:
    """What stands in the first column of every table, without its back quotes."""
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def rendered(default: object) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, float):
        return f"{default:g}s" if default >= 1 else f"{default * 1000:g}ms"
    return ":".join(default) if isinstance(default, tuple) else str(default)


def test_every_setting_is_told_with_its_default(root: Path) -> None:
    text = (root / "docs/config.md").read_text()
    told = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", text, re.MULTILINE))
    assert told == {field.name: rendered(field.default) for field in msgspec.structs.fields(Settings)}


@pytest.mark.parametrize(
    ("reasons", "document", "heading"),
    [
        (UnresolvedReason, "troubleshooting.md", "A slot stays unresolved"),
        (RegionReason, "troubleshooting.md", "A cache file is left alone"),
        (SampleReason, "troubleshooting.md", "A utilization sample finds no slot"),
        (RepairReason, "how-it-works.md", "When a slot is repaired"),
    ],
)
def test_every_reason_is_told(reasons: type[StrEnum], document: str, heading: str, root: Path) -> None:
    sections = re.split(r"^## ", (root / "docs" / document).read_text(), flags=re.MULTILINE)
    (section,) = [section for section in sections if section.startswith(heading)]
    assert set(first_cells(section)) == {reason.value for reason in reasons}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_told(command: str, root: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "resolver", command, "--help"], capture_output=True, text=True, check=True
    ).stdout
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", shown)) - {"--help"}
    sections = re.split(r"^## ", (root / "docs/cli.md").read_text(), flags=re.MULTILINE)
    (section,) = [section for section in sections if section.startswith(f"resolver {command}")]
    assert set(re.findall(r"^\| `(--[a-z-]+)", section, re.MULTILINE)) == options


def test_every_link_leads_somewhere(root: Path) -> None:
    for document in documents(root):
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)|src(?:set)?=\"([^\":]+)\"", document.read_text())
        for target in filter(None, (name for pair in links for name in pair)):
            assert (document.parent / target).exists(), (
                f"{document.name} links to {target}, which is not there"
            )


def test_every_path_in_the_text_is_there(root: Path) -> None:
    pattern = re.compile(r"`((?:resolver|tests|scripts|docs|bpf|deploy)/[\w./-]+)`")
    for document in documents(root):
        for path in pattern.findall(document.read_text()):
            if path.startswith("resolver/_bpf"):
                continue  # inside the wheel only; test_wheel.py looks there
            assert (root / path).exists(), f"{document.name} speaks of {path}, which is not there"


def test_every_make_target_in_the_text_is_there(root: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    assert {"setup", "run", "demo", "test", "bench", "lint", "format", "lock", "clean", "wheel"} <= targets
    for document in documents(root):
        told = re.findall(r"(?:`|\$ (?:sudo )?)make ([a-z-]+)", document.read_text())
        assert set(told) <= targets, f"{document.name} names a make target that is not there"
