"""Puts a release together in dist/: wheel, sdist, Debian package, chart, kubectl's plugin, image, SBOM and checksums.

    make release                             all of it; the image takes docker, podman or buildah
    make release ARGS=--without-image        all but the image
    make release ADDRESS=https://...         the repository, which deploy/published.env names otherwise

Times in wheel, sdist, Debian package and SBOM are the commit's (SOURCE_DATE_EPOCH): the same commit, the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.metadata
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from resolver.base.version import VERSION
from scripts.published import published

ROOT: Final = Path(__file__).resolve().parent.parent
LOCK: Final = ROOT / "requirements-kubernetes.lock"


def main() -> int:
    """Make it, and list it. `CalledProcessError` where a tool fails."""
    parser = argparse.ArgumentParser(description="Put a release together.")
    parser.add_argument("--without-image", action="store_true", help="leave the container image out")
    parser.add_argument("--directory", type=Path, default=ROOT / "dist", help="where it goes; emptied first")
    parser.add_argument("--engine", default="", help="docker, podman or buildah, with its options")
    parser.add_argument("--image-options", default="", help="more options for the engine's build")
    args = parser.parse_args()
    if not args.without_image and not args.engine:
        parser.error(
            "neither docker nor podman nor buildah answers: install or start one, or leave the image out: "
            "ARGS=--without-image"
        )
    if not (address := published()["ADDRESS"]):
        sys.stderr.write(
            "release: ADDRESS in deploy/published.env is empty: the files name no homepage, and the manifest for krew "
            "is left out\n"
        )
    dist = args.directory.resolve()
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)
    git = ["git", "log", "-1", "--format=%ct"]
    os.environ.setdefault("SOURCE_DATE_EPOCH", subprocess.check_output(git, cwd=ROOT, text=True).strip())
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", dist)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    prove(sdist)
    _run(sys.executable, ROOT / "scripts/deb.py", wheel, dist)
    _run("make", "chart", f"DIST={dist}")
    plugin(dist, address)
    if not args.without_image:
        _image(args.engine, args.image_options, dist)
    sbom = json.dumps(bill_of_materials(LOCK.read_text()), indent=2) + "\n"
    (dist / f"hami_resolver-{VERSION}.spdx.json").write_text(sbom)
    sums = "".join(f"{_sha256(path)}  {path.name}\n" for path in sorted(dist.iterdir()))
    (dist / "SHA256SUMS").write_text(sums)
    sys.stdout.write(sums)
    return 0


def prove(sdist: Path) -> None:
    """Unpack the source archive, below a directory with a space, and run the README's first command in it."""
    first = re.search(r"(?m)^\$ (make .*)$", (ROOT / "README.md").read_text())
    if first is None:
        raise SystemExit("release: README.md has no line that begins with `$ make`")
    with tempfile.TemporaryDirectory(prefix="a release ") as place:
        shutil.unpack_archive(sdist, place)
        # ARGS are this release's.
        _run(*shlex.split(first[1]), "ARGS=", cwd=Path(place, sdist.name.removesuffix(".tar.gz")))


def plugin(dist: Path, address: str) -> None:
    """Pack kubectl's plugin as an archive, with its manifest for krew, which needs the repository's address."""
    archive = dist / f"kubectl-resolver-{VERSION}.tar.gz"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, source in (("kubectl-resolver", "resolver/kube/kubectl_plugin.py"), ("LICENSE", "LICENSE")):
            data = (ROOT / source).read_bytes()
            about = tarfile.TarInfo(name)
            about.size, about.mtime, about.mode = len(data), _epoch(), 0o644 if name == "LICENSE" else 0o755
            tar.addfile(about, io.BytesIO(data))
    archive.write_bytes(gzip.compress(packed.getvalue(), 9, mtime=0))
    if not address:
        return
    manifest = (ROOT / "deploy/krew.yaml").read_text().replace("@VERSION@", VERSION)
    manifest = manifest.replace("@HOMEPAGE@", address)
    manifest = manifest.replace("@URI@", f"{address}/releases/download/v{VERSION}/{archive.name}")
    (dist / "krew-resolver.yaml").write_text(manifest.replace("@SHA256@", _sha256(archive)))


def bill_of_materials(lock: str) -> dict[str, Any]:
    """SPDX 2.3: this program, and every package of a lock file with its version and the hashes of its files."""
    name = "hami-resolver"
    pins = re.findall(r"(?m)^([\w.-]+)==(\S+)[^\n]*\\\n((?:[ ]+--hash=[^\n]*\n?)+)", lock)
    packages = [_package(*pin) for pin in pins]
    ours = _package(name, VERSION, "") | {"SPDXID": f"SPDXRef-{name}", "licenseDeclared": "Apache-2.0"}
    relations = [("SPDXRef-DOCUMENT", "DESCRIBES", ours["SPDXID"])]
    relations += [(ours["SPDXID"], "DEPENDS_ON", package["SPDXID"]) for package in packages]
    when = datetime.fromtimestamp(_epoch(), UTC).isoformat().replace("+00:00", "Z")
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"{name} {VERSION}",
        "documentNamespace": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{name} {VERSION} {lock}')}",
        "creationInfo": {"created": when, "creators": [f"Tool: {name}-{VERSION}"]},
        "packages": [ours, *packages],
        "relationships": [
            {"spdxElementId": subject, "relationshipType": relation, "relatedSpdxElement": other}
            for subject, relation, other in relations
        ],
    }


def _package(name: str, version: str, hashes: str) -> dict[str, Any]:
    """Return a package's record, with its licence if this very version is installed here."""
    licences = [
        licence
        for distribution in importlib.metadata.distributions(name=name)
        if distribution.version == version and (licence := distribution.metadata.get("License-Expression"))
    ]
    purl = {
        "referenceCategory": "PACKAGE-MANAGER",
        "referenceType": "purl",
        "referenceLocator": f"pkg:pypi/{name}@{version}",
    }
    digests = re.findall(r"sha256:([0-9a-f]{64})", hashes)
    return {
        "name": name,
        "SPDXID": f"SPDXRef-package-{name}",
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseConcluded": "NOASSERTION",
        "licenseDeclared": licences[0] if licences else "NOASSERTION",
        "copyrightText": "NOASSERTION",
        "checksums": [{"algorithm": "SHA256", "checksumValue": digest} for digest in digests],
        "externalRefs": [purl],
    }


def _image(engine: str, options: str, dist: Path) -> None:
    """Built as `make image` does, and put into an archive that each of the three can load."""
    name = f"{published()['IMAGE_NAME']}:{VERSION}"
    archive = dist / f"resolver-{VERSION}-image.tar"
    # The release's own ARGS must not go to the engine.
    _run("make", "image", f"ENGINE={engine}", f"IMAGE={name}", f"ARGS={options}")
    words = shlex.split(engine)
    if words[0].rsplit("/", 1)[-1] == "buildah":
        _run(*words, "push", name, f"docker-archive:{archive}:{name}")
    else:
        _run(*words, "save", "--output", archive, name)
    _run("gzip", "--no-name", "-9", archive)


def _epoch() -> int:
    return int(os.environ.get("SOURCE_DATE_EPOCH", "0"))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _run(*command: str | Path, cwd: Path = ROOT) -> None:
    done = subprocess.run([*map(str, command)], cwd=cwd, check=False, stdout=subprocess.PIPE)
    if done.returncode:
        sys.stderr.buffer.write(done.stdout)
        done.check_returncode()


if __name__ == "__main__":
    raise SystemExit(main())
