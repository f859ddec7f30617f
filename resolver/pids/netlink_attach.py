"""Attaches to the proc connector: the socket from the opener, the acknowledgement, the self-test.

The kernel ignores a refused request silently, so only an observed success counts. System errors are translated here.
"""

from __future__ import annotations

import errno
import os
import socket
import sysconfig
import time
from typing import TYPE_CHECKING

from resolver.base.errors import CannotKnow
from resolver.linux.host_view import require_host_view
from resolver.linux.pidfd import fetch
from resolver.pids.proc_events import NEEDS_NET_ADMIN, NOT_HOST_NETWORK, EventStream
from resolver.workers.spawn import child, spawn

if TYPE_CHECKING:
    import subprocess

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
    """Return a stream that delivers, proven by a process seen to start and end; `CannotKnow` otherwise."""
    _require_initial_namespaces(procfs)
    opener, channel = _start_opener()
    try:
        stream = EventStream(_receive_socket(opener.pid, channel, _host_network(procfs) or "ours"))
        try:
            stream.grow_buffer(buffer_bytes)
            stream.listen(_ACK_SECONDS)
            _test(stream, opener, channel)
        except BaseException:
            stream.close()
            raise
    finally:
        channel.close()
        opener.kill()
        opener.wait()
    return stream


def _require_initial_namespaces(procfs: Procfs) -> None:
    require_host_view(procfs)
    if os.stat(f"{procfs.root}/self/ns/user").st_ino != _USER_NS_INIT:
        raise CannotKnow(
            "the proc connector ignores requests from a user namespace, and this process is in one: run it without "
            "(Kubernetes: hostUsers: true; Docker: --userns=host), or use --source scan"
        )


def _host_network(procfs: Procfs) -> str | None:
    """Return the host's network namespace to enter, None if this process is, or may be, already in it.

    It is read from kthreadd, always PID 2 (rest_init in init/main.c): it never leaves the initial namespaces.
    """
    path = f"{procfs.root}/2/ns/net"
    try:
        ours, hosts = os.stat(f"{procfs.root}/self/ns/net"), os.stat(path)
    except OSError:  # without CAP_SYS_PTRACE: the kernel will say if it is another
        return None
    return None if (ours.st_dev, ours.st_ino) == (hosts.st_dev, hosts.st_ino) else path


def _start_opener() -> tuple[subprocess.Popen[bytes], socket.socket]:
    argv = child(
        "resolver.workers.netlink_opener", "netlink opener", _RIGHTS, sysconfig.get_paths()["purelib"]
    )
    try:
        opener, channel = spawn(argv)
    except OSError as error:
        raise CannotKnow(f"the netlink opener could not be started: {error.strerror}") from None
    channel.settimeout(_OPENER_SECONDS)
    return opener, channel


def _receive_socket(host_pid: int, channel: socket.socket, network: str) -> socket.socket:
    try:
        channel.send(network.encode())
        message, descriptors, _flags, _address = socket.recv_fds(channel, 256, 1)
        stage, _, number = message.decode().partition(":")
        if stage == "fetch":
            descriptors = fetch(host_pid, [int(number)])
    except OSError as error:
        raise CannotKnow(f"the netlink opener did not answer: {error}; use --source scan") from None
    if descriptors:
        return socket.socket(fileno=descriptors[0])
    name = errno.errorcode.get(int(number or 0), "an unknown error")
    raise CannotKnow(_REFUSALS.get(stage, "the netlink opener ended without a socket").format(name))


def _test(stream: EventStream, opener: subprocess.Popen[bytes], channel: socket.socket) -> None:
    """Check that start and end of a known process are really reported."""
    try:
        channel.send(b"go")
        host_pid = int(channel.recv(32))
    except (OSError, ValueError):
        raise CannotKnow(
            f"the netlink opener ended early (code {opener.poll()}); use --source scan"
        ) from None
    deadline = time.monotonic() + _ACK_SECONDS
    while stream.drain() or time.monotonic() < deadline:
        if host_pid in stream.touched and host_pid in stream.ended:
            return
        time.sleep(0.001)
    raise CannotKnow(
        f"the kernel acknowledged, but did not report process {host_pid} within {_ACK_SECONDS:g} s: "
        "process events do not work here; use --source scan"
    )
