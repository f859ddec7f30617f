"""Who listens on a TCP port, by the kernel's list: nothing is bound to find out."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, NamedTuple

from resolver.doctor.findings import Finding, failed, ok, unknown

if TYPE_CHECKING:
    from resolver.doctor.node import Node

_LISTEN = "0A"  # TCP_LISTEN in include/net/tcp_states.h
_ANSWER_SECONDS = 2.0


class ListeningSocket(NamedTuple):
    """A listening socket: its inode, and its address in hex as ``/proc/net/tcp`` has it."""

    inode: int
    address: str

    @property
    def any_address(self) -> bool:
        """Whether it takes connections to every address."""
        return not self.address.strip("0")


def listeners(text: str, port: int) -> list[ListeningSocket]:
    """Those on a port, from the text of ``/proc/net/tcp`` or ``tcp6``."""
    found = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        address, _, number = fields[1].partition(":")
        if fields[3] == _LISTEN and int(number, 16) == port:
            found.append(ListeningSocket(int(fields[9]), address))
    return found


def metrics(node: Node) -> Finding:
    """Whether Prometheus finds ``/metrics``, or would."""
    from resolver.config import parse_address

    address = parse_address(node.settings.metrics_addr)
    if address is None:
        return ok("off")
    host, port = address
    if not port:
        return ok("a port that the kernel chooses: metrics_on in the daemon's log has it")
    daemon = node.status["host_pid"] if node.status else node.lock_holder
    # In the daemon's network namespace, if there is a daemon: a pod without hostNetwork has its own.
    whose = str(daemon) if daemon is not None else "self"
    found = _listening(node, whose, port, host)
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
            "it could not take the port (metrics_off in its log), has another --metrics-addr, or is only starting",
            "find metrics_off in its log, which has the reason; it is retried every few seconds",
        )
    return _judge(node, found, address, daemon)


def _listening(node: Node, whose: str, port: int, host: str) -> list[ListeningSocket] | None:
    found: list[ListeningSocket] = []
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
    import socket

    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            packed = socket.inet_pton(family, host)
            words = [packed[at : at + 4] for at in range(0, len(packed), 4)]
            if any(packed):
                return frozenset({"".join(f"{int.from_bytes(word, 'little'):08X}" for word in words)})
    return frozenset()


def _judge(node: Node, found: list[ListeningSocket], address: tuple[str, int], daemon: int | None) -> Finding:
    inodes, port = {each.inode for each in found}, address[1]
    if daemon is not None and _has(node, daemon, inodes):
        if _network(node, daemon) != _network(node, "self"):
            return ok(f"the daemon (PID {daemon}) listens on port {port}, in a network namespace of its own")
        return _ask(address, daemon)
    owner = next((each for each in node.procfs.entries() if _has(node, each, inodes)), None)
    if owner is None and daemon is not None:
        return unknown(
            f"port {port} is taken, by the daemon or by another",
            "whose it is, is hidden from this user",
            "run this as root",
        )
    who = (
        f"PID {owner} ({_name(node, owner)})" if owner is not None else "a process that this user may not see"
    )
    return failed(
        f"port {port} is taken by {who}",
        "the daemon cannot serve metrics there: it logs metrics_off, goes on without, and tries again",
        f"ss -ltnp 'sport = :{port}'; stop that one, or choose another port, and change Prometheus's target: "
        f"--metrics-addr :{port + 1}",
    )


def _network(node: Node, host_pid: int | str) -> str:
    """A process's network namespace; empty if it is unknown."""
    with contextlib.suppress(OSError):
        return os.readlink(f"{node.procfs.root}/{host_pid}/ns/net")
    return ""


def _ask(address: tuple[str, int], daemon: int) -> Finding:
    import http.client

    # Not by name: in a container nothing may be there that knows one. Every address includes this one.
    host, port = address[0] or "127.0.0.1", address[1]
    connection = http.client.HTTPConnection(host, port, timeout=_ANSWER_SECONDS)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/healthz")
            answer = connection.getresponse()
            status, said = answer.status, answer.read(200).decode("utf-8", "replace").strip()
        except (OSError, http.client.HTTPException) as error:
            status, said = 0, str(error) or type(error).__name__
    if status == http.client.OK:
        return ok(f"the daemon (PID {daemon}) answers on port {port}")
    return failed(
        f"the daemon (PID {daemon}) listens on port {port}, and /healthz is not well: {said}",
        "it hangs, or its passes over the slots do",
        f"curl -sv http://{host}:{port}/healthz; cat /proc/{daemon}/stack; then restart it",
    )


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
    """A process's name and user."""
    import psutil

    psutil.PROCFS_PATH = node.procfs.root
    try:
        process = psutil.Process(host_pid)
        return f"{process.name()} of user {process.username()}"
    except psutil.Error:
        return "ended"
