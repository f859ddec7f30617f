"""Start of children, with one end of a socket as descriptor 0.

They inherit the first message's descriptors: the kernel counts those in flight per user, and a tenant with the same
user could use the count up (ETOOMANYREFS).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from resolver.workers.child import INHERITED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

#: Variables that a child gets, if they are set: where libraries are, how text is encoded, and the driver's own.
_VARIABLES, _PREFIXES = ("PATH", "LD_LIBRARY_PATH", "LANG", "TZ"), ("LC_", "NVIDIA_", "NVML_")
_WORKERS = os.path.dirname(os.path.abspath(__file__))


def child(module: str, name: str, rights: Iterable[str], *paths: str) -> list[str]:
    """Command line that runs a module's ``main()`` with these capabilities.

    It imports the standard library, this package and ``paths``.
    """
    script, above = os.path.join(_WORKERS, "child.py"), os.path.dirname(os.path.dirname(_WORKERS))
    return [sys.executable, "-I", "-S", script, module, name, ",".join(sorted(rights)), above, *paths]


def spawn(
    argv: Sequence[str],
    descriptors: Sequence[int] = (),
    *,
    environment: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a program; return it, and this end of its socket. Raises OSError.

    ``descriptors`` keep their numbers. ``environment`` replaces the usual one; ``quiet`` closes stderr.
    """
    variables = dict(_passed_on() if environment is None else environment)
    variables[INHERITED] = ",".join(map(str, descriptors))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            # A group of its own: Ctrl-C at a terminal is for the daemon, which ends its children itself.
            process = subprocess.Popen(
                argv,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if quiet else None,
                env=variables,
                pass_fds=descriptors,
                process_group=0,
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


def _passed_on() -> dict[str, str]:
    """Environment variables for children."""
    return {
        name: value for name, value in os.environ.items() if name in _VARIABLES or name.startswith(_PREFIXES)
    }
