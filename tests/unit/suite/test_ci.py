"""`.ci/run`: every part runs, failed tests run once more, the last line is a closing line, and no failure is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

PARTS: Final = ("long", "test", "engines", "kernels")
CALLS: Final = ["long", "test", "engines ARGS=--check", "kernels ARGS=--check --loader 6.1 6.12"]
CLOSING: Final = "=== 3 passed, 1 warning in 1.20s (0:15:00) ==================="
RED: Final = "=== 2 failed, 3 passed in 1.20s ==="
MAKE: Final = """#!/bin/sh
echo "$@" >> "$CALLS"
case $1 in
test) echo collected; echo "$CLOSING"; echo after ;;
*) echo "$1 is done" ;;
esac
[ "$1" != "$FAILING" ]
"""
PYTHON: Final = """#!/bin/sh
echo "$SECOND"
case $SECOND in *failed*) exit 1 ;; esac
"""


def ci(
    place: Path, root: Path, failing: str = "", closing: str = CLOSING, second: str = ""
) -> tuple[bool, str, list[str]]:
    """Whether it succeeds, its last line, and what `make` was called with."""
    for folder in (".ci", ".venv/bin"):
        (place / folder).mkdir(parents=True)
    shutil.copy(root / ".ci" / "run", place / ".ci")
    for path, text in ((place / "make", MAKE), (place / ".venv/bin/python", PYTHON)):
        path.write_text(text)
        path.chmod(0o755)
    told = {"CALLS": str(place / "calls"), "FAILING": failing, "CLOSING": closing, "SECOND": second}
    found = {"PATH": f"{place}:{os.environ['PATH']}"}
    done = subprocess.run(
        [place / ".ci" / "run"], env=told | found, capture_output=True, text=True, check=False
    )
    return done.returncode == 0, done.stdout.splitlines()[-1], (place / "calls").read_text().splitlines()


def test_each_part_runs_and_pytests_line_is_the_last(tmp_path: Path, root: Path) -> None:
    assert ci(tmp_path, root) == (True, CLOSING, CALLS)


@pytest.mark.parametrize("failing", PARTS)
def test_it_fails_when_any_part_does(tmp_path: Path, root: Path, failing: str) -> None:
    assert ci(tmp_path, root, failing) == (False, CLOSING, CALLS)


@pytest.mark.parametrize(
    ("second", "good", "counts"),
    [
        ("=== 2 passed in 1s ===", True, "5 passed, 0 failed"),
        ("=== 1 failed, 1 passed in 1s ===", False, "4 passed, 1 failed"),
    ],
)
def test_what_failed_runs_once_more(
    tmp_path: Path, root: Path, second: str, *, good: bool, counts: str
) -> None:
    passed, last, _ = ci(tmp_path, root, "test", RED, second)
    assert (passed, last) == (good, f"=== {counts} in 1.20s ===")


def test_a_run_that_never_closed_has_failed(tmp_path: Path, root: Path) -> None:
    assert ci(tmp_path, root, "test", "Segmentation fault")[:2] == (False, "0 passed, 1 failed")
