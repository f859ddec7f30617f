"""`.ci/run`: both halves run, the last line is pytest's closing line, and neither half's failure is lost."""

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
kernels) echo '=== kernels: 2 passed, 0 failed ==='; exit $KERNELS ;;
esac
"""


@pytest.mark.parametrize(
    ("tests", "kernels", "status"), [(0, 0, 0), (1, 0, 1), (0, 1, 1), (2, 1, 2), (0, 2, 2)]
)
def test_ci_fails_when_either_half_does_and_ends_with_pytests_line(
    tmp_path: Path, tests: int, kernels: int, status: int
) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "make").write_text(MAKE)
    (tmp_path / "make").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}
    environment |= {"TESTS": str(tests), "KERNELS": str(kernels)}
    done = subprocess.run(
        [tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert done.stdout.splitlines()[-1] == CLOSING
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["test", "kernels ARGS=--check --loader 6.1 6.12"]
