"""Process in a new PID namespace that proves that a source finds processes.

It reports ``host PID, PID inside`` on descriptor 0, and ends with that socket. Without the right to make a namespace it
tries a user namespace; if that fails, it reports a new process here, and the first process of another namespace.
"""

import _socket  # the bare module: `socket` would add a third to the cost
import ctypes
import os

from resolver.base.errors import ResolverError
from resolver.linux import seccomp

_CLONE_NEWUSER, _CLONE_NEWPID = 0x10000000, 0x20000000


def main() -> int:
    """Report, wait, clean up."""
    seccomp.forbid_dangerous("unshare")
    channel = _socket.socket(fileno=os.dup(0))
    channel.recv(16)  # the daemon asks for the start
    libc = ctypes.CDLL(None, use_errno=True)
    confined = libc.unshare(_CLONE_NEWPID) and libc.unshare(_CLONE_NEWUSER | _CLONE_NEWPID)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent has ended or closed its end
        os._exit(0)
    os.close(reading)
    try:
        report = [child, child, *_first_of_a_namespace()] if confined else [child, 1]
        channel.send(" ".join(map(str, report)).encode())
        channel.recv(16)
    finally:
        os.close(writing)
        os.waitpid(child, 0)
    return 0


def _first_of_a_namespace() -> tuple[int, ...]:
    for host_pid in sorted(map(int, filter(str.isdecimal, os.listdir("/proc"))), reverse=True):
        if is_first(host_pid):
            return (host_pid,)
    return ()


def is_first(host_pid: int) -> bool:
    """Check that a process is PID 1 of a namespace below this one, and isn't exiting.

    Its exit ends the namespace. A process there that can't be killed outlives it, unknown to the kernel's map.
    """
    from resolver.linux.procfs import Procfs  # seldom needed

    try:
        procfs = Procfs()
        ns_pids = procfs.ns_pids(host_pid)
        return len(ns_pids) > 1 and ns_pids[-1] == 1 and not procfs.is_exiting(host_pid)
    except (ResolverError, OSError, ValueError):
        return False
