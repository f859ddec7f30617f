"""Which daemons run on this node, by their command lines, and with which settings."""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from resolver import config
from resolver.errors import AccessDenied, ProcessGone, UsageError
from resolver.hami.placements import searched

if TYPE_CHECKING:
    import psutil

    from resolver.linux.procfs import Procfs

_PYTHON = re.compile(r"python[0-9.]*")


class Other(NamedTuple):
    """A process that is ``resolver run``. ``settings`` are None where they cannot be read from here."""

    argv: tuple[str, ...]
    settings: config.Settings | None

    def same_files(self, settings: config.Settings) -> bool:
        """Whether it serves the files that a daemon with these settings would, as far as is known."""
        if self.settings is None:
            return True
        theirs, ours = (
            set(map(os.path.normpath, searched(each.containers_dir))) for each in (self.settings, settings)
        )
        return bool(theirs & ours)


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
                found[process.pid] = Other(tuple(argv), _settings(procfs, process))
    return found


def runs_daemon(argv: list[str]) -> bool:
    """Whether this is the command line of ``resolver run``: by its own name, or as a script or module of Python."""
    if argv and _PYTHON.fullmatch(os.path.basename(argv[0])):
        argv = argv[1:]
        while argv and argv[0].startswith("-") and argv[0] != "-m":
            argv = argv[1:]
        if argv[:1] == ["-m"]:
            argv = argv[1:]
    return len(argv) > 1 and os.path.basename(argv[0]) == "resolver" and argv[1] == "run"


def flags_in(argv: list[str]) -> dict[str, Any]:
    """The settings that a command line names, as `resolver.config.load` takes them, and ``config``."""
    flags = dict[str, Any]()
    words = iter(argv)
    for word in words:
        option, given, value = word.partition("=")
        name = option[2:].replace("-", "_")
        known = [each for each in ("config", *config.SETTINGS) if each.startswith(name)]
        name = name if name in known else known[0] if len(known) == 1 else ""
        if not option.startswith("--") or not name:
            continue
        setting = config.SETTINGS.get(name)
        if setting is not None and setting.kind is bool:
            flags[name] = True
            continue
        value = value if given else next(words, "")
        several = setting is not None and isinstance(setting.default, tuple)
        flags[name] = [*flags.get(name, []), value] if several else value
    return flags


def _settings(procfs: Procfs, process: psutil.Process) -> config.Settings | None:
    import psutil

    try:
        environ, flags = process.environ(), flags_in(process.cmdline())
        file = flags.pop("config", None) or environ.get("RESOLVER_CONFIG")
        # A file by its path from there: the daemon may be in a container, with another root and directory.
        if file:
            directory = f"{procfs.root}/{process.pid}"
            file = f"{directory}/root{file}" if file.startswith("/") else f"{directory}/cwd/{file}"
            environ.pop("RESOLVER_CONFIG", None)
        return config.load(flags, file, environ)
    except (psutil.Error, OSError, UsageError):
        return None
