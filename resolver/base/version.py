"""The version of this program: from git, a source archive, or the installation.

The Makefile and the wheel's build run it as a program, which prints the version.
"""

from __future__ import annotations

import os

#: The release that the commits since the last tag lead to.
NEXT = "0.2.0"


def _find() -> str:
    """Return ``0.2.0.dev12+g1a2b3c4`` twelve commits after a tag, and the tag's number on its commit.

    Without git and a record of the version, the number of commits is 0.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return _from_git(root) or _from_archive(root) or _installed(root) or f"{NEXT}.dev0"


def _from_git(root: str) -> str | None:
    if not os.path.exists(f"{root}/.git"):
        return None
    said = _git(root, "describe", "--tags", "--long", "--match", "v[0-9]*")
    if said:
        tag, commits, commit = said.removeprefix("v").rsplit("-", 2)
        return tag if commits == "0" else f"{NEXT}.dev{commits}+{commit}"
    commits, commit = _git(root, "rev-list", "--count", "HEAD"), _git(root, "rev-parse", "--short", "HEAD")
    return f"{NEXT}.dev{commits}+g{commit}" if commits and commit else None


def _git(root: str, *words: str) -> str:
    """Return a git command's output, or nothing."""
    import subprocess  # in a checkout only: it would double a short command's time

    try:
        done = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=False)  # noqa: S607
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _from_archive(root: str) -> str | None:
    """Read the metadata of an unpacked source archive."""
    try:
        with open(f"{root}/PKG-INFO", encoding="utf-8") as file:
            lines = [line for line in file if line.startswith("Version: ")]
    except OSError:
        return None
    return lines[0].split()[1] if lines else None


def _installed(root: str) -> str | None:
    """Read the version from the installed metadata's name: importlib.metadata takes ten milliseconds."""
    begins, ends = "hami_resolver-", ".dist-info"
    for name in os.listdir(root):
        if name.startswith(begins) and name.endswith(ends):
            return name[len(begins) : -len(ends)]
    return None


VERSION = _find()

if __name__ == "__main__":
    print(VERSION)  # noqa: T201
