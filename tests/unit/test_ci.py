"""`.ci/run`: every part runs, the last line is pytest's closing line, and no part's failure is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
CLOSING = "=================== 3 passed, 1 warning in 1.20s (0:15:00) ==================="
MAKE = f"""#!/bin/sh
echo "$@" >> "$CALLS"
case $1 in
test) echo collected; echo "{CLOSING}"; echo after; exit $TESTS ;;
engines) echo '9 passed in 3.00s'; exit $ENGINES ;;
kernels) echo '=== kernels: 2 passed, 0 failed ==='; exit $KERNELS ;;
esac
"""


@pytest.mark.parametrize(
    ("tests", "engines", "kernels", "status"),
    [(0, 0, 0, 0), (1, 0, 0, 1), (0, 0, 1, 1), (2, 1, 1, 2), (0, 0, 2, 2), (0, 1, 0, 1), (0, 1, 2, 1)],
)
def test_ci_fails_when_any_part_does_and_ends_with_pytests_line(
    tmp_path: Path, tests: int, engines: int, kernels: int, status: int
) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "make").write_text(MAKE)
    (tmp_path / "make").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}
    environment |= {"TESTS": str(tests), "ENGINES": str(engines), "KERNELS": str(kernels)}
    done = subprocess.run(
        [tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert done.stdout.splitlines()[-1] == CLOSING
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["test", "engines ARGS=--check", "kernels ARGS=--check --loader 6.1 6.12"]
