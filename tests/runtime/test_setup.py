"""scripts/setup.sh where something is missing; the whole of it on a bare machine is `make fresh`."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import completed

NOBODY = 65534


@pytest.fixture
def checkout(root: Path) -> Iterator[Path]:
    """The files that setup reads, in a directory that every user may enter."""
    place = Path(tempfile.mkdtemp(prefix="a checkout "))
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
    bin_dir = place / "bin"
    bin_dir.mkdir()
    for name in os.listdir("/usr/bin"):
        if name not in programs:
            (bin_dir / name).symlink_to(f"/usr/bin/{name}")
    return str(bin_dir)


def setup(
    place: Path, user: int = 0, *, before: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    variables = {"PATH": os.environ["PATH"], "HOME": str(place), "TMPDIR": str(place), **environment}
    command = (*before, place / "scripts/setup.sh")
    return completed(*command, env=variables, user=user, group=user, extra_groups=[])


def test_setup_names_a_read_only_checkout(checkout: Path) -> None:
    done = setup(checkout, user=NOBODY)
    assert done.returncode == 1
    assert f"goes into {checkout}/.venv, and the user nobody cannot write there." in done.stderr


def test_setup_without_root_names_package_and_command(checkout: Path) -> None:
    os.chown(checkout, NOBODY, NOBODY)
    done = setup(checkout, user=NOBODY, PATH=path_without(checkout, "gcc"))
    assert done.returncode == 1
    assert "these Debian packages are missing: gcc\n" in done.stderr
    assert "sudo apt-get install -y --no-install-recommends gcc\n" in done.stderr
    assert not (checkout / ".venv").exists()


def without_bcc(place: Path) -> tuple[str, ...]:
    """Return a wrapper in whose mount namespace an empty directory covers bcc."""
    empty = place / "empty"
    empty.mkdir(exist_ok=True)
    found = [str(path) for path in Path("/usr/lib").glob("python3*/*-packages/bcc")]
    assert found, "bcc is not installed here: make setup-dev"
    hide = "; ".join(f"mount --bind '{empty}' {directory}" for directory in found)
    return ("unshare", "--mount", "sh", "-ec", f'{hide}; exec "$@"', "sh")


@pytest.mark.long
def test_setup_without_bcc_names_the_loss_and_goes_on(checkout: Path) -> None:
    subprocess.run(["/usr/bin/python3", "-m", "venv", checkout / ".venv"], check=True)  # setup reuses it
    place = path_without(checkout, "apt-get")
    done = setup(
        checkout, before=without_bcc(checkout), PATH=place, PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull
    )
    assert "without python3-bpfcc the kernel can't keep the map of processes" in done.stderr
    assert "falls back to --source netlink (this is not Debian or Ubuntu)\n" in done.stderr
    assert "pip could not install" in done.stderr, "it goes on to the Python packages"


@pytest.mark.long
def test_setup_without_network_names_the_cause(checkout: Path) -> None:
    offline = setup(checkout, before=("unshare", "--net"), PIP_CONFIG_FILE=os.devnull)
    assert offline.returncode == 1
    assert "setup: pip could not install the Python packages" in offline.stderr
    assert "PIP_NO_INDEX=1 PIP_FIND_LINKS=wheels" in offline.stderr
    assert "Retrying" not in offline.stderr
    assert "HTTPSConnection" not in offline.stderr


def test_setup_replaces_an_incomplete_environment(checkout: Path) -> None:
    leftover = checkout / ".venv/bin/python"
    leftover.parent.mkdir(parents=True)
    leftover.symlink_to("/usr/bin/python3")  # Ctrl-C came before pip
    done = setup(checkout, PIP_NO_INDEX="1")
    assert "setup: making .venv with Python" in done.stderr
    assert "No module named pip" not in done.stderr
    assert not list((checkout / ".venv").glob(".setup-*")), "the packages are not installed yet"


@pytest.mark.long
def test_second_setup_changes_and_prints_nothing(root: Path) -> None:
    command = [str(root / "scripts/setup.sh"), "dev"]
    subprocess.run(command, capture_output=True, check=True)
    done = completed(*command)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
