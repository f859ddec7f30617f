"""Attaches to the proc connector: a socket from the opener, and the kernel's acknowledgement on it.

The kernel ignores refused requests silently. The acknowledgement travels as events do.
"""

from __future__ import annotations

import errno
import os
import socket
import sysconfig
from typing import TYPE_CHECKING

from resolver.base.errors import CannotKnow
from resolver.linux.host_view import require_host_view
from resolver.pids.proc_events import NEEDS_NET_ADMIN, NOT_HOST_NETWORK, EventStream
from resolver.workers.spawn import ask_once, child

if TYPE_CHECKING:
    from resolver.linux.procfs import Procfs

_ACK_SECONDS = 1.0
_OPENER_SECONDS = 10.0
#: To bind and listen (before Linux 6.6), to enter the host's network namespace, to reach it.
_RIGHTS = ("NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE")
_USER_NS_INIT = 0xEFFFFFFD  # PROC_USER_INIT_INO in include/linux/proc_ns.h
_REFUSALS = {
    "import": "pyroute2 cannot be loaded ({}): install it (make setup), or use --source scan",
    "netns": "the host's network namespace could not be entered ({}): " + NOT_HOST_NETWORK,
    "socket": "this kernel gives no proc connector socket ({}): it needs CONFIG_CONNECTOR; use --source scan",
    "bind": "the proc connector socket could not be bound ({}): " + NEEDS_NET_ADMIN,
}


def attach(procfs: Procfs, buffer_bytes: int) -> EventStream:
    """Return an acknowledged stream. Raises `CannotKnow`."""
    require_host_view(procfs)
    if os.stat(f"{procfs.root}/self/ns/user").st_ino != _USER_NS_INIT:
        raise CannotKnow(
            "the proc connector ignores requests from a user namespace, and this process is in one: run it without "
            "(Kubernetes: hostUsers: true; Docker: --userns=host), or use --source scan"
        )
    stream = EventStream(_open_socket(_host_network(procfs) or "ours"))
    try:
        stream.grow_buffer(buffer_bytes)
        stream.listen(_ACK_SECONDS)
    except BaseException:
        stream.close()
        raise
    return stream


def _host_network(procfs: Procfs) -> str | None:
    """Return the host's network namespace, if this process is certainly in another one."""
    # kthreadd, always PID 2 (rest_init in init/main.c), never leaves the initial namespaces.
    path = f"{procfs.root}/2/ns/net"
    try:
        ours, hosts = os.stat(f"{procfs.root}/self/ns/net"), os.stat(path)
    except OSError:  # without CAP_SYS_PTRACE: the kernel will say if it is another
        return None
    return None if (ours.st_dev, ours.st_ino) == (hosts.st_dev, hosts.st_ino) else path


def _open_socket(network: str) -> socket.socket:
    argv = child(
        "resolver.workers.netlink_opener", "netlink opener", _RIGHTS, sysconfig.get_paths()["purelib"]
    )
    try:
        answer, descriptors, _ = ask_once(argv, network.encode(), _OPENER_SECONDS)
    except OSError as error:
        raise CannotKnow(f"the netlink opener did not answer: {error}; use --source scan") from None
    if descriptors:
        return socket.socket(fileno=descriptors[0])
    failed = answer or {"stage": "", "errno": 0}
    name = errno.errorcode.get(failed["errno"], "an unknown error")
    refusal = _REFUSALS.get(failed["stage"], "the netlink opener ended without a socket")
    raise CannotKnow(refusal.format(name))
