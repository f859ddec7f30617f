"""A Debian with every engine in it, in the cache: this machine gets no package, no service and no setting of theirs."""

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from tests.runtime.debian import bootstrap

#: The releases that this was tried with.
SUITES: Final = ("bookworm", "trixie")
#: Packages with a version in the table, and their dependencies.
ENGINES: Final = ("containerd", "docker.io", "podman", "crun", "runc", "runsc", "lxc", "systemd-container")
_BESIDE: Final = ("busybox-static", "uidmap", "btrfs-progs", "iproute2", "python3-grpcio")
#: In Debian 13 these are packages of their own.
_SPLIT: Final = {"trixie": ("docker-cli",)}


def root(suite: str) -> Path:
    packages = (*ENGINES, *_BESIDE, *_SPLIT.get(suite, ()))
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "resolver-engines"
    base.mkdir(parents=True, exist_ok=True)
    place = base / f"{suite}-{hashlib.sha256(' '.join(packages).encode()).hexdigest()[:12]}"
    with (base / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            for old in base.glob(f"{suite}-*"):
                shutil.rmtree(old)
            fresh = base / f"{suite}-new"
            without = [f"--dpkgopt=path-exclude=/usr/share/{each}/*" for each in ("doc", "man", "locale")]
            bootstrap(suite, fresh, "--format=directory", *without, packages=packages)
            fresh.rename(place)
    return place


def versions(place: Path) -> dict[str, str]:
    command = ["chroot", str(place), "dpkg-query", "--show", *ENGINES]
    lines = subprocess.check_output(command, text=True).splitlines()
    return dict(line.split("\t") for line in lines)
