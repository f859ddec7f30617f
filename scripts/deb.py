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
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from resolver import __version__

ROOT: Final = Path(__file__).resolve().parent.parent
PARTS: Final = ROOT / "deploy/debian"
#: From Debian 12's to sid's.
PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
HOME: Final = "usr/lib/hami-resolver"
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
_PLATFORMS: Final = ("manylinux2014", "manylinux_2_17", "manylinux_2_28", "manylinux_2_34")


def build(wheel: Path, directory: Path) -> Path:
    """Write the package into the directory. Raises CalledProcessError, and ValueError for wheels that contradict."""
    machine = platform.machine()
    architecture = _ARCHITECTURES[machine]
    with tempfile.TemporaryDirectory(prefix="deb-") as work:
        tree = Path(work) / "tree"
        library = tree / HOME / "lib/python3/site-packages"
        library.mkdir(parents=True)
        for each in (wheel, *(path for python in PYTHONS for path in _fetch(python, machine, Path(work)))):
            _unpack(each, library)
        _environment(tree)
        _around(tree, wheel)
        _control(tree, architecture)
        _settle(tree)
        package = directory / f"hami-resolver_{_version()}_{architecture}.deb"
        directory.mkdir(parents=True, exist_ok=True)
        command = ["dpkg-deb", "--root-owner-group", "-Zxz", "--build", str(tree), str(package)]
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"SOURCE_DATE_EPOCH": _epoch()}
        )
    return package


def _version() -> str:
    public, plus, commit = __version__.partition("+")
    return re.sub(r"(a|b|rc|\.dev)(\d+)", r"~\1\2", public) + plus + commit


def _epoch() -> str:
    """Return the time of the last commit, in seconds since 1970."""
    told = os.environ.get("SOURCE_DATE_EPOCH")
    git = ["git", "log", "-1", "--format=%ct"]
    return told or subprocess.check_output(git, cwd=ROOT, text=True).strip()


def _fetch(python: str, machine: str, work: Path) -> list[Path]:
    place = work / f"wheels-{python}"
    command = [sys.executable, "-m", "pip", "download", "-qq", "--dest", str(place), "--no-deps"]
    command += [
        "--require-hashes",
        "--only-binary=:all:",
        f"--python-version={python}",
        "--implementation=cp",
    ]
    command += [f"--platform={each}_{machine}" for each in _PLATFORMS]
    subprocess.run([*command, f"--requirement={ROOT / 'requirements.lock'}"], check=True)
    return sorted(place.glob("*.whl"))


def _unpack(wheel: Path, library: Path) -> None:
    """Unpack its modules. Another Python's wheel brings the same files, except for its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith("/") or ".data/" in name:
                continue
            path, new = library / name, archive.read(name)
            if (
                path.exists()
                and path.read_bytes() != new
                and not re.search(r"\.dist-info/(RECORD|WHEEL)$", name)
            ):
                raise ValueError(f"{wheel.name} has another {name} than the wheel for another Python")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(new)


def _shared(wheel: Path) -> dict[str, bytes]:
    """Return ``{path below share: data}`` of the wheel's man pages and completion."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".data/data/share/" in name]
        return {name.partition(".data/data/share/")[2]: archive.read(name) for name in sorted(names)}


def _environment(tree: Path) -> None:
    home = tree / HOME
    for python in PYTHONS:
        (home / f"lib/python{python}").symlink_to("python3")
    (home / "bin").mkdir()
    (home / "bin/python").symlink_to("/usr/bin/python3")
    (home / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    program = home / "bin/resolver"
    program.write_text(f"#!/{HOME}/bin/python\nfrom resolver.cli import main\n\nraise SystemExit(main())\n")
    (tree / "usr/bin").mkdir()
    (tree / "usr/bin/resolver").symlink_to(f"../{HOME.removeprefix('usr/')}/bin/resolver")
    plugin = tree / "usr/bin/kubectl-resolver"
    plugin.write_bytes((ROOT / "resolver/kube/kubectl_plugin.py").read_bytes())


def _around(tree: Path, wheel: Path) -> None:
    """Add unit, settings, group, manual, completion and Debian's metadata."""

    def put(path: str, data: str | bytes) -> None:
        target = tree / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data.encode() if isinstance(data, str) else data)

    unit = (ROOT / "deploy/systemd/resolver.service").read_text()
    ours = {
        "ExecStart=/opt/resolver/bin/resolver run": "ExecStart=/usr/bin/resolver run",
        # A member of the socket's group needs no right to give the socket to it.
        "NoNewPrivileges=yes": "NoNewPrivileges=yes\nSupplementaryGroups=resolver",
    }
    for before, after in ours.items():
        if unit.count(before) != 1:
            raise ValueError(f"deploy/systemd/resolver.service has no line {before}")
        unit = unit.replace(before, after)
    put("usr/lib/systemd/system/resolver.service", unit)
    put("usr/lib/sysusers.d/hami-resolver.conf", (PARTS / "sysusers").read_bytes())
    put("etc/default/resolver", (PARTS / "default").read_bytes())
    for path, data in _shared(wheel).items():
        if path.startswith("man/"):
            put(f"usr/share/{path}.gz", gzip.compress(data, 9, mtime=0))
            continue
        place = f"usr/share/{path}".replace("zsh/site-functions", "zsh/vendor-completions")
        put(place, data)
        link = tree / HOME / "share" / path  # `resolver completion` reads it
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"/{place}")
    documents = "usr/share/doc/hami-resolver"
    put(f"{documents}/changelog.gz", gzip.compress((ROOT / "CHANGELOG.md").read_bytes(), 9, mtime=0))
    for page in ("config", "node", "security", "troubleshooting"):
        put(f"{documents}/{page}.md", (ROOT / f"docs/{page}.md").read_bytes())
    put(f"{documents}/measure-driver.conf", (ROOT / "deploy/systemd/measure-driver.conf").read_bytes())
    put(f"{documents}/copyright", (ROOT / "LICENSE").read_bytes())


def _control(tree: Path, architecture: str) -> None:
    place = tree / "DEBIAN"
    place.mkdir()
    newest = PYTHONS[-1].split(".")
    words = {
        "VERSION": _version(),
        "ARCHITECTURE": architecture,
        "SIZE": str(sum(path.lstat().st_size for path in tree.rglob("*")) // 1024),
        "OLDEST": PYTHONS[0],
        "TOO_NEW": f"{newest[0]}.{int(newest[1]) + 1}",
    }
    text = re.sub(r"@(\w+)@", lambda word: words[word[1]], (PARTS / "control").read_text())
    (place / "control").write_text(text)
    (place / "conffiles").write_text("/etc/default/resolver\n")
    for script in ("postinst", "prerm", "postrm"):
        shutil.copy(PARTS / script, place / script)


def _settle(tree: Path) -> None:
    """Modes and times: those of the files here are this machine's business."""
    programs = {
        tree / HOME / "bin/resolver",
        tree / "usr/bin/kubectl-resolver",
        *(tree / "DEBIAN" / each for each in ("postinst", "prerm", "postrm")),
    }
    when = int(_epoch())
    for path in sorted(tree.rglob("*"), reverse=True):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path in programs else 0o644)
        os.utime(path, (when, when), follow_symlinks=False)


def main() -> int:
    """Build, and print the result."""
    wheel, *directory = map(Path, sys.argv[1:])
    print(build(wheel, directory[0] if directory else ROOT / "dist"))  # noqa: T201
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
