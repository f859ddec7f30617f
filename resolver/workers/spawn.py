"""Start of children, with one end of a socket as descriptor 0.

They inherit the first message's descriptors: the kernel counts those in flight per user, and a tenant with the same
user could use the count up (ETOOMANYREFS).
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from resolver.linux.pidfd import fetch
from resolver.workers.child import INHERITED

#: Variables that a child gets, if they are set: where libraries are, how text is encoded, and the driver's own.
_VARIABLES, _PREFIXES = ("PATH", "LD_LIBRARY_PATH", "LANG", "TZ"), ("LC_", "NVIDIA_", "NVML_")
_WORKERS = os.path.dirname(os.path.abspath(__file__))
#: Bytes of a message either way, and descriptors in one.
MAX_MESSAGE, _MAX_DESCRIPTORS = 1 << 18, 32


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
    passed = (name for name in os.environ if name in _VARIABLES or name.startswith(_PREFIXES))
    variables = {name: os.environ[name] for name in passed} if environment is None else dict(environment)
    variables[INHERITED] = ",".join(map(str, descriptors))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        # The default is too small for a full region.
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_MESSAGE)
        try:
            for fd in descriptors:
                os.set_inheritable(fd, True)
            # A new group: Ctrl-C is for the daemon, which ends its children.
            process = subprocess.Popen(
                argv,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if quiet else None,
                env=variables,
                # All descriptors are closed by execve(2): vfork(2) would make this thread wait for a last reference
                # that the child closes before it.
                close_fds=False,
                process_group=0,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            for fd in descriptors:
                os.set_inheritable(fd, False)
    return process, ours


def ask_once(
    argv: Sequence[str], request: bytes, timeout: float, **how: Any
) -> tuple[dict[str, Any] | None, list[int], int]:
    """Ask a child, started for this: its JSON answer if any, the descriptors sent with it, and its exit code.

    ``fetch`` in an answer has their numbers in the child instead, if too many are in flight. Raises OSError and
    ValueError.
    """
    process, channel = spawn(argv, **how)
    answer, descriptors = None, list[int]()
    try:
        channel.settimeout(timeout)
        with contextlib.suppress(BrokenPipeError):  # it ended already, maybe with an answer
            channel.send(request)
        with contextlib.suppress(ConnectionResetError):  # it ended before it took the request
            message, descriptors, _, _ = socket.recv_fds(
                channel, MAX_MESSAGE, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
            answer = json.loads(message) if message else None
            if answer and "fetch" in answer:
                descriptors = fetch(process.pid, answer["fetch"])
    finally:
        channel.close()
        process.kill()  # it has nothing more to do
        code = process.wait()
    return answer, descriptors, code
