"""The Debian package's own scripts, run in a mount namespace with an empty /run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.manifests import ROOT


@pytest.mark.parametrize(
    ("begin", "left"),
    [
        (":", []),
        ("mkdir /run/hami/other", ["hami", "hami/other"]),
        ("exec 9</run/resolver/lock; flock 9", ["resolver", "resolver/bpf-program", "resolver/lock"]),
    ],
)
@pytest.mark.parametrize("argument", ["remove", "purge"])
def test_what_the_daemon_left_goes_with_the_package(
    tmp_path: Path, argument: str, begin: str, left: list[str]
) -> None:
    """But not what others use: another daemon that holds the lock, another program's directory."""
    for name, code in (("deb-systemd-helper", 0), ("getent", 2), ("systemctl", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    script = f"""
        mount -t tmpfs none /etc/systemd/system
        mount -t tmpfs none /run
        rm -rf /run/*
        mkdir -p /run/resolver /run/hami/hostpid
        touch /run/resolver/lock /run/resolver/bpf-program
        {begin}
        sh {ROOT}/deploy/debian/postrm {argument} >&2
        cd /run && find . -mindepth 1 -printf '%P\\n'
    """
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "bash", "-ec", script],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.split()) == left
