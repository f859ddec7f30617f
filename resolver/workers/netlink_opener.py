"""Short-lived child that opens a proc connector socket with pyroute2 (13 MiB) and hands it over.

Over the SOCK_SEQPACKET socket on descriptor 0:

1. it gets the path of the network namespace to enter, or ``ours``, and answers ``ok`` with the bound socket,
   ``fetch:<its number>`` if too many descriptors are in flight, or ``<failed step>:<errno>``; the steps are
   ``import``, ``netns``, ``socket`` and ``bind``;
2. after another message it produces the events of the self-test: one on every CPU that it may use, so that losses
   can be counted from then on, and a child that ends. It answers with that child's PID, and ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from typing import Any


def main() -> int:
    """Hand over a socket, make the self-test's events, end."""
    from resolver.linux import seccomp

    seccomp.forbid(seccomp.dangerous_but("setns"))
    channel = socket.socket(fileno=os.dup(0))
    network, stage = channel.recv(256).decode(), "import"
    try:
        from pyroute2 import netns  # type: ignore[import-untyped]
        from pyroute2.netlink.connector.cn_proc import ProcEventSocket  # type: ignore[import-untyped]

        stage = "netns"
        if network != "ours":
            netns.setns(network, flags=0, fork=False)
        stage = "socket"
        connector: Any = ProcEventSocket()
        descriptor = connector.asyncore.socket.fileno()
        stage = "bind"
        connector.bind()
    except (
        ImportError,
        OSError,
        KeyError,
    ) as error:  # KeyError: no bind() succeeded, pyroute2 keeps the reason
        channel.send(f"{stage}:{getattr(error, 'errno', None) or 0}".encode())
        return 1
    try:
        socket.send_fds(channel, [b"ok"], [descriptor])
    except OSError as error:
        if error.errno != errno.ETOOMANYREFS:
            raise
        channel.send(b"fetch:%d" % descriptor)
    if not channel.recv(16):
        return 1
    connector.close()
    _show_every_cpu()
    host_pid = os.fork()
    if host_pid == 0:
        os._exit(0)
    os.waitpid(host_pid, 0)
    channel.send(b"%d" % host_pid)
    return 0


def _show_every_cpu() -> None:
    """Cause an event on each CPU by changing this process's name (PROC_EVENT_COMM)."""
    with open("/proc/self/comm", "w") as comm:
        for cpu in os.sched_getaffinity(0):
            with contextlib.suppress(OSError):  # the CPU may be going away
                os.sched_setaffinity(0, {cpu})
                comm.write("netlink opener")
                comm.flush()
                comm.seek(0)
