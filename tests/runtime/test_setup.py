"""scripts/setup.sh where something is missing; the whole of it on a bare machine is `make fresh`."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

NOBODY = 65534


@pytest.fixture
def checkout(root: Path) -> Iterator[Path]:
    """What setup reads, in a directory that everybody may enter."""
    place = Path(tempfile.mkdtemp())
    try:
        place.chmod(0o755)
        (place / "scripts").mkdir()
        for name in (
            "pyproject.toml",
            "scripts/setup.sh",
            *(p.name for p in root.glob("requirements*.lock")),
        ):
            shutil.copy(root / name, place / name)
        yield place
    finally:
        shutil.rmtree(place)


def path_without(place: Path, *programs: str) -> str:
    """A PATH on which everything of /usr/bin is found but these."""
    bin_dir = place / "bin"
    bin_dir.mkdir()
    for name in os.listdir("/usr/bin"):
        if name not in programs:
            (bin_dir / name).symlink_to(f"/usr/bin/{name}")
    return str(bin_dir)


def setup(place: Path, user: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [place / "scripts/setup.sh"],
        env={"PATH": os.environ["PATH"], "HOME": str(place), "TMPDIR": str(place), **environment},
        user=user,
        group=user,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
    )


def test_in_a_checkout_that_may_not_be_written_it_says_so(checkout: Path) -> None:
    done = setup(checkout, user=NOBODY)
    assert done.returncode == 1
    assert f"everything Python goes into {checkout}/.venv, and nobody may not write there." in done.stderr


def test_without_root_it_names_the_missing_package_and_the_command(checkout: Path) -> None:
    os.chown(checkout, NOBODY, NOBODY)
    done = setup(checkout, user=NOBODY, PATH=path_without(checkout, "gcc"))
    assert done.returncode == 1
    assert "these Debian packages are missing: gcc\n" in done.stderr
    assert "sudo apt-get install -y --no-install-recommends gcc\n" in done.stderr
    assert not (checkout / ".venv").exists()


def test_on_another_distribution_it_names_the_missing_package(checkout: Path) -> None:
    done = setup(checkout, PATH=path_without(checkout, "gcc", "apt-get"))
    assert done.returncode == 1
    assert "these are missing and this is not Debian or Ubuntu: gcc" in done.stderr


def test_a_python_package_that_cannot_be_had_is_named(checkout: Path) -> None:
    done = setup(checkout, PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull)
    assert done.returncode == 1
    first = (checkout / "requirements.lock").read_text().split(" ")[0]
    assert f"pip could not install {first}" in done.stderr
    again = setup(checkout, PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull)
    assert again.returncode == 1, "a failed setup must not leave its stamp"


def test_a_second_run_does_nothing_and_says_nothing(root: Path) -> None:
    command = [str(root / "scripts/setup.sh"), "dev"]
    subprocess.run(command, capture_output=True, check=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
