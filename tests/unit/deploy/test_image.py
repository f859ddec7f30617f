"""The image's recipe by what can be seen without building it; tests/runtime/test_image.py builds it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from resolver import __version__

BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def recipe() -> str:
    return (Path(__file__).parents[3] / "deploy/image/Dockerfile").read_text()


@pytest.mark.parametrize(
    "command",
    [
        ("hadolint", "--failure-threshold", "style", "--no-color", "deploy/image/Dockerfile"),
        ("shellcheck", "--severity", "style", "--color=never", "deploy/image/steps.sh"),
    ],
    ids=lambda command: command[0],
)
def test_no_linter_complains(command: tuple[str, ...], root: Path) -> None:
    done = subprocess.run(
        [BIN / command[0], *command[1:]], cwd=root, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_each_step_is_run_and_each_that_is_run_is_there(recipe: str, root: Path) -> None:
    """The recipe does nothing by itself: whatever it runs is a step, and has been run in a fresh Debian."""
    runs = re.findall(r"^RUN (?!: )(.*)$", recipe.replace("\\\n", ""), re.MULTILINE)
    called = [re.search(r"/steps/steps\.sh ([a-z-]+)$", run) for run in runs]
    assert all(called), runs
    (usage,) = re.findall(r"usage: steps\.sh (.*)\"", (root / "deploy/image/steps.sh").read_text())
    assert sorted(call[1] for call in called if call) == sorted(usage.split(" | "))
    done = subprocess.run(
        ["sh", "deploy/image/steps.sh", "nonsense"], cwd=root, capture_output=True, check=False
    )
    assert done.returncode == 2


def test_all_that_is_copied_is_let_through_and_nothing_else(recipe: str, root: Path) -> None:
    copied = {
        name.strip("/").removeprefix("./")
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", recipe, re.MULTILINE)
        for name in line.split()
    }
    lines = (root / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*", "what is not named is left out"
    assert {line[2:] for line in lines if line.startswith("!")} == copied | {"deploy/image"}
    assert all((root / name).exists() for name in copied)


def test_without_an_engine_it_is_said_which_will_do(root: Path) -> None:
    done = subprocess.run(["make", "image", "ENGINE="], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "neither docker nor podman nor buildah answers" in done.stderr


def test_the_engine_that_answers_is_taken(root: Path, tmp_path: Path) -> None:
    """`docker` is there, and its daemon is not."""
    for name, code in (("docker", 1), ("podman", 1), ("buildah", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["make", "--dry-run", "image"], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    assert f"{tmp_path}/buildah build" in done.stdout
    assert f"VERSION={__version__}" in done.stdout
