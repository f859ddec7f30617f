"""`make release`: its files can be checked, loaded and installed, and are the same the second time."""

import hashlib
import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from resolver.base.version import VERSION
from scripts.published import published
from tests.programs import completed
from tests.runtime.image import ARCHITECTURES, ROOT, Builder

#: Time to build the image, and to fetch the wheels of two distributions.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("release") / "dist"
    with Builder(tmp_path_factory.mktemp("image")) as builder:
        words = [f"--directory={directory}", f"--image-options='{' '.join(builder.options())}'"]
        settings = (f"ENGINE={builder.engine}", f"ARGS={' '.join(words)}")
        environment = os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}
        done = completed("make", "release", *settings, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return directory


def test_release_has_every_file_with_its_checksum(dist: Path) -> None:
    machine = ARCHITECTURES[os.uname().machine]
    names = {
        f"hami_resolver-{VERSION}-py3-none-any.whl",
        f"hami_resolver-{VERSION}.tar.gz",
        f"hami-resolver_{VERSION}_{machine}.deb",
        f"resolver-{VERSION}.tgz",
        f"kubectl-resolver-{VERSION}.tar.gz",
        *(["krew-resolver.yaml"] if published()["ADDRESS"] else []),
        f"resolver-{VERSION}-image.tar.gz",
        f"hami_resolver-{VERSION}.spdx.json",
    }
    assert {path.name for path in dist.iterdir()} == names | {"SHA256SUMS"}
    lines = [line.split() for line in (dist / "SHA256SUMS").read_text().splitlines()]
    sums = {name: digest for digest, name in lines}
    assert sums == {name: hashlib.sha256((dist / name).read_bytes()).hexdigest() for name in names}
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=dist, check=True)


def test_released_image_loads_and_names_its_version(dist: Path) -> None:
    with tarfile.open(dist / f"resolver-{VERSION}-image.tar.gz") as archive:
        (manifest,) = json.load(archive.extractfile("manifest.json"))  # type: ignore[arg-type]
        config = json.load(archive.extractfile(manifest["Config"]))  # type: ignore[arg-type]
    assert {tag.rpartition("/")[2] for tag in manifest["RepoTags"]} == {f"resolver:{VERSION}"}
    assert config["config"]["Labels"]["org.opencontainers.image.version"] == VERSION
    assert config["config"]["Entrypoint"] == ["resolver"]
    assert len(config["rootfs"]["diff_ids"]) == len(manifest["Layers"])
