"""`.ci/run`: every part runs, the last line is pytest's closing line or like it, and no failure is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parent.parent.parent
OTHERS: Final = ["long", "engines ARGS=--check", "kernels ARGS=--check --loader 6.1 6.12"]
AGAIN: Final = "-m pytest --last-failed --last-failed-no-failures none"
ENDED: Final = " in 1.20s (0:15:00) ==================="
MAKE: Final = """#!/bin/sh
echo "$@" >> "$CALLS"
case $1 in
test)
    echo collected
    for name in $NAMES; do echo "FAILED tests/unit/test_it.py::$name - AssertionError: 1 passed"; done
    echo "$FIRST"; echo after; exit $TESTS ;;
long) echo '=== 9 passed in 3.00s ==='; exit $LONG ;;
engines) echo '9 passed in 3.00s'; exit $ENGINES ;;
kernels) echo '=== kernels: 2 passed, 0 failed ==='; exit $KERNELS ;;
esac
"""
PYTHON: Final = """#!/bin/sh
echo "$@" >> "$CALLS"
echo "$SECOND"
exit $STATUS
"""


class Run:
    """`.ci/run` where `make` and pytest's second run say what they are told to."""

    def __init__(self, place: Path) -> None:
        self._place = place
        (place / ".ci").mkdir()
        (place / ".venv/bin").mkdir(parents=True)
        shutil.copy(ROOT / ".ci" / "run", place / ".ci")
        for path, text in ((place / "make", MAKE), (place / ".venv/bin/python", PYTHON)):
            path.write_text(text)
            path.chmod(0o755)
        self.environment = {
            "PATH": f"{place}:{os.environ['PATH']}",
            "CALLS": str(place / "calls"),
            "TESTS": "0",
            "LONG": "0",
            "ENGINES": "0",
            "KERNELS": "0",
            "STATUS": "0",
        }

    def __call__(self, first: str, second: str = "", **environment: object) -> tuple[int, list[str]]:
        """Exit status and lines of output."""
        told = {"FIRST": f"=== {first}{ENDED}", "SECOND": f"=== {second} in 0.5s ==="}
        told |= {name: str(value) for name, value in environment.items()}
        done = subprocess.run(
            [self._place / ".ci" / "run"],
            env=self.environment | told,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout.splitlines()

    def calls(self) -> list[str]:
        return (self._place / "calls").read_text().splitlines()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.mark.parametrize(
    ("tests", "engines", "kernels", "status"),
    [(0, 0, 0, 0), (1, 0, 0, 1), (0, 0, 1, 1), (2, 1, 1, 2), (0, 0, 2, 2), (0, 1, 0, 1), (0, 1, 2, 1)],
)
def test_it_fails_when_any_part_does_and_ends_with_pytests_line(
    run: Run, tests: int, engines: int, kernels: int, status: int
) -> None:
    got, said = run("3 passed, 1 warning", TESTS=tests, ENGINES=engines, KERNELS=kernels)
    assert got == status
    assert said[-1] == f"=== 3 passed, 1 warning{ENDED}"
    assert run.calls() == ["test", *OTHERS]


def test_what_takes_long_counts_too(run: Run) -> None:
    assert run("3 passed", LONG=2)[0] == 2


def test_a_few_that_fail_are_run_again_and_named(run: Run) -> None:
    got, said = run("2 failed, 3688 passed", "2 passed", TESTS=2, NAMES="test_a test_b[x-1]")
    assert got == 0
    assert said[-1] == f"=== 3690 passed, 0 failed{ENDED}"
    assert [line for line in said[-6:] if "::test_b[x-1]" in line]
    assert "none" in said[-2]
    assert run.calls() == ["test", AGAIN, *OTHERS]


def test_what_fails_again_has_failed(run: Run) -> None:
    got, said = run("1 failed, 3688 passed, 1 error", "1 failed, 1 passed", TESTS=2, NAMES="test_a", STATUS=1)
    assert got == 1
    assert said[-1] == f"=== 3689 passed, 1 failed{ENDED}"


def test_more_than_a_few_are_not_unsteady(run: Run) -> None:
    names = " ".join(f"t{number}" for number in range(21))
    got, said = run("21 failed, 3669 passed", TESTS=2, NAMES=names)
    assert got == 2
    assert said[-1] == f"=== 21 failed, 3669 passed{ENDED}"
    assert run.calls() == ["test", *OTHERS]


def test_a_second_run_that_finds_nothing_to_run_is_no_success(run: Run) -> None:
    got, said = run("1 failed, 3689 passed", "1 deselected", TESTS=2, STATUS=5)
    assert got == 5
    assert said[-1] == f"=== 3689 passed, 1 failed{ENDED}"
