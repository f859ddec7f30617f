"""A process in a new PID namespace, made to be found: the proof that a source sees what it should.

Run as a child (`resolver.workers.child`). It forks into a new PID namespace, reports the host PID of the process in
there and its number inside as one message on descriptor 0, keeps it alive until that socket closes, and reaps it.
Without the right to make a PID namespace it uses a user namespace. Where that is forbidden as well, as by a container
runtime's seccomp profile, two proofs stand in for one: a new process without a namespace of its own, and somebody's
that is in another namespace already.
"""

from __future__ import annotations

import _socket  # without the module around it, which is a quarter of what this costs
import os

_CLONE_NEWUSER, _CLONE_NEWPID = 0x10000000, 0x20000000


def main() -> int:
    """Report, wait, clean up."""
    import ctypes

    from resolver.linux import seccomp

    seccomp.forbid(seccomp.dangerous_but("unshare"))
    channel = _socket.socket(fileno=os.dup(0))
    channel.recv(16)  # the daemon says when
    libc = ctypes.CDLL(None, use_errno=True)
    confined = libc.unshare(_CLONE_NEWPID) and libc.unshare(_CLONE_NEWUSER | _CLONE_NEWPID)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent is gone, or done
        os._exit(0)
    os.close(reading)
    try:
        report = [child, child, *_somebody_in_a_namespace()] if confined else [child, 1]
        channel.send(" ".join(map(str, report)).encode())
        channel.recv(16)
    finally:
        os.close(writing)
        os.waitpid(child, 0)
    return 0


def _somebody_in_a_namespace() -> tuple[int, ...]:
    """Host PID and own number of a living process in another PID namespace; empty if there is none."""
    for host_pid in sorted(map(int, filter(str.isdecimal, os.listdir("/proc"))), reverse=True):
        ns_pids = namespaced(host_pid)
        if len(ns_pids) > 1:
            return host_pid, ns_pids[-1]
    return ()


def namespaced(host_pid: int) -> list[int]:
    """The numbers of a process, outermost first; empty for one that is gone or a zombie."""
    try:
        with open(f"/proc/{host_pid}/status", "rb") as file:
            fields = dict(line.split(b":", 1) for line in file if b":" in line)
        return (
            [] if fields[b"State"].strip()[:1] in b"ZX" else [int(each) for each in fields[b"NSpid"].split()]
        )
    except (OSError, KeyError, ValueError):
        return []
