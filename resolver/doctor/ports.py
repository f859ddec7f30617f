"""Who listens on a TCP port, by the kernel's list: nothing is bound to find out."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
from typing import TYPE_CHECKING, NamedTuple

from resolver.config import OFF
from resolver.doctor.findings import Finding, failed, ok, unknown
from resolver.errors import AccessDenied, ProcessGone

if TYPE_CHECKING:
    from resolver.doctor.node import Node

_LISTEN = "0A"  # TCP_LISTEN in include/net/tcp_states.h
_ANSWER_SECONDS = 2.0


class Listener(NamedTuple):
    """A listening socket: its inode, and its address in hex as ``/proc/net/tcp`` has it."""

    inode: int
    address: str

    @property
    def any_address(self) -> bool:
        """Whether it takes connections to every address."""
        return not self.address.strip("0")


def listeners(text: str, port: int) -> list[Listener]:
    """Those on a port, from the text of ``/proc/net/tcp`` or ``tcp6``."""
    found = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        address, _, number = fields[1].partition(":")
        if fields[3] == _LISTEN and int(number, 16) == port:
            found.append(Listener(int(fields[9]), address))
    return found


def metrics(node: Node) -> Finding:
    """Whether Prometheus finds ``/metrics``, or would."""
    address = node.settings.metrics_addr
    if address == OFF:
        return ok("off")
    host, _, number = address.rpartition(":")
    if not number.isdigit() or not 0 < int(number) < 1 << 16:
        return failed(
            f"metrics_addr is {address!r}",
            "it is no HOST:PORT, so the daemon cannot serve metrics",
            "write it as :9395 (every address), 127.0.0.1:9395 or off",
        )
    daemon = node.status["host_pid"] if node.status else node.lock_holder
    port = int(number)
    # In the daemon's network namespace, if there is a daemon: a pod without hostNetwork has its own.
    whose = str(daemon) if daemon is not None else "self"
    found = _listening(node, whose, port, host.strip("[]"))
    if found is None:
        return unknown(
            f"{node.procfs.root}/{whose}/net/tcp cannot be read",
            "the kernel's list of listeners is refused",
            "run this as root",
        )
    if not found:
        if daemon is None:
            return ok(f"port {port} is free")
        return failed(
            f"nobody listens on port {port}, though the daemon (PID {daemon}) runs",
            "it could not take the port when it started (metrics_off in its log), or has another --metrics-addr",
            "look for metrics_off in its log; restart it once the port is free",
        )
    return _judge(node, found, port, daemon, whose)


def _listening(node: Node, whose: str, port: int, host: str) -> list[Listener] | None:
    found: list[Listener] = []
    readable = False
    for name in ("tcp", "tcp6"):
        with (
            contextlib.suppress(OSError),
            open(f"{node.procfs.root}/{whose}/net/{name}", encoding="ascii") as file,
        ):
            found += listeners(file.read(), port)
            readable = True
    if not readable:
        return None
    wanted = _in_hex(host)
    return [each for each in found if not wanted or each.any_address or each.address in wanted]


def _in_hex(host: str) -> frozenset[str]:
    """An address as the kernel's list has it; none for every address, or for a name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            packed = socket.inet_pton(family, host)
            words = [packed[at : at + 4] for at in range(0, len(packed), 4)]
            if any(packed):
                return frozenset({"".join(f"{int.from_bytes(word, 'little'):08X}" for word in words)})
    return frozenset()


def _judge(node: Node, found: list[Listener], port: int, daemon: int | None, whose: str) -> Finding:
    inodes = {each.inode for each in found}
    if daemon is not None and _has(node, daemon, inodes):
        if os.path.realpath(f"{node.procfs.root}/{whose}/ns/net") != os.path.realpath(
            f"{node.procfs.root}/self/ns/net"
        ):
            return ok(f"the daemon (PID {daemon}) listens on port {port}, in a network namespace of its own")
        return _ask(port, daemon)
    owner = next((each for each in node.procfs.entries() if _has(node, each, inodes)), None)
    who = (
        f"PID {owner} ({_name(node, owner)})"
        if owner is not None
        else "a process that is not shown to this user"
    )
    if owner is None and daemon is not None:
        return unknown(
            f"port {port} is taken, by the daemon or by another",
            "whose it is, is hidden from this user",
            "run this as root",
        )
    return failed(
        f"port {port} is taken by {who}",
        "the daemon cannot serve metrics there: it logs metrics_off and goes on without",
        f"ss -ltnp 'sport = :{port}'; stop that one, or choose another port, and tell Prometheus: "
        f"--metrics-addr :{port + 1}",
    )


def _ask(port: int, daemon: int) -> Finding:
    connection = http.client.HTTPConnection("localhost", port, timeout=_ANSWER_SECONDS)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/healthz")
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            return failed(
                f"the daemon (PID {daemon}) listens on port {port} and does not answer",
                f"{error or type(error).__name__}: it hangs, or is bound to another address than localhost",
                f"curl -sv localhost:{port}/healthz; then restart the daemon",
            )
    return ok(f"the daemon (PID {daemon}) answers on port {port}: /healthz {status}")


def _has(node: Node, host_pid: int, inodes: set[int]) -> bool:
    """Whether a process has one of these sockets among its descriptors (needs CAP_SYS_PTRACE for others')."""
    wanted, directory = {f"socket:[{inode}]" for inode in inodes}, f"{node.procfs.root}/{host_pid}/fd"
    try:
        for name in os.listdir(directory):
            with contextlib.suppress(OSError):
                if os.readlink(f"{directory}/{name}") in wanted:
                    return True
    except OSError:
        return False
    return False


def _name(node: Node, host_pid: int) -> str:
    try:
        return node.procfs.comm(host_pid)
    except (ProcessGone, AccessDenied):
        return "ended"
