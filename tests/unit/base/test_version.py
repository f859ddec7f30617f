"""One version, from one file."""

import shutil
import subprocess
import sys
from pathlib import Path

from resolver.base.version import VERSION


def printed_version(place: Path) -> str:
    command: list[str | Path] = [sys.executable, place / "resolver/base/version.py"]
    return subprocess.check_output(command, text=True).strip()


def test_version_needs_neither_git_nor_tags(root: Path, tmp_path: Path) -> None:
    place = tmp_path / "a checkout"
    (place / "resolver/base").mkdir(parents=True)
    shutil.copy(root / "resolver/base/version.py", place / "resolver/base")
    assert printed_version(place) == VERSION
    (place / ".git").mkdir()  # of another user: git refuses it
    assert printed_version(place) == VERSION


def test_newest_heading_of_the_changelog_is_this_version(root: Path) -> None:
    headings = [line for line in (root / "CHANGELOG.md").read_text().splitlines() if line.startswith("## [")]
    assert headings[0].startswith(f"## [{VERSION}] - ")
