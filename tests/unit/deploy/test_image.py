"""The image's recipe, checked without a build; tests/runtime/test_image.py builds it."""

import os
import sys
from pathlib import Path

import pytest

from resolver.base.version import VERSION
from tests.programs import completed, script

BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    "command",
    [
        ("hadolint", "--failure-threshold", "style", "--no-color", "deploy/image/Dockerfile"),
        ("shellcheck", "--severity", "style", "--color=never", "deploy/image/steps.sh"),
    ],
    ids=lambda command: command[0],
)
def test_linter_accepts_the_image_recipe(command: tuple[str, ...], root: Path) -> None:
    done = completed(BIN / command[0], *command[1:], cwd=root)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_make_image_without_an_engine_lists_engines(root: Path) -> None:
    done = completed("make", "image", "ENGINE=", cwd=root)
    assert done.returncode == 2
    assert "neither docker nor podman nor buildah answers" in done.stderr


def test_make_image_takes_an_engine_that_answers(root: Path, tmp_path: Path) -> None:
    """`docker` is installed, but its daemon does not run."""
    for name, code in (("docker", 1), ("podman", 1), ("buildah", 0)):
        script(tmp_path / name, f"exit {code}")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = completed("make", "--dry-run", "image", cwd=root, env=environment, check=True)
    assert f"{tmp_path}/buildah build" in done.stdout
    assert f"/resolver:{VERSION} " in done.stdout
