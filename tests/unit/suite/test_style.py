"""ruff and mypy as tests, so one test run shows their errors, too."""

import sys
from pathlib import Path

import pytest

from tests.programs import completed

BIN = Path(sys.executable).parent

CHECKS = {
    "ruff check": ["ruff", "check", "--quiet", "."],
    "ruff format": ["ruff", "format", "--check", "--quiet", "."],
    "mypy": ["mypy", "--no-error-summary"],
}


@pytest.mark.parametrize("name", CHECKS)
def test_style(name: str, root: Path) -> None:
    program, *arguments = CHECKS[name]
    done = completed(BIN / program, *arguments, cwd=root)
    if done.returncode != 0:
        pytest.fail(f"{name} complains:\n{done.stdout}{done.stderr}", pytrace=False)
