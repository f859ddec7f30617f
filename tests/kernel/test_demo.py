"""`make demo` is the main job from end to end, and it must be able to fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def _demo(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fakes.demo", *options]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


@pytest.mark.timeout(90)
def test_every_value_is_right_in_the_end(root: Path) -> None:
    done = _demo(root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every value is right" in done.stdout
    for word in (
        "missing",
        "wrong_namespace",
        "stale",
        "duplicate",
        "zeroed",
        "resolver lookup",
        "570.86.15",
    ):
        assert word in done.stdout
    assert "\x1b" not in done.stdout, "a pipe gets plain text"


@pytest.mark.timeout(90)
def test_a_daemon_that_repairs_nothing_is_found_out(root: Path) -> None:
    done = _demo(root, "--dry-run")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG: train, pid 2: hostpid is 2, must be" in done.stdout
    assert "Not every value is right" in done.stderr
