"""A Debian with every engine in it, in the cache: this machine gets no package, no service and no setting of theirs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

#: The releases that this was tried with.
SUITES: Final = ("bookworm", "trixie")
#: What the table tells the version of, and what the engines and the tests take beside it.
ENGINES: Final = ("containerd", "docker.io", "podman", "crun", "runc", "runsc", "lxc")
_BESIDE: Final = ("busybox-static", "uidmap", "btrfs-progs", "iproute2", "python3-grpcio")
#: In Debian 13 these are packages of their own.
_SPLIT: Final = {"trixie": ("docker-cli",)}


class Missing(Exception):
    """What this machine lacks: a sentence."""


def root(suite: str) -> Path:
    """The directory with the Debian, made if it is not there yet (a minute). Raises `Missing`."""
    packages = (*ENGINES, *_BESIDE, *_SPLIT.get(suite, ()))
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "resolver-engines"
    base.mkdir(parents=True, exist_ok=True)
    place = base / f"{suite}-{hashlib.sha256(' '.join(packages).encode()).hexdigest()[:12]}"
    with (base / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            for old in base.glob(f"{suite}-*"):
                shutil.rmtree(old)
            _make(suite, packages, fresh := base / f"{suite}-new")
            fresh.rename(place)
    return place


def versions(place: Path) -> dict[str, str]:
    """The version of each engine's package."""
    command = ["chroot", str(place), "dpkg-query", "--show", *ENGINES]
    lines = subprocess.check_output(command, text=True).splitlines()
    return dict(line.split("\t") for line in lines)


def _make(suite: str, packages: tuple[str, ...], place: Path) -> None:
    if shutil.which("mmdebstrap") is None:
        raise Missing("mmdebstrap is not there: run `make setup-dev` as root")
    command = ["mmdebstrap", "--quiet", "--variant=minbase", "--format=directory"]
    command += [f"--include={','.join(packages)}", '--aptopt=APT::Install-Recommends "false"']
    command += ["--dpkgopt=force-unsafe-io"]
    command += [f"--dpkgopt=path-exclude=/usr/share/{each}/*" for each in ("doc", "man", "locale")]
    if suite == "bookworm":  # otherwise /usr is merged by a package that brings the whole of Perl
        command.append("--hook-dir=/usr/share/mmdebstrap/hooks/maybe-merged-usr")
    command += [suite, str(place), *filter(None, [os.environ.get("DEBIAN_MIRROR")])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Missing(f"mmdebstrap could not make a Debian {suite}: {done.stderr.strip()[-1500:]}")
