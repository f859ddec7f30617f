"""Builds the image from its Dockerfile with a real builder, buildah, in a fresh Debian.

Two things stand in, because no registry has to be within reach: the Debian that the image starts from is bootstrapped
here, without what the slim images leave out, and pip finds its wheels in a directory. What was made is kept for a week
in /var/cache/resolver-image (IMAGE_CACHE), layer by layer: a second build takes seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

ROOT: Final = Path(__file__).parent.parent.parent
RECIPE: Final = ROOT / "deploy/image/Dockerfile"
KEEP: Final = Path(os.environ.get("IMAGE_CACHE", "/var/cache/resolver-image"))
#: The Debian releases whose bcc and Python will do, and the version of that Python.
SUITES: Final = {"trixie": "3.13", "bookworm": "3.11"}
#: What Debian's slim images leave out (they are made with the same lines).
_SLIM: Final = ("doc", "info", "linda", "lintian", "locale", "man")
_PLATFORMS: Final = ("manylinux2014", "manylinux_2_17", "manylinux_2_28", "manylinux_2_34")
#: An empty directory of every Debian: a bind mount there leaves nothing behind in a layer.
_WHEELS_INSIDE: Final = "/srv"


class Image(NamedTuple):
    """An image. ``root`` is its file system, mounted until the builder ends; ``config`` is its OCI configuration."""

    root: Path
    config: dict[str, Any]
    environment: dict[str, str]

    @property
    def entrypoint(self) -> list[str]:
        """The first words of what it runs."""
        return list(self.config["Entrypoint"])


class Builder:
    """One at a time on a machine: ``with`` waits for the other, and takes away what is mounted."""

    def __init__(self, work: Path, keep: Path = KEEP) -> None:
        """``work`` is for what must not be there at the next boot; it ends with the test."""
        self._keep, self._work = keep, work
        keep.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        self._lock = os.open(self._keep / "lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._tell("rm", "--all")  # of a run that was killed
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(AssertionError):
            self._tell("rm", "--all")
        os.close(self._lock)

    def build(self, suite: str = "trixie", **arguments: str) -> Image:
        """The image that this checkout makes on that Debian, with those build arguments."""
        wheels = self._wheels(SUITES[suite], os.uname().machine)
        settings = self._work / "pip.conf"
        settings.write_text(f"[global]\nno-index = true\nfind-links = {_WHEELS_INSIDE}\n")
        given = {"BASE": self._base(suite), **arguments}
        made = self._tell(
            *("bud", "--isolation", "chroot", "--pull=never", "--layers", "--quiet", "--file", str(RECIPE)),
            *(f"--build-arg={name}={value}" for name, value in given.items()),
            *("--secret", f"id=pip,src={settings}", "--volume", f"{wheels}:{_WHEELS_INSIDE}:ro"),
            str(ROOT),
        ).split()[-1]
        described = json.loads(self._tell("inspect", "--type", "image", made))["OCIv1"]
        config = {
            **described["config"],
            **{name: described[name] for name in ("architecture", "os", "history")},
        }
        environment = dict(entry.split("=", 1) for entry in config["Env"])
        container = self._tell("from", "--pull=never", made)
        return Image(Path(self._tell("mount", container)), config, environment)

    # -- what stands in -------------------------------------------------------------------------------

    def _base(self, suite: str) -> str:
        """A minimal Debian of this week, as slim as that which the recipe names."""
        name = f"localhost/debian-{suite}:{time.strftime('%G-%V')}"
        if (
            subprocess.run(
                [*self._buildah, "inspect", "--type", "image", name], capture_output=True, check=False
            ).returncode
            == 0
        ):
            return name
        for old in self._tell("images", "--quiet", "--filter", f"reference=localhost/debian-{suite}").split():
            self._tell("rmi", "--force", old)
        archive = self._work / f"{suite}.tar"
        command = ["mmdebstrap", "--quiet", "--variant=minbase", "--include=usr-is-merged"]
        command += [f"--dpkgopt=path-exclude=/usr/share/{each}/*" for each in _SLIM]
        command += [
            "--dpkgopt=path-include=/usr/share/doc/*/copyright",
            "--dpkgopt=force-unsafe-io",
            suite,
            str(archive),
        ]
        _run([*command, *filter(None, [os.environ.get("DEBIAN_MIRROR")])])
        container = self._tell("from", "scratch")
        self._tell("add", "--quiet", container, str(archive), "/")
        self._tell("commit", "--quiet", "--rm", container, name)
        archive.unlink()
        return name

    def _wheels(self, python: str, machine: str) -> Path:
        """Every package that the recipe installs, for that Python on that machine, by this machine's own pip."""
        locks = [ROOT / "requirements.lock", ROOT / "requirements-build.lock"]
        digest = hashlib.sha256(b"".join(lock.read_bytes() for lock in locks)).hexdigest()[:16]
        place = self._keep / f"wheels-{python}-{machine}-{digest}"
        if not place.is_dir():
            for old in self._keep.glob(f"wheels-{python}-{machine}-*"):
                shutil.rmtree(old)
            fetched = self._work / place.name
            command = [
                str(ROOT / ".venv/bin/python"),
                "-m",
                "pip",
                "download",
                "--quiet",
                "--require-hashes",
                "--no-deps",
            ]
            command += [
                "--only-binary=:all:",
                f"--python-version={python}",
                "--implementation=cp",
                "--dest",
                str(fetched),
            ]
            command += [f"--platform={each}_{machine}" for each in _PLATFORMS]
            _run([*command, *(f"--requirement={lock}" for lock in locks)])
            shutil.move(fetched, place)
        return place

    # -- buildah --------------------------------------------------------------------------------------

    @property
    def _buildah(self) -> list[str]:
        return ["buildah", "--root", str(self._keep / "store"), "--runroot", str(self._work / "runroot")]

    def _tell(self, *arguments: str) -> str:
        return _run([*self._buildah, *arguments])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-6000:]}"
    return done.stdout.strip()
