"""The image's recipe by what can be seen without building it; tests/runtime/test_image.py builds it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def recipe() -> str:
    return (Path(__file__).parent.parent.parent / "deploy/image/Dockerfile").read_text()


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


def test_the_linter_is_told_to_ignore_nothing(recipe: str, root: Path) -> None:
    assert "hadolint ignore" not in recipe
    assert not [name for name in (".hadolint.yaml", ".hadolint.yml") if (root / name).exists()]
    assert "shellcheck disable" not in (root / "deploy/image/steps.sh").read_text()


def test_nothing_names_an_architecture(recipe: str, root: Path) -> None:
    text = recipe + (root / "deploy/image/steps.sh").read_text()
    assert re.findall(r"amd64|x86.64|arm64|aarch64|TARGET(?:ARCH|PLATFORM)|--platform", text) == []


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
    assert "no docker, podman or buildah on PATH" in done.stderr


def test_its_page_tells_each_argument_with_its_default(recipe: str, root: Path) -> None:
    page = (root / "docs/image.md").read_text()
    rows = re.findall(r"^\| ((?:`[A-Z_]+`(?:, )?)+) \| ((?:`[^`]+`(?:, )?)+) \|", page, re.MULTILINE)
    told = {
        name: default
        for names, defaults in rows
        for name, default in zip(re.findall("`(.*?)`", names), re.findall("`(.*?)`", defaults), strict=True)
    }
    assert told == dict(re.findall(r"^ARG (\w+)=(\S+)$", recipe, re.MULTILINE))


def test_it_starts_from_the_debian_that_it_is_tested_with(recipe: str) -> None:
    from tests.runtime.image import SUITES

    (suite,) = re.findall(r"^ARG BASE=\S+/debian:(\w+)-slim$", recipe, re.MULTILINE)
    assert suite == next(iter(SUITES))
