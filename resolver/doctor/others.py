"""Which daemons run on this node: by their command lines, and by what they have open."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from typing import TYPE_CHECKING, NamedTuple

from resolver.base.errors import AccessDenied, ProcessGone
from resolver.base.lock_holder import lock_holder
from resolver.hami.placements import searched

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resolver.linux.procfs import Procfs

_PYTHON = re.compile(r"python[0-9.]*")
Directories = frozenset[tuple[int, int]]


class Other(NamedTuple):
    """Process that is ``resolver run``: its open directories by device and inode, and where it holds the lock.

    ``directories`` are None if unreadable; ``run_dir`` is empty for one that does not write.
    """

    directories: Directories | None
    run_dir: str = ""

    def may_serve(self, directories: Directories) -> bool:
        """Check if it serves one of these directories, as far as is known."""
        return self.directories is None or bool(self.directories & directories)


def find(procfs: Procfs) -> dict[int, Other]:
    """``{host_pid: daemon}`` of every ``resolver run`` of root's in the host's PID namespace."""
    import psutil

    psutil.PROCFS_PATH = procfs.root
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError, ProcessGone, AccessDenied):
            if not runs_daemon(process.cmdline()) or process.uids().effective != 0:
                continue
            if len(procfs.ns_pids(process.pid)) == 1:  # in a namespace of its own it does not start
                found[process.pid] = _daemon(f"{procfs.root}/{process.pid}", process.pid)
    return found


def directories_of(paths: Iterable[str]) -> Directories:
    """Return the directories of cache files by device and inode."""
    found = set()
    for path in searched(tuple(paths)):
        with contextlib.suppress(OSError):
            info = os.stat(path)
            found.add((info.st_dev, info.st_ino))
    return frozenset(found)


def runs_daemon(argv: list[str]) -> bool:
    """Recognize the command line of ``resolver run``: by its name, or as a script or module of Python."""
    words = [os.path.basename(word) for word in argv if not word.startswith("-")]
    if words and _PYTHON.fullmatch(words[0]):
        words = words[1:]
    return words[:2] == ["resolver", "run"]


def _daemon(process: str, host_pid: int) -> Other:
    """Read what a daemon has open; it keeps the directories that it searches, and its lock."""
    directories, run_dir = set(), ""
    try:
        descriptors = os.listdir(f"{process}/fd")
    except OSError:
        return Other(None)
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            info, path = os.stat(f"{process}/fd/{descriptor}"), os.readlink(f"{process}/fd/{descriptor}")
            if stat.S_ISDIR(info.st_mode):
                directories.add((info.st_dev, info.st_ino))
            elif path.endswith("/lock") and lock_holder(f"{process}/root{path[:-5]}") == host_pid:
                run_dir = path[:-5]
    return Other(frozenset(directories), run_dir)
