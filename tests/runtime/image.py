"""Builds the image as its page says, by `make image`, with a real builder, buildah, in a fresh Debian.

No registry has to be within reach: the image's Debian is bootstrapped here, without the files that slim images leave
out, and pip finds its wheels in a directory. Layers are kept for a week in /var/cache/resolver-image (IMAGE_CACHE): a
second build takes seconds.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from tests.programs import completed
from tests.runtime.debian import bootstrap

ROOT: Final = Path(__file__).parent.parent.parent
KEEP: Final = Path(os.environ.get("IMAGE_CACHE", "/var/cache/resolver-image"))
#: Debian's and images' names of architectures, by the kernel's name.
ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
#: Debian releases with a usable bcc and Python, and that Python's version.
SUITES: Final = {"trixie": "3.13", "bookworm": "3.11"}
#: Files that Debian's slim images exclude (by the same lines).
_SLIM: Final = ("doc", "info", "linda", "lintian", "locale", "man")
_PLATFORMS: Final = ("manylinux2014", "manylinux_2_17", "manylinux_2_28", "manylinux_2_34")
#: An empty directory of every Debian: a bind mount there leaves nothing behind in a layer.
_WHEELS_INSIDE: Final = "/srv"


class Image(NamedTuple):
    """An image. ``root`` is its file system, mounted until the builder ends; ``config`` is its OCI configuration."""

    root: Path
    config: dict[str, Any]
    environment: dict[str, str]


class Builder:
    """An image builder. ``with`` waits for another builder on this machine, and unmounts everything at its end."""

    def __init__(self, work: Path) -> None:
        """``work`` holds the builder's state that may not outlive a boot; it ends with the test."""
        self._work = work
        self._store = KEEP / time.strftime("store-%G-%V")
        KEEP.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        self._lock = os.open(KEEP / "lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        for store in {self._store, *KEEP.glob("store-*")}:
            self._tell("rm", "--all", store=store)  # of a run that was killed
            if store != self._store:
                shutil.rmtree(store)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(AssertionError):
            self._tell("rm", "--all")
        os.close(self._lock)

    def build(
        self,
        suite: str = "trixie",
        machine: str = os.uname().machine,
        *,
        with_bpf: bool = True,
        revision: str = "unknown",
    ) -> Image:
        """Build this checkout's image on that Debian, for that machine."""
        name = f"localhost/resolver-{suite}-{machine}:{'bpf' if with_bpf else 'without-bpf'}"
        settings_of_make = {
            "ENGINE": self.engine,
            "IMAGE": name,
            "REVISION": revision,
            "WITH_BPF": str(int(with_bpf)),
            "ARGS": " ".join(self.options(suite, machine)),
        }
        _run(["make", "-C", str(ROOT), "image", *(f"{key}={text}" for key, text in settings_of_make.items())])
        described = json.loads(self._tell("inspect", "--type", "image", name))["OCIv1"]
        config = described["config"] | {key: described[key] for key in ("architecture", "os", "history")}
        environment = dict(entry.split("=", 1) for entry in config["Env"])
        container = self._tell("from", "--pull=never", f"--arch={ARCHITECTURES[machine]}", name)
        return Image(Path(self._tell("mount", container)), config, environment)

    @property
    def engine(self) -> str:
        """The builder with its own store, as ``make image`` takes it."""
        return " ".join(self._buildah(self._store))

    def options(self, suite: str = "trixie", machine: str = os.uname().machine) -> list[str]:
        """Return options by which a build asks no registry: an own base, and wheels from a directory."""
        settings = self._work / "pip.conf"
        settings.write_text(f"[global]\nno-index = true\nfind-links = {_WHEELS_INSIDE}\n")
        options = ["--isolation=chroot", "--pull=never", "--layers", f"--arch={ARCHITECTURES[machine]}"]
        options += [f"--build-arg=BASE={self._base(suite, machine)}", f"--secret=id=pip,src={settings}"]
        return [*options, f"--volume={self.wheels(SUITES[suite], machine)}:{_WHEELS_INSIDE}:ro"]

    def wheels(self, python: str, machine: str) -> Path:
        """Return a directory of the recipe's packages, fetched by this machine's pip for that Python and machine."""
        locks = [ROOT / "requirements-kubernetes.lock", ROOT / "requirements-build.lock"]
        digest = hashlib.sha256(b"".join(lock.read_bytes() for lock in locks)).hexdigest()[:16]
        place = KEEP / f"wheels-{python}-{machine}-{digest}"
        if not place.is_dir():
            for old in KEEP.glob(f"wheels-{python}-{machine}-*"):
                shutil.rmtree(old)
            fetched = place.with_name(f"{place.name}.new")
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(fetched)]
            command += ["--require-hashes", "--no-deps", "--only-binary=:all:"]
            command += [f"--python-version={python}", "--implementation=cp"]
            command += [f"--platform={each}_{machine}" for each in _PLATFORMS]
            _run([*command, *(f"--requirement={lock}" for lock in locks)])
            fetched.rename(place)
        return place

    def _base(self, suite: str, machine: str) -> str:
        architecture = ARCHITECTURES[machine]
        name = f"localhost/debian-{suite}:{architecture}"
        if name in self._tell("images", "--format", "{{.Name}}:{{.Tag}}").split():
            return name
        archive = self._work / f"{suite}.tar"
        without = [f"--dpkgopt=path-exclude=/usr/share/{each}/*" for each in _SLIM]
        without.append("--dpkgopt=path-include=/usr/share/doc/*/copyright")
        bootstrap(suite, archive, "--skip=check/qemu", f"--architectures={architecture}", *without)
        container = self._tell("from", f"--arch={architecture}", "scratch")
        self._tell("config", f"--arch={architecture}", container)
        self._tell("add", "--quiet", container, str(archive), "/")
        self._tell("commit", "--quiet", "--rm", container, name)
        archive.unlink()
        return name

    def _buildah(self, store: Path) -> list[str]:
        return ["buildah", f"--root={store}", f"--runroot={self._work / 'runroot'}"]

    def _tell(self, *arguments: str, store: Path | None = None) -> str:
        return _run([*self._buildah(store or self._store), *arguments])


def _run(command: list[str]) -> str:
    done = completed(*command)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-6000:]}"
    return done.stdout.strip()
