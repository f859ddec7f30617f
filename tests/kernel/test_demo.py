"""`make demo` shows repairs from end to end, and must be able to fail."""

import re
import shlex
import sys
import tempfile
from pathlib import Path

import pytest

from resolver.base.reasons import RepairReason
from tests.fakes.node import Node
from tests.kernel.rights import UNPRIVILEGED, without
from tests.programs import completed

DEMO = (sys.executable, "-m", "tests.fakes.demo")


def test_demo_ends_with_right_values(root: Path) -> None:
    done = completed(*DEMO, cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every value is right" in done.stdout
    words = ("zeroed", "resolver lookup", "570.86.15", "of 6 placements", "Without HAMi", *RepairReason)
    assert [word for word in words if word not in done.stdout] == []
    for who in ("HAMi", "Volcano", "Koordinator", "KAI", "DRA claim", "bare /tmp"):
        rows = [line for line in done.stdout.splitlines() if re.match(rf"\w+ +{who} +v", line)]
        assert rows
        assert all(row.endswith(" ok") for row in rows)
    assert "\x1b" not in done.stdout, "a pipe gets plain text"


def test_help_is_shown_without_a_node(root: Path) -> None:
    done = completed(*DEMO, "--help", cwd=root)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Options go to `resolver run`" in done.stdout
    assert "Every value" not in done.stdout


def test_demo_fails_if_the_daemon_repairs_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as short:  # a socket's path may have 107 bytes only
        monkeypatch.setenv("TMPDIR", short)
        done = completed(*DEMO, "--dry-run", cwd=root)
        assert done.returncode == 1, done.stdout + done.stderr
        (log,) = Path(short).glob("resolver-demo-*.log")
        assert f"The daemon's log is in {log}." in done.stdout
        assert '"event": "would_repair"' in log.read_text()
    assert "WRONG: train, pid 2: hostpid is 2, must be" in done.stdout
    assert "Not every value is right" in done.stderr


#: Commands that take a need of the demo away, and words of its message.
WITHOUT: dict[str, tuple[str, tuple[str, ...]]] = {
    "the host's PIDs": (
        "unshare --pid --fork --mount-proc {demo}",
        ("a PID namespace of its own", "docker run --privileged --pid=host"),
    ),
    "SYS_ADMIN": (
        f"{shlex.join(without('SYS_ADMIN'))} {{demo}}",
        ("PID namespaces can't be made", "CAP_SYS_ADMIN is missing", "docker run --privileged"),
    ),
    "SYS_PTRACE": (
        f"{shlex.join(without('SYS_PTRACE'))} {{demo}}",
        ("CAP_SYS_PTRACE is missing",),
    ),
    "a root that is a mount point": ("{chroot} {demo}", ("a plain chroot", "mount --bind DIR DIR")),
    "root": (f"{shlex.join(UNPRIVILEGED)} {{demo}}", ("sudo make demo",)),
}
#: Mounts everything in the root directory below another one, which is no mount point, and enters that by chroot.
CHROOT = """
for each in /*; do
    if [ -L "$each" ]; then cp -d "$each" "$1/"
    elif [ -d "$each" ]; then mkdir -p "$1$each" && mount --rbind "$each" "$1$each"
    fi
done
root=$1; shift
exec chroot "$root" sh -c 'cd "$0" && exec "$@"' "$PWD" "$@"
"""


def test_demo_in_a_chroot_leaves_out_two_placements(root: Path, tmp_path: Path) -> None:
    (tmp_path / "enter").write_text('mount --bind "$1" "$1"\n' + CHROOT)
    (tmp_path / "root").mkdir()
    done = completed("unshare", "--mount", "sh", f"{tmp_path}/enter", f"{tmp_path}/root", *DEMO, cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Below a chroot, the placements of KAI and without a scheduler can't be proven" in done.stdout
    assert "Every value is right" in done.stdout


@pytest.mark.parametrize("what", WITHOUT)
def test_demo_names_missing_right_and_remedy(root: Path, tmp_path: Path, what: str) -> None:
    (tmp_path / "enter").write_text(CHROOT)
    (tmp_path / "root").mkdir()
    command, words = WITHOUT[what]
    chroot = f"unshare --mount sh {tmp_path}/enter {tmp_path}/root"
    line = command.format(demo=shlex.join(DEMO), chroot=chroot)
    done = completed(*shlex.split(line), cwd=root)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "The demo cannot run here" in done.stderr
    for each in words:
        assert each in done.stderr
    assert "A GPU node in miniature" not in done.stdout, "it began although it can't"
    assert "container-init" not in done.stderr


def test_ended_node_leaves_nothing(tmp_path: Path) -> None:
    with Node(tmp_path, "550.54.15") as node:
        tenants = [node.container(pid_namespace=where).tenant() for where in ("own", "host")]
        tenants[1].fork()
        root = node.cgroups.root
    assert [t.host_pid for t in tenants if Path(f"/proc/{t.host_pid}").exists()] == []
    assert not root.exists()
    assert not node.containers_dir.exists()
