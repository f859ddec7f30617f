"""How every child program is started: its end of a socket is descriptor 0, and that is all it shares with us."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_WORKERS = os.path.dirname(os.path.abspath(__file__))


def child(module: str, name: str, rights: Iterable[str], *paths: str) -> list[str]:
    """The command line for a module with a ``main()``, under `resolver.workers.child`.

    ``rights`` are the capabilities that it keeps of those that are permitted here; ``paths`` is where it finds what it
    imports beside the standard library and this package.
    """
    script, above = os.path.join(_WORKERS, "child.py"), os.path.dirname(os.path.dirname(_WORKERS))
    return [sys.executable, "-I", "-S", script, module, name, ",".join(sorted(rights)), above, *paths]


def spawn(
    argv: Sequence[str], *, environment: Mapping[str, str] | None = None, quiet: bool = False
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a program; returns it, and our end of the SOCK_SEQPACKET socket. Raises OSError.

    ``environment`` replaces the daemon's; ``quiet`` leaves it no standard error.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            # A group of its own: Ctrl-C at a terminal is for the daemon, which ends its children itself.
            process = subprocess.Popen(
                argv,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if quiet else None,
                env=environment,
                process_group=0,
            )
        except BaseException:
            ours.close()
            raise
    return process, ours
