"""The lock files: complete, with hashes, and without the addresses of package indexes."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.fakes.locks import CONDITION, pinned

LOCKS = tuple(f"requirements{kind}.lock" for kind in ("", "-build", "-kubernetes", "-dev"))


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", requirement)[0] for requirement in requirements}


def test_every_dependency_is_pinned(root: Path) -> None:
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    project = settings["project"]
    run, build, kubernetes, dev = (pinned((root / name).read_text()) for name in LOCKS)
    assert names(project["dependencies"]) <= run.keys()
    assert names(settings["build-system"]["requires"]) <= build.keys()
    assert names(project["optional-dependencies"]["dev"]) <= dev.keys()
    assert run.items() <= dev.items(), "the tests must run with what a node runs"
    assert build.items() <= dev.items()
    assert names(project["optional-dependencies"]["kubernetes"]) <= kubernetes.keys()
    assert run.items() <= kubernetes.items() <= dev.items()


@pytest.mark.parametrize("name", LOCKS)
def test_every_pin_has_only_its_hashes(name: str, root: Path) -> None:
    lines = (root / name).read_text().splitlines()
    wanted = re.compile(rf"[a-z0-9][a-z0-9.-]*==\S+{CONDITION} \\|    --hash=sha256:[0-9a-f]{{64}}(?: \\)?")
    assert [line for line in lines if not wanted.fullmatch(line)] == []
    assert sum("--hash=" in line for line in lines) >= sum("==" in line for line in lines)
