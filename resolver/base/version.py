"""The version of this program: from git, a source archive, or the installation.

The Makefile and the wheel's build run it as a program, which prints the version.
"""

from __future__ import annotations

import os

#: The release that the commits since the last tag lead to.
NEXT = "0.2.0"


def find() -> str:
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
    """Return a git command's output, or nothing. Importing subprocess would double a short command's time."""
    reader, writer = os.pipe()
    to = [(os.POSIX_SPAWN_DUP2, writer, 1), (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
    with open(reader, encoding="utf-8") as output:
        try:
            pid = os.posix_spawnp("git", ("git", "-C", root, *words), os.environ, file_actions=to)
        except OSError:
            return ""
        finally:
            os.close(writer)
        said = output.read().strip()
    return said if os.waitpid(pid, 0)[1] == 0 else ""


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


if __name__ == "__main__":
    print(find())  # noqa: T201
