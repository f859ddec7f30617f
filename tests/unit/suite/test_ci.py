"""`.ci/run`: every part runs once, the last line is the closing line, and each failure is reported."""

import os
import shutil
from pathlib import Path
from typing import Final

import pytest

from tests.programs import completed, script

PARTS: Final = ("long", "poisoned", "nvml", "engines", "kernels")
CALLS: Final = ["long", "poisoned", "nvml", "engines ARGS=--check", "kernels ARGS=--check --loader 5.10 6.12"]
CLOSING: Final = "=== 3 passed, 1 warning in 1.20s (0:15:00) ==================="
MAKE: Final = """
echo "$@" >> "$CALLS"
case $1 in
poisoned) echo collected; echo "$CLOSING"; echo after ;;
*) echo "$1 is done" ;;
esac
[ "$1" != "$FAILING" ]
"""


def ci(place: Path, root: Path, failing: str = "", closing: str = CLOSING) -> tuple[bool, str, list[str]]:
    """Run it; return True if it succeeds, its last line, and the arguments of `make`."""
    (place / ".ci").mkdir()
    shutil.copy(root / ".ci/run", place / ".ci")
    script(place / "make", MAKE)
    variables = {"CALLS": str(place / "calls"), "FAILING": failing, "CLOSING": closing}
    found = {"PATH": f"{place}:{os.environ['PATH']}"}
    done = completed(place / ".ci/run", env=variables | found)
    return done.returncode == 0, done.stdout.splitlines()[-1], (place / "calls").read_text().splitlines()


def test_ci_runs_every_part_and_pytest_last(tmp_path: Path, root: Path) -> None:
    assert ci(tmp_path, root) == (True, CLOSING, CALLS)


@pytest.mark.parametrize("failing", PARTS)
def test_ci_fails_with_any_part_and_repeats_none(tmp_path: Path, root: Path, failing: str) -> None:
    assert ci(tmp_path, root, failing) == (False, CLOSING, CALLS)


@pytest.mark.parametrize("failing", ["", "poisoned"])
def test_ci_fails_if_a_run_never_closed(tmp_path: Path, root: Path, failing: str) -> None:
    assert ci(tmp_path, root, failing, "Segmentation fault")[:2] == (False, "0 passed, 1 failed")
