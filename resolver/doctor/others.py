"""Which daemons run on this node, by their command lines, and with which settings."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from resolver import config
from resolver.base.errors import AccessDenied, ProcessGone, UsageError
from resolver.base.lock_holder import lock_holder
from resolver.config import options
from resolver.hami.placements import searched

if TYPE_CHECKING:
    import psutil

    from resolver.linux.procfs import Procfs

_PYTHON = re.compile(r"python[0-9.]*")


class Other(NamedTuple):
    """Process that is ``resolver run``. ``settings`` are None if unreadable; ``locked``: it holds its lock."""

    settings: config.Settings | None
    directories: frozenset[object] = frozenset()
    locked: bool = False

    def may_serve(self, directories: frozenset[object]) -> bool:
        """Check if it serves one of these directories, as far as is known."""
        return self.settings is None or bool(self.directories & directories)


def find(procfs: Procfs) -> dict[int, Other]:
    """``{host_pid: daemon}`` of every ``resolver run`` of root's in the host's PID namespace."""
    import psutil

    psutil.PROCFS_PATH = procfs.root
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError, ProcessGone, AccessDenied):
            argv = process.cmdline()
            if not runs_daemon(argv) or process.uids().effective != 0:
                continue
            if len(procfs.ns_pids(process.pid)) == 1:  # in a namespace of its own it does not start
                found[process.pid] = _daemon(procfs, process, argv)
    return found


def directories_of(process: int | str, settings: config.Settings) -> frozenset[object]:
    """Return the directories of cache files as that process sees them: each by device and inode, else by its path."""
    found: set[object] = set()
    for path in map(os.path.normpath, searched(settings.containers_dir)):
        try:
            info = os.stat(f"/proc/{process}/root{path}")
            found.add((info.st_dev, info.st_ino))
        except OSError:
            found.add(path)
    return frozenset(found)


def runs_daemon(argv: list[str]) -> bool:
    """Recognize the command line of ``resolver run``: by its name, or as a script or module of Python."""
    if argv and _PYTHON.fullmatch(os.path.basename(argv[0])):
        argv = argv[1:]
        while argv and argv[0].startswith("-") and argv[0] != "-m":
            argv = argv[1:]
        if argv[:1] == ["-m"]:
            argv = argv[1:]
    return len(argv) > 1 and os.path.basename(argv[0]) == "resolver" and argv[1] == "run"


def flags_in(argv: list[str]) -> dict[str, Any]:
    """Return the settings on a command line, as `resolver.config.load` takes them, and ``config``."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    options.add_arguments(parser)
    args, _other = parser.parse_known_args(argv)
    return options.given(args) | ({"config": args.config} if args.config else {})


def _daemon(procfs: Procfs, process: psutil.Process, argv: list[str]) -> Other:
    import psutil

    try:
        environ, flags = process.environ(), flags_in(argv)
        file = flags.pop("config", None) or environ.pop("RESOLVER_CONFIG", None)
        # A file by its path from there: the daemon may be in a container, with another root and directory.
        if file:
            file = f"{procfs.root}/{process.pid}/{'root' if file.startswith('/') else 'cwd/'}{file}"
        settings = config.load(flags, file, environ)
    except (psutil.Error, OSError, UsageError, argparse.ArgumentError):
        return Other(None)
    locked = lock_holder(f"/proc/{process.pid}/root{settings.run_dir}") == process.pid
    return Other(settings, directories_of(process.pid, settings), locked)
