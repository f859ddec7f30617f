"""A process in a new PID namespace, made to be found: the proof that a source sees what it should.

Run as a child (`resolver.child`). It forks into a new PID namespace, reports the host PID of the process in there as
one message on descriptor 0, keeps it alive until that socket closes, and reaps it. Without the right to make a PID
namespace it uses a user namespace; without that it reports an error and its reason.
"""

from __future__ import annotations

import os
import socket

_CLONE_NEWUSER, _CLONE_NEWPID = 0x10000000, 0x20000000


def main() -> int:
    """Report, wait, clean up."""
    import ctypes

    channel = socket.socket(fileno=os.dup(0))
    channel.recv(16)  # the daemon says when
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWPID) and libc.unshare(_CLONE_NEWUSER | _CLONE_NEWPID):
        reason = os.strerror(ctypes.get_errno())
        channel.send(f"error no PID namespace can be made here: {reason}".encode())
        return 1
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent is gone, or done
        os._exit(0)
    os.close(reading)
    try:
        channel.send(b"%d" % child)
        channel.recv(16)
    finally:
        os.close(writing)
        os.waitpid(child, 0)
    return 0
