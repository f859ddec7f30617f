"""Minimal Debians by mmdebstrap, from DEBIAN_MIRROR or Debian's own."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from tests.programs import completed


class Missing(Exception):
    """What this machine lacks: a sentence."""


def bootstrap(suite: str, target: Path, *options: str, packages: Iterable[str] = ()) -> None:
    """Make a Debian, as a directory or an archive by the target's name. Raises `Missing`."""
    if shutil.which("mmdebstrap") is None:
        raise Missing("mmdebstrap is not there: run `make setup-dev` as root")
    command = ["mmdebstrap", "--quiet", "--variant=minbase", "--dpkgopt=force-unsafe-io", *options]
    command += [f"--include={each}" for each in packages]
    command += ['--aptopt=APT::Install-Recommends "false"']
    command += ['--aptopt=Acquire::Check-Valid-Until "false"']  # a mirror may stand still
    if suite == "bookworm":  # otherwise /usr is merged by a package that brings the whole of Perl
        command.append("--hook-dir=/usr/share/mmdebstrap/hooks/maybe-merged-usr")
    command += [suite, str(target), *filter(None, [os.environ.get("DEBIAN_MIRROR")])]
    done = completed(*command)
    if done.returncode != 0:
        raise Missing(f"mmdebstrap could not make a Debian {suite}: {done.stderr.strip()[-4000:]}")
