"""The guest's disks, made of Debian packages without their scripts.

The root file system is packages unpacked, and Python wheels for the guest's Python and machine, whatever this
machine's are. It is made once for each release, machine and set of packages, and kept. The checkout is another disk.
"""

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.programs import completed
from tests.vm.packages import Apt, Unavailable

ROOT: Final = Path(__file__).parent.parent.parent
#: Where the guest has the checkout, and its Python packages.
CHECKOUT, VENV = "/resolver", "/venv"
#: The Python of each release that is used as a userspace.
PYTHON: Final = {"bookworm": "3.11", "trixie": "3.13"}
#: Needs of the loader, the daemon, the demo and the tests; apt adds dependencies.
PACKAGES: Final = (
    *("python3", "python3-bpfcc", "gcc", "libc6-dev", "libatomic1"),
    *("mount", "procps", "iproute2"),
)
_WHEELS: Final = ("pytest", "pytest-timeout", "iniconfig", "pluggy", "packaging", "pygments")
_GLIBCS: Final = ("2_28", "2_17", "2_12", "2_5")
_FORMAT: Final = 2  # raise it when a root is put together differently


def root_image(
    cache: Path, apt: Apt, suite: str, arch: str, extra: tuple[str, ...], say: Callable[[str], None]
) -> Path:
    """The root file system's image, made if it is not there yet. Raises `Unavailable`."""
    names = sorted({*PACKAGES, *extra})
    apt.update()
    wanted = apt.wanted("?essential", *names)
    requirements = _requirements()
    key = f"{_FORMAT} {[package.file for package in wanted]} {requirements}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    image = cache / f"root-{suite}-{arch}-{digest}.img"
    with (cache / f"root-{suite}-{arch}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not image.exists():
            size = sum(package.size for package in wanted) >> 20
            say(f"root file system of {suite}, {arch}: {len(wanted)} packages, {size} MiB")
            debs = apt.fetch(wanted)
            with tempfile.TemporaryDirectory(dir=cache) as place:
                tree = Path(place, "root")
                _unpack(tree, debs)
                _configure(tree)
                _install_wheels(tree, requirements, PYTHON[suite], arch)
                _compile(tree, arch)
                write_image(tree, image, spare_mib=600)
    return image


def write_image(tree: Path, image: Path, *, spare_mib: int) -> None:
    """Write an ext4 file system with this directory; it gets its name once it is complete."""
    used = int(completed("du", "-sm", tree, check=True).stdout.split()[0])
    new = image.with_name(image.name + ".new")
    new.unlink(missing_ok=True)
    options = "-q -t ext4 -O ^has_journal,^metadata_csum -m 0 -E root_owner=0:0"
    command = ("mke2fs", *options.split())
    subprocess.run(
        (*command, "-d", tree, new, f"{used * 11 // 10 + spare_mib}M"), check=True, capture_output=True
    )
    new.rename(image)


def checkout_image(place: Path, root: Path, arch: str, *, programs: bool) -> Path:
    """Write a file system with git's working tree, uncommitted files included.

    Its Python is compiled there, and with ``programs`` the stand-ins' C parts, by that root's own Python and compiler
    where they run here: every emulated guest would take minutes for it. Where that fails, they do it for themselves.
    """
    image = place / f"checkout-{root.stem}.img"
    if image.exists():
        return image
    tree = place / "checkout"
    listed = subprocess.run(
        ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"),
        cwd=ROOT, capture_output=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.decode().split("\0"):
        source = ROOT / name
        if name and source.is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, tree / name, follow_symlinks=False)
    (tree / ".venv").symlink_to(VENV)
    if os.geteuid() == 0 and arch == platform.machine():
        _build(place, tree, root, programs=programs)
    write_image(tree, image, spare_mib=200)
    shutil.rmtree(tree)
    return image


#: In a private mount namespace: mount the image, run a command in its tree.
_INSIDE: Final = """
set -e
mount -o loop,ro "$1" "$2"
mount --bind "$3" "$2$4"
mount -t tmpfs tmp "$2/tmp"
mount --bind /dev "$2/dev"
cd /
exec chroot "$2" /usr/bin/env -i PATH=/usr/bin XDG_CACHE_HOME="$4/.cache" sh -c "cd $4 && $5"
"""


def _build(place: Path, tree: Path, root: Path, *, programs: bool) -> None:
    mount = place / "mount"
    mount.mkdir(exist_ok=True)
    words = f"{VENV}/bin/python -m compileall -q resolver bpf tests"
    if programs:
        words += f" && {VENV}/bin/python -c 'from tests.fakes.build import build; build()'"
    command = ("unshare", "--mount", "--propagation", "private", "sh", "-c", _INSIDE, "sh")
    subprocess.run((*command, root, mount, tree, CHECKOUT, words), check=False, capture_output=True)


def _unpack(tree: Path, debs: list[Path]) -> None:
    for name in ("bin", "sbin", "lib", "lib64"):
        (tree / "usr" / name).mkdir(parents=True)
        (tree / name).symlink_to(f"usr/{name}")
    for deb in debs:
        unpack_deb(deb, tree)


def unpack_deb(deb: Path, tree: Path) -> None:
    """A package's files. Raises `Unavailable` when it is no package."""
    tree.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(("dpkg-deb", "--fsys-tarfile", deb), stdout=subprocess.PIPE) as reader:
        tar = ("tar", "-x", "--keep-directory-symlink", "--no-same-owner", "-C", tree)
        done = completed(*tar, stdin=reader.stdout)
    if reader.returncode or done.returncode:
        raise Unavailable(f"{deb} could not be unpacked: {done.stderr.strip()[-200:]}")


def _configure(tree: Path) -> None:
    """Do the needed part of the packages' own scripts."""
    for name in ("passwd", "group"):
        shutil.copy(tree / "usr/share/base-passwd" / f"{name}.master", tree / "etc" / name)
    (tree / "etc/hostname").write_text("guest\n")
    (tree / "etc/hosts").write_text("127.0.0.1 localhost guest\n")
    for name, target in (("cc", "gcc"), ("awk", "mawk")):
        if not (tree / "usr/bin" / name).exists() and (tree / "usr/bin" / target).exists():
            (tree / "usr/bin" / name).symlink_to(target)
    for name in ("proc", "sys", "dev", "run", "tmp", "root", CHECKOUT[1:]):
        (tree / name).mkdir(exist_ok=True)
    for bulk in ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache"):
        shutil.rmtree(tree / bulk, ignore_errors=True)


def _requirements() -> str:
    """Return the requirements of the daemon and its tests, out of the lock file for development."""
    daemon = re.findall(r"^([a-zA-Z0-9._-]+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    stanzas = re.split(r"\n(?=[a-zA-Z0-9._-]+==)", (ROOT / "requirements-dev.lock").read_text())
    return "\n".join(text for text in stanzas if text.split("==")[0] in {*daemon, *_WHEELS}) + "\n"


def _install_wheels(tree: Path, requirements: str, python: str, arch: str) -> None:
    """A virtual environment as ``venv`` would make it, with wheels for the guest's Python and machine."""
    venv = tree / VENV[1:]
    packages = venv / f"lib/python{python}/site-packages"
    packages.mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "bin/python").symlink_to("/usr/bin/python3")
    (venv / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(requirements)
        file.flush()
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
        command += ["--target", str(packages)]
        command += [word for glibc in _GLIBCS for word in ("--platform", f"manylinux_{glibc}_{arch}")]
        command += ["--platform", f"manylinux2014_{arch}", "--implementation", "cp"]
        command += ["--python-version", python]
        command += ["--only-binary", ":all:", "--no-deps", "--no-compile", "--require-hashes"]
        command += ["-r", file.name]
        done = completed(*command)
    if done.returncode != 0:
        raise Unavailable(
            f"pip could not fetch the wheels for Python {python} on {arch}: {done.stderr[-500:]}"
        )
    (packages / "checkout.pth").write_text(CHECKOUT + "\n")


def _compile(tree: Path, arch: str) -> None:
    """Compile its Python beforehand, where its own Python runs here: every guest would do it anew, slowly."""
    if os.geteuid() == 0 and arch == platform.machine():
        places = ("/usr/lib/python3", VENV, *(f"/usr/lib/python{python}" for python in PYTHON.values()))
        inside = [place for place in places if (tree / place[1:]).exists()]
        command = ("chroot", str(tree), "/usr/bin/python3", "-m", "compileall", "-q", *inside)
        subprocess.run(command, check=False, capture_output=True)
