"""The Debian package's own scripts, run in a mount namespace with an empty /run."""

import os
from pathlib import Path

import pytest

from tests.manifests import ROOT
from tests.programs import completed, script


def stand_ins(place: Path, **codes: int) -> dict[str, str]:
    """Return an environment with fake programs, each of which only exits with its code."""
    for name, code in codes.items():
        script(place / name.replace("_", "-"), f"exit {code}")
    return os.environ | {"PATH": f"{place}:{os.environ['PATH']}"}


@pytest.mark.parametrize("before", ["", "0.0.1"])
def test_package_of_a_failing_daemon_installs_with_a_message(tmp_path: Path, before: str) -> None:
    helpers = {"python3": 0, "systemd_sysusers": 0, "deb_systemd_helper": 0, "systemctl": 0}
    environment = stand_ins(tmp_path, **helpers, deb_systemd_invoke=1)
    commands = (
        f"mount -t tmpfs none /run; mkdir -p /run/systemd/system; sh {ROOT}/deploy/debian/postinst configure "
    )
    command = ["unshare", "--mount", "--propagation", "private", "bash", "-ec", commands + before]
    done = completed(*command, env=environment)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "", 1)
    assert "is installed, but its daemon does not start yet: `resolver doctor` says why" in done.stderr


@pytest.mark.parametrize(
    ("begin", "left"),
    [
        (":", []),
        ("mkdir /run/hami/other", ["hami", "hami/other"]),
        ("exec 9</run/resolver/lock; flock 9", ["resolver", "resolver/lock", "resolver/tenant"]),
    ],
)
@pytest.mark.parametrize("argument", ["remove", "purge"])
def test_purge_removes_the_daemons_files(tmp_path: Path, argument: str, begin: str, left: list[str]) -> None:
    """Purge keeps another program's directory, and all files while another daemon holds the lock."""
    environment = stand_ins(tmp_path, deb_systemd_helper=0, getent=2, systemctl=0)
    commands = f"""
        mount -t tmpfs none /etc/systemd/system
        mount -t tmpfs none /run
        rm -rf /run/*
        mkdir -p /run/resolver/tenant /run/hami/hostpid
        touch /run/resolver/lock
        {begin}
        sh {ROOT}/deploy/debian/postrm {argument} >&2
        cd /run && find . -mindepth 1 -printf '%P\\n'
    """
    done = completed(
        "unshare", "--mount", "--propagation", "private", "bash", "-ec", commands, env=environment, check=True
    )
    assert sorted(done.stdout.split()) == left
