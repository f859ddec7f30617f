"""Builds the Debian package: the wheel, every package that it needs, the unit, the manual and completion.

    .venv/bin/python scripts/deb.py WHEEL [DIRECTORY]

One package serves every Python of `PYTHONS`: their wheels differ only in the names of compiled files, so they share one
directory, linked for each version. Debian's interpreter runs it, in a virtual environment that is part of the package.
Nothing is compiled, and only dpkg-deb is needed. The same checkout gives the same bytes (``SOURCE_DATE_EPOCH``).
"""

from __future__ import annotations

import gzip
import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from resolver.base.version import VERSION
from scripts.published import published

ROOT: Final = Path(__file__).resolve().parent.parent
PARTS: Final = ROOT / "deploy/debian"
#: From Debian 12's to sid's.
PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
HOME: Final = "usr/lib/hami-resolver"
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
_PLATFORMS: Final = ("manylinux2014", "manylinux_2_17", "manylinux_2_28", "manylinux_2_34")
_PROGRAM: Final = f"#!/{HOME}/bin/python\nfrom resolver.cli import main\n\nraise SystemExit(main())\n"
_ENVIRONMENT: Final = "home = /usr/bin\ninclude-system-site-packages = false\n"
#: Lines of the unit, and their replacements in the package.
_UNIT: Final = {
    "ExecStart=/opt/resolver/bin/resolver run": "ExecStart=/usr/bin/resolver run",
    # A member of the socket's group needs no right to give the socket to it.
    "NoNewPrivileges=yes": "NoNewPrivileges=yes\nSupplementaryGroups=resolver",
}


def build(wheel: Path, directory: Path) -> Path:
    """Write the package into the directory. Raises CalledProcessError, and ValueError for wheels that contradict."""
    architecture = _ARCHITECTURES[platform.machine()]
    package = directory / f"hami-resolver_{VERSION}_{architecture}.deb"
    directory.mkdir(parents=True, exist_ok=True)
    os.umask(0o022)  # the same modes on every machine
    with tempfile.TemporaryDirectory(prefix="deb-") as work:
        tree = Path(work) / "tree"
        library = tree / HOME / "lib/python3/site-packages"
        for file in (wheel, *(path for python in PYTHONS for path in _fetch(python, Path(work)))):
            _unpack(file, library)
        _environment(tree)
        _around(tree, wheel)
        _control(tree, architecture)
        command = ["dpkg-deb", "--root-owner-group", "-Zxz", "--build", str(tree), str(package)]
        environment = os.environ | {"SOURCE_DATE_EPOCH": _epoch()}  # no file's time is later
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return package


def _epoch() -> str:
    """Return the time of the last commit, in seconds since 1970."""
    git = ["git", "log", "-1", "--format=%ct"]
    return os.environ.get("SOURCE_DATE_EPOCH") or subprocess.check_output(git, cwd=ROOT, text=True).strip()


def _fetch(python: str, work: Path) -> list[Path]:
    place = work / f"wheels-{python}"
    command = [sys.executable, "-m", "pip", "download", "-qq", "--dest", str(place), "--no-deps"]
    command += ["--require-hashes", "--only-binary=:all:", f"--python-version={python}"]
    command += ["--implementation=cp", *(f"--platform={tag}_{platform.machine()}" for tag in _PLATFORMS)]
    subprocess.run([*command, f"--requirement={ROOT / 'requirements-kubernetes.lock'}"], check=True)
    return sorted(place.glob("*.whl"))


def _unpack(wheel: Path, library: Path) -> None:
    """Unpack its modules. Another Python's wheel brings the same files, except for its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith("/") or ".data/" in name:
                continue
            path, new = library / name, archive.read(name)
            own = re.search(r"\.dist-info/(RECORD|WHEEL)$", name)
            if path.exists() and path.read_bytes() != new and not own:
                raise ValueError(f"{wheel.name} has another {name} than the wheel for another Python")
            _put(path, new)


def _put(path: Path, data: str | bytes, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    path.chmod(mode)


def _link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def _environment(tree: Path) -> None:
    home = tree / HOME
    for python in PYTHONS:
        _link(home / f"lib/python{python}", "python3")
    _link(home / "bin/python", "/usr/bin/python3")
    _link(tree / "usr/bin/resolver", f"../{HOME.removeprefix('usr/')}/bin/resolver")
    _put(home / "pyvenv.cfg", _ENVIRONMENT)
    _put(home / "bin/resolver", _PROGRAM, 0o755)
    plugin = _PROGRAM.replace("resolver.cli", "resolver.kube.kubectl_plugin")
    _put(tree / "usr/bin/kubectl-resolver", plugin, 0o755)


def _around(tree: Path, wheel: Path) -> None:
    """Add unit, settings, group, manual, completion and Debian's metadata."""
    unit = (ROOT / "deploy/systemd/resolver.service").read_text()
    for before, after in _UNIT.items():
        if unit.count(before) != 1:
            raise ValueError(f"deploy/systemd/resolver.service has no line {before}")
        unit = unit.replace(before, after)
    _put(tree / "usr/lib/systemd/system/resolver.service", unit)
    _put(tree / "usr/lib/sysusers.d/hami-resolver.conf", (PARTS / "sysusers").read_bytes())
    _put(tree / "etc/default/resolver", (PARTS / "default").read_bytes())
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            _, shared, path = name.partition(".data/data/share/")
            if path.startswith("man/"):
                _put(tree / f"usr/share/{path}.gz", gzip.compress(archive.read(name), 9, mtime=0))
            elif shared:
                place = f"usr/share/{path}".replace("zsh/site-functions", "zsh/vendor-completions")
                _put(tree / place, archive.read(name))
    documents = tree / "usr/share/doc/hami-resolver"
    _put(documents / "changelog.gz", gzip.compress((ROOT / "CHANGELOG.md").read_bytes(), 9, mtime=0))
    _put(documents / "copyright", (ROOT / "LICENSE").read_bytes())


def _control(tree: Path, architecture: str) -> None:
    major, minor = PYTHONS[-1].split(".")
    words = {
        "VERSION": VERSION,
        "ARCHITECTURE": architecture,
        "SIZE": str(sum(path.lstat().st_size for path in tree.rglob("*")) // 1024),
        "OLDEST": PYTHONS[0],
        "TOO_NEW": f"{major}.{int(minor) + 1}",
    }
    address = published()["ADDRESS"]
    words["HOMEPAGE"] = f"Homepage: {address}\n" if address else ""
    text = re.sub(r"@(\w+)@", lambda word: words[word[1]], (PARTS / "control").read_text())
    _put(tree / "DEBIAN/control", text)
    _put(tree / "DEBIAN/conffiles", "/etc/default/resolver\n")
    for script in ("postinst", "prerm", "postrm"):
        _put(tree / "DEBIAN" / script, (PARTS / script).read_bytes(), 0o755)


if __name__ == "__main__":
    given, *directory = map(Path, sys.argv[1:])
    print(build(given, directory[0] if directory else ROOT / "dist"))  # noqa: T201
