"""Short-lived child that opens a proc connector socket with pyroute2 (13 MiB).

On descriptor 0 it gets the path of a network namespace, or ``ours``. It answers ``{}`` with the bound socket,
``{"fetch": [number]}`` if too many descriptors are in flight, or ``{"stage": "bind", "errno": 1}``; the stages are
``import``, ``netns``, ``socket`` and ``bind``.
"""

import errno
import json
import os
import socket
from typing import Any

from resolver.linux import seccomp


def main() -> int:
    """Hand over a socket, and end once it is taken."""
    seccomp.forbid_dangerous("setns")
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
        channel.send(json.dumps({"stage": stage, "errno": getattr(error, "errno", None) or 0}).encode())
        return 1
    try:
        socket.send_fds(channel, [b"{}"], [descriptor])
    except OSError as error:
        if error.errno != errno.ETOOMANYREFS:
            raise
        channel.send(json.dumps({"fetch": [descriptor]}).encode())
    channel.recv(1)
    return 0
