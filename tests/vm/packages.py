"""Debian packages of any release, by apt itself, from the mirror that this machine is set up with.

Each release and architecture has an apt directory of its own in the cache, with an empty list of installed packages:
apt checks the signatures and works out what is needed. Nothing of this machine's apt is changed.
"""

import fcntl
import os
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.programs import completed

KEYRING: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"
#: Debian's names of our machines.
DEBIAN_ARCH: Final = {"x86_64": "amd64", "aarch64": "arm64"}
_FRESH_SECONDS: Final = 6 * 3600  # lists that are younger are not fetched again
_LINE: Final = re.compile(r"^'(?P<uri>[^']+)' (?P<file>\S+) (?P<size>\d+)", re.MULTILINE)
_KERNEL: Final = re.compile(r"^linux-(image|binary|modules)-\d")


class Unavailable(Exception):
    """A package is not on this machine's mirror; the message is a sentence with the reason."""


class Package(NamedTuple):
    """A package that apt would fetch. ``file`` is its name in apt's cache: ``name_version_arch.deb``."""

    name: str
    file: str
    size: int


class Suite(NamedTuple):
    """A release: its name, the suites that apt reads beside it, and the one that its kernel is taken from."""

    name: str
    beside: tuple[str, ...] = ()
    security: bool = False
    backports: bool = False


SUITES: Final = {
    suite.name: suite
    for suite in (
        Suite("bullseye", security=True),
        Suite("bookworm", security=True),
        Suite("trixie", security=True),
        Suite("trixie-backports", beside=("trixie",), backports=True),
        Suite("sid"),
    )
}


def parse_uris(text: str) -> list[Package]:
    return [
        Package(found["file"].split("_", 1)[0], found["file"], int(found["size"]))
        for found in _LINE.finditer(text)
    ]


def kernel_packages(wanted: Iterable[Package]) -> list[Package]:
    """Return the packages of a kernel and its modules: one up to 7.0, then split into -binary and -modules."""
    return [package for package in wanted if _KERNEL.match(package.name)]


def mirrors(targets: str) -> tuple[str, str]:
    """The archive's and the security archive's address, from ``apt-get indextargets --format '$(REPO_URI)'``.

    Raises `Unavailable` when this machine's apt has no Debian archive.
    """
    addresses = {line.strip().rstrip("/") for line in targets.splitlines()}
    archive = sorted(each for each in addresses if each.endswith("/debian"))
    if not archive:
        raise Unavailable(
            "this machine's apt has no Debian archive that kernels could be taken from: name one in "
            "DEBIAN_MIRROR, http://HOST/debian (a security archive is expected beside it, in /debian-security)"
        )
    security = sorted(each for each in addresses if each.endswith("/debian-security"))
    return archive[0], security[0] if security else f"{archive[0]}-security"


def configured_mirrors() -> tuple[str, str]:
    if named := os.environ.get("DEBIAN_MIRROR"):
        return mirrors(named)
    command = ("apt-get", "indextargets", "--format", "$(REPO_URI)")
    try:
        return mirrors(completed(*command, check=True).stdout)
    except FileNotFoundError:
        raise Unavailable("kernels are fetched with apt-get, and this machine has none") from None


class Apt:
    """apt for one release and architecture, in a directory of its own."""

    def __init__(
        self, base: Path, suite: Suite, arch: str, archives: tuple[str, str], component: str = "main"
    ) -> None:
        self._suite = suite
        self._base = base / f"{suite.name}-{arch}"
        parts = ("etc/preferences.d", "etc/sources.list.d", "lists/partial", "cache/archives/partial", "debs")
        for place in parts:
            (self._base / place).mkdir(parents=True, exist_ok=True)
        (self._base / "status").touch()
        archive, security = archives
        lines = [f"{archive} {name} {component}" for name in (*suite.beside, suite.name)]
        lines += [f"{security} {suite.name}-security {component}"] if suite.security else []
        sources = "".join(f"deb [signed-by={KEYRING}] {line}\n" for line in lines)
        (self._base / "etc/sources.list").write_text(sources)
        options = {
            "Dir::Etc": self._base / "etc",
            "Dir::State::lists": self._base / "lists",
            "Dir::State::status": self._base / "status",
            "Dir::Cache": self._base / "cache",
            "APT::Architecture": DEBIAN_ARCH[arch],
            "APT::Architectures": DEBIAN_ARCH[arch],
            "APT::Sandbox::User": "root",
            "Acquire::Languages": "none",
            "Acquire::Check-Valid-Until": "false",  # a release that is no longer cared for stays as it is
            "Debug::NoLocking": "1",
        }
        self._options = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]

    def update(self) -> None:
        """Fetch the lists unless they are fresh. Raises `Unavailable`."""
        stamp = self._base / "updated"
        sources = (self._base / "etc/sources.list").read_text()
        with (self._base / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (
                stamp.exists()
                and stamp.read_text() == sources
                and time.time() - stamp.stat().st_mtime < _FRESH_SECONDS
            ):
                return
            self._run("update", "--error-on=any")
            stamp.write_text(sources)

    def wanted(self, *names: str) -> list[Package]:
        """Return the packages that installing these on an empty machine fetches. Raises `Unavailable`."""
        release = ("-t", self._suite.name) if self._suite.backports else ()
        said = self._run(*release, "--no-install-recommends", "--print-uris", "-qq", "install", *names)
        return parse_uris(said)

    def alone(self, name: str) -> Package:
        (package,) = parse_uris(self._run("--print-uris", "-qq", "download", name))
        return package

    def fetch(self, packages: Sequence[Package]) -> list[Path]:
        """The packages' files, downloaded if they are not there yet. Raises `Unavailable`."""
        archives = self._base / "debs"  # instead of apt's cache, which has no addresses
        with (self._base / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            missing = [each for each in packages if not _whole(archives / each.file, each.size)]
            if missing:
                names = [f"{each.name}={_version(each)}" for each in missing]
                self._run("-qq", "download", *names, cwd=archives)
        return [archives / each.file for each in packages]

    def _run(self, *arguments: str, cwd: Path | None = None) -> str:
        done = completed("apt-get", *self._options, *arguments, cwd=cwd, env={**os.environ, "LC_ALL": "C"})
        if done.returncode != 0:
            complaints = [line for line in done.stderr.splitlines() if line.startswith(("E:", "Err", "W:"))]
            said = " ".join(complaints[-3:]) or done.stderr.strip()[-300:]
            raise Unavailable(f"Debian {self._suite.name}: apt-get {arguments[0]} failed: {said}")
        return done.stdout


def _whole(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size == size


def _version(package: Package) -> str:
    return package.file.split("_")[1].replace("%3a", ":")
