"""The parts of a release."""

import hashlib
import runpy
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from resolver.base.version import VERSION
from tests.fakes.locks import pinned
from tests.programs import completed


@pytest.fixture(scope="module")
def bill(root: Path) -> dict[str, object]:
    release = runpy.run_path(str(root / "scripts/release.py"))
    made: dict[str, object] = release["bill_of_materials"](
        (root / "requirements-kubernetes.lock").read_text()
    )
    return made


def test_newest_heading_of_the_changelog_is_this_version(root: Path) -> None:
    headings = [line for line in (root / "CHANGELOG.md").read_text().splitlines() if line.startswith("## [")]
    assert headings[0].startswith(f"## [{VERSION}] - ")


def test_sbom_has_every_locked_package_with_hashes(bill: dict[str, object], root: Path) -> None:
    text = (root / "requirements-kubernetes.lock").read_text()
    packages = bill["packages"]
    assert isinstance(packages, list)
    assert {package["name"]: package["versionInfo"] for package in packages[1:]} == pinned(text)
    hashes = [digest["checksumValue"] for package in packages for digest in package["checksums"]]
    assert len(hashes) == text.count("--hash=sha256:")
    assert all(digest in text for digest in hashes)


def test_sbom_names_the_version_and_is_reproducible(bill: dict[str, object], root: Path) -> None:
    assert (bill["spdxVersion"], bill["dataLicense"]) == ("SPDX-2.3", "CC0-1.0")
    packages, relations = bill["packages"], bill["relationships"]
    assert isinstance(packages, list)
    assert isinstance(relations, list)
    assert packages[0]["versionInfo"] == VERSION
    assert {each["relatedSpdxElement"] for each in relations} == {each["SPDXID"] for each in packages}
    again = runpy.run_path(str(root / "scripts/release.py"))["bill_of_materials"]
    assert again((root / "requirements-kubernetes.lock").read_text()) == bill


def test_release_without_engine_makes_nothing(root: Path, tmp_path: Path) -> None:
    done = completed(sys.executable, str(root / "scripts/release.py"), "--directory", str(tmp_path / "dist"))
    assert done.returncode == 2
    assert "neither docker nor podman nor buildah" in done.stderr
    assert not (tmp_path / "dist").exists()


def test_krew_can_check_the_plugins_archive(root: Path, tmp_path: Path) -> None:
    make = runpy.run_path(str(root / "scripts/release.py"))["plugin"]
    make(tmp_path, "https://example.org/there")
    manifest = yaml.safe_load((tmp_path / "krew-resolver.yaml").read_text())
    (platform,) = manifest["spec"]["platforms"]
    archive = tmp_path / platform["uri"].rpartition("/")[2]
    assert platform["uri"] == f"https://example.org/there/releases/download/v{VERSION}/{archive.name}"
    first = archive.read_bytes()
    assert platform["sha256"] == hashlib.sha256(first).hexdigest()
    with tarfile.open(archive) as tar:
        modes = {member.name: member.mode for member in tar}
        tar.extractall(tmp_path / "krew")  # noqa: S202 - of our own making
    assert modes == {platform["bin"]: 0o755, "LICENSE": 0o644}
    assert manifest["spec"]["homepage"] == "https://example.org/there"
    plugin = (sys.executable, "-I", "-S", tmp_path / "krew" / platform["bin"])  # without our package
    printed = [completed(*plugin, option, check=True).stdout for option in ("--help", "--version")]
    assert printed[0].startswith("usage: kubectl resolver")
    assert printed[1] == f"kubectl resolver {VERSION}\n"
    make(tmp_path, "https://example.org/there")
    assert archive.read_bytes() == first
