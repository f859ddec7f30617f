"""One version for each commit, with git and without."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from resolver.base.version import NEXT


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """The program alone, below a directory with a space."""
    place = tmp_path / "a checkout"
    (place / "resolver/base").mkdir(parents=True)
    shutil.copy(root / "resolver/base/version.py", place / "resolver/base")
    return place


def version(place: Path) -> str:
    command: list[str | Path] = [sys.executable, place / "resolver/base/version.py"]
    return subprocess.check_output(command, text=True).strip()


def git(place: Path, *words: str) -> str:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(place), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(place: Path) -> str:
    git(place, "commit", "-q", "--allow-empty", "-m", "one more")
    return git(place, "rev-parse", "--short", "HEAD")


def test_each_commit_has_its_own_and_a_tag_its_number(checkout: Path) -> None:
    git(checkout, "init", "-q")
    assert version(checkout) == f"{NEXT}.dev0", "nothing is committed"
    first, second = commit(checkout), commit(checkout)
    assert first != second
    assert version(checkout) == f"{NEXT}.dev2+g{second}"
    git(checkout, "tag", "v0.1.9")
    assert version(checkout) == "0.1.9"
    third = commit(checkout)
    assert version(checkout) == f"{NEXT}.dev1+g{third}"


def test_a_shallow_clone_has_one(checkout: Path, tmp_path: Path) -> None:
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    commit(checkout)
    last = commit(checkout)
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{checkout}", "shallow")
    assert version(tmp_path / "shallow") == f"{NEXT}.dev1+g{last}"


def test_without_git_it_comes_from_the_archive_or_the_installation(checkout: Path) -> None:
    assert version(checkout) == f"{NEXT}.dev0"
    (checkout / "hami_resolver-0.3.0.dev4+g1a2b3c4.dist-info").mkdir()
    assert version(checkout) == "0.3.0.dev4+g1a2b3c4"
    (checkout / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: hami-resolver\nVersion: 0.2.0\n")
    assert version(checkout) == "0.2.0"


def test_where_git_refuses_the_checkout_it_goes_on(checkout: Path) -> None:
    (checkout / ".git").mkdir()
    assert version(checkout) == f"{NEXT}.dev0"


def test_the_next_release_follows_the_last_and_the_manifests_name_that(root: Path) -> None:
    found = re.search(r"(?m)^## \[(\d+\.\d+\.\d+)\]", (root / "CHANGELOG.md").read_text())
    assert found
    assert [int(part) for part in NEXT.split(".")] > [int(part) for part in found[1].split(".")]
    chart = (root / "deploy/chart/resolver/Chart.yaml").read_text()
    assert f'\nversion: {found[1]}\nappVersion: "{found[1]}"\n' in chart
