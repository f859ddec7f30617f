"""`make package-check`: the Debian package, installed, started under systemd and removed, in bare Debians.

    make package-check                       Debian 12 and 13
    make package-check ARGS=bookworm         one of them

A bare Debian is what mmdebstrap makes, with what the package depends on and nothing else; it is kept for a week, as the
image's is (IMAGE_CACHE). It runs in a mount namespace and a cgroup of its own. systemd is its own, as root, in the form
for one user, which need not be the first process: the daemon has to be in the host's PID namespace. Exit status: 1 if
anything is wrong.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from resolver.cli import COMMANDS
from tests.kernel.conftest import until
from tests.runtime.image import KEEP, ROOT, SUITES
from tests.runtime.runc import remove_cgroups
from tests.runtime.systemd import UNIT, cgroup2

#: What any installation of any package changes: dpkg's and ldconfig's own notes, backups, logs.
_NOISE: Final = re.compile(
    r"/(var/lib/dpkg|var/log|var/cache|var/lib/apt|tmp|run|proc|sys|dev)(/.*)?|/etc/(group|gshadow|passwd|shadow)-"
    r"|/etc/\.pwd\.lock|/etc/systemd/system(/multi-user\.target\.wants)?"
)
_PLAIN_MANAGER: Final = 252  # Debian 12's
_BASH: Final = "/usr/share/bash-completion/completions/resolver"


def main() -> int:
    """Runs it all."""
    with tempfile.TemporaryDirectory(prefix="package-check-") as work:
        package = _built(Path(work))
        for suite in sys.argv[1:] or list(SUITES):
            began = time.monotonic()
            with tempfile.TemporaryDirectory(prefix=f"{suite}-", dir=work) as root:
                check(package, suite, Path(root))
            print(
                f"{suite}: installed, started, stopped, removed ({time.monotonic() - began:.0f} s)",
                flush=True,
            )
    return 0


def check(package: Path, suite: str, root: Path) -> None:
    """The whole life of the package in one Debian. Raises AssertionError."""
    subprocess.run(["tar", "-xf", str(_bare(package, suite)), "-C", str(root)], check=True)
    shutil.copy(package, root / "srv")
    before = dict(_files(root))
    _in(root, "dpkg", "-i", f"/srv/{package.name}")
    _in(root, "systemd-analyze", "verify", "--man=no", f"/usr/lib/systemd/system/{UNIT}")
    assert (root / "etc/systemd/system/multi-user.target.wants" / UNIT).is_symlink()
    version = _in(root, "dpkg-query", "--show", "--showformat=${Version}", "hami-resolver")
    assert _in(root, "resolver", "--version").split() == ["resolver", version]
    completion = (root / _BASH.lstrip("/")).read_text()
    for command in COMMANDS:
        assert f"_shtab_resolver_{command.replace('-', '_')}_" in completion, command
        assert (root / f"usr/share/man/man1/resolver-{command}.1.gz").exists()
        assert _in(root, "resolver", command, "--help").startswith(f"usage: resolver {command} ")
    assert _in(root, "kubectl-resolver", "--help").startswith("usage: kubectl resolver")
    _in(root, "getent", "group", "resolver")
    _started(root)
    _in(root, "dpkg", "--purge", "hami-resolver")
    after = dict(_files(root))
    left = {path: (before.get(path), after.get(path)) for path in before.keys() | after.keys()}
    left = {path: each for path, each in left.items() if each[0] != each[1]}
    assert left == {}, f"{suite}: not as before: {left}"


def _built(work: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", work],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    (wheel,) = work.glob("*.whl")
    told = subprocess.check_output([sys.executable, ROOT / "scripts/deb.py", wheel, work], text=True)
    return Path(told.strip())


def _bare(package: Path, suite: str) -> Path:
    """An archive of the Debian, with what the package depends on."""
    depends = subprocess.check_output(["dpkg-deb", "--field", package, "Depends"], text=True)
    names = sorted({re.split(r"[ (]", each.strip())[0] for each in depends.split(",")})
    kept = (
        KEEP
        / f"package-{suite}-{time.strftime('%G-%V')}-{hashlib.sha256(depends.encode()).hexdigest()[:8]}.tar"
    )
    if not kept.exists():
        KEEP.mkdir(parents=True, exist_ok=True)
        for old in KEEP.glob(f"package-{suite}-*"):
            old.unlink()
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(names)}"]
        command += ["--dpkgopt=force-unsafe-io"]
        if suite == "bookworm":
            command.append("--hook-dir=/usr/share/mmdebstrap/hooks/maybe-merged-usr")
        command += [suite, f"{kept}.new.tar", *filter(None, [os.environ.get("DEBIAN_MIRROR")])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        os.rename(f"{kept}.new.tar", kept)
    return kept


def _in(root: Path, *command: str) -> str:
    """What a command prints in that Debian, with its own /proc, /dev and /run."""
    script = (
        f"mount -t proc proc {root}/proc; mount --rbind /dev {root}/dev; mount -t tmpfs run {root}/run;"
        f'exec chroot {root} "$@"'
    )
    isolated = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script, "sh", *command]
    plain = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C.UTF-8",
        "DEBIAN_FRONTEND": "noninteractive",
    }
    done = subprocess.run(isolated, env=plain, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def _started(root: Path) -> None:
    """The unit runs, by the package's own file, answers, and ends."""
    group = cgroup2() / f"package-{os.getpid()}"
    group.mkdir()
    units = root / "run-units"
    units.mkdir()
    unit = (root / "usr/lib/systemd/system" / UNIT).read_text()
    (units / UNIT).write_text(unit)
    # Since 253, or so, a manager for one user puts what it shuts off from files into a user namespace, root's as well;
    # a daemon sees nobody from there. The system's manager does not, and on that of this machine test_systemd.py has
    # the whole unit.
    if int(_in(root, "systemctl", "--version").split()[1]) > _PLAIN_MANAGER:
        beside = units / f"{UNIT}.d"
        beside.mkdir()
        off = "".join(f"{name}=no\n" for name in re.findall(r"(?m)^(Protect\w+|Private\w+)=", unit))
        (beside / "check.conf").write_text(f"[Service]\n{off}ReadWritePaths=\n")
    for name in ("basic.target", "shutdown.target", "multi-user.target"):
        (units / name).write_text("[Unit]\nDefaultDependencies=no\n")
    script = f"""
        echo $$ >{group}/cgroup.procs
        mount --bind {root} {root}
        mount -t proc proc {root}/proc; mount --rbind /dev {root}/dev; mount --rbind /sys {root}/sys
        mount -t tmpfs run {root}/run; mkdir -p {root}/run/systemd/system
        mountpoint -q {root}/sys/fs/cgroup/cgroup.procs || mount -t cgroup2 none {root}/sys/fs/cgroup
        chroot {root} systemd-tmpfiles --create hami-resolver.conf
        cd {root} && pivot_root . mnt && umount -l /mnt
        exec /lib/systemd/systemd --user --unit={UNIT} --log-target=null
    """
    plain = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "XDG_RUNTIME_DIR": "/run",
        "SYSTEMD_UNIT_PATH": "/run-units",
    }
    isolated = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script]
    manager = subprocess.Popen(isolated, env=plain, stderr=subprocess.DEVNULL)

    def inside(*command: str) -> str:
        enter = ["nsenter", "--mount", "--target", str(manager.pid), *command]
        done = subprocess.run(enter, env=plain, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def shown(name: str) -> str:
        return inside("systemctl", "--user", "show", "--property", name, "--value", UNIT)

    try:
        until(lambda: shown("ActiveState") == "active", f"the unit in {root.name}")
        until(lambda: inside("resolver", "status", "--json").startswith("{"), f"an answer in {root.name}")
        assert inside("stat", "--format=%G %a", "/run/resolver/resolver.sock") == "resolver 660"
        assert shown("StatusText").startswith("source ")
        assert "no container here is called 'nobody'" in inside("sh", "-c", "resolver explain nobody 2>&1")
        inside("resolver", "bundle", "--redact", "-o", "/srv/bundle.tar.gz")
        bundle = inside("tar", "-tzf", "/srv/bundle.tar.gz").split()
        assert {name.partition("/")[2] for name in bundle} >= {"doctor.json", "status.json", "versions.json"}
        inside("rm", "/srv/bundle.tar.gz")
        inside("systemctl", "--user", "stop", UNIT)
        assert (shown("ExecMainStatus"), shown("Result")) == ("0", "success")
    finally:
        for line in [*(group / "cgroup.procs").read_text().split(), *_below(group)]:
            os.kill(int(line), 9)
        manager.wait()
        remove_cgroups(group)
        shutil.rmtree(units)


def _below(group: Path) -> Iterator[str]:
    for procs in group.rglob("*/cgroup.procs"):
        yield from procs.read_text().split()


def _files(root: Path) -> Iterator[tuple[str, str]]:
    """Everything that counts: mode, owner and content by path."""
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(directory, name)
            inside = "/" + str(path.relative_to(root))
            if _NOISE.fullmatch(inside):
                continue
            info = path.lstat()
            what = os.readlink(path) if path.is_symlink() else ""
            if stat.S_ISREG(info.st_mode):
                what = hashlib.sha256(path.read_bytes()).hexdigest()
            yield inside, f"{info.st_mode:o} {info.st_uid} {info.st_gid} {what}"


if __name__ == "__main__":
    sys.exit(main())
