"""The Unix sockets of a daemon: the API's, the containers' and the broker's. Connected to, never replaced."""

from __future__ import annotations

import os
import stat
import sys
import time
from typing import TYPE_CHECKING

from resolver.doctor.findings import Finding, failed, ok, unknown, warning

if TYPE_CHECKING:
    from resolver.doctor.node import Node

_CONNECT_SECONDS = 1.0


def api(node: Node) -> Finding:
    """Whether the API's socket is what it should be."""
    path = node.settings.socket_path
    info = _look(node, path)
    if isinstance(info, Finding):
        return info
    took = _connect(node, path, info)
    if isinstance(took, Finding):
        return took
    if node.status is None:
        return _silent(path)
    return ok(
        f"{path}, mode {stat.S_IMODE(info.st_mode):04o}, group {info.st_gid}, connected in {took * 1e3:.0f} ms"
    )


def tenants(node: Node) -> Finding:
    """Whether containers can reach the socket that is theirs (``--tenant-socket``)."""
    path = node.settings.tenant_socket
    if not path:
        return ok("off")
    info = _look(node, path)
    if isinstance(info, Finding):
        return info
    directory = os.path.dirname(path) or "."
    place = os.stat(directory)
    mode = stat.S_IMODE(place.st_mode)
    if place.st_uid not in (0, os.geteuid()) or mode & 0o022:
        return failed(
            f"{directory} is user {place.st_uid}'s, mode {mode:04o}",
            "containers mount it, and who can write to it can put a socket of their own there",
            f"chown root:root {directory} && chmod 0755 {directory}",
        )
    if not mode & 0o001 or stat.S_IMODE(info.st_mode) & 0o006 != 0o006:
        return failed(
            f"{directory} has mode {mode:04o}, {path} {stat.S_IMODE(info.st_mode):04o}",
            "processes in containers that are not root cannot connect",
            f"chmod 0755 {directory}; chmod 0666 {path}",
        )
    took = _connect(node, path, info)
    return took if isinstance(took, Finding) else ok(f"{path}, connected in {took * 1e3:.0f} ms")


def _look(node: Node, path: str) -> Finding | os.stat_result:
    """What is at the socket's place, without connecting."""
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        if node.lock_holder is None:
            return ok(f"{path} is not there, and no daemon that would make it")
        return failed(
            f"{path} is not there, though PID {node.lock_holder} runs",
            "it could not make its socket (api_off in its log), or somebody removed it",
            f"find api_off in its log; ls -ld {os.path.dirname(path)}; then restart it",
        )
    except OSError as error:
        return unknown(
            f"{path} cannot be seen ({error.strerror})",
            "a directory above it is closed to this user",
            "run this as root, or give the daemon's --socket",
        )
    if not stat.S_ISSOCK(info.st_mode):
        return failed(
            f"{path} is no socket",
            "another file has its name, and a daemon does not replace what is not its own (api_off)",
            f"check it, then: rm {path}",
        )
    if info.st_uid not in (0, os.geteuid()):
        return failed(
            f"{path} belongs to user {info.st_uid}",
            "neither root's nor this user's: no command believes what answers there",
            f"ls -ln {path}; rm {path}, restart the daemon, and keep others out of {os.path.dirname(path)}",
        )
    return info


def _connect(node: Node, path: str, info: os.stat_result) -> Finding | float:
    """Seconds that it took, once it is known that no stranger listens."""
    import socket

    began = time.monotonic()
    try:
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(_CONNECT_SECONDS)
            channel.connect(path)
            listener = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    except OSError as error:
        return _refused(node, path, info, error)
    uid = int.from_bytes(listener[4:8], sys.byteorder)
    if uid not in (0, os.geteuid()):
        return failed(
            f"user {uid} listens at {path}",
            "neither root nor this user: no command believes what answers there",
            f"ss -xlp | grep {path} shows who; stop it, rm {path}, restart the daemon",
        )
    return time.monotonic() - began


def _refused(node: Node, path: str, info: os.stat_result, error: OSError) -> Finding:
    """Why there was no connection."""
    if isinstance(error, ConnectionRefusedError):
        return _stale(node, path)
    if isinstance(error, PermissionError):
        return unknown(
            f"{path} is refused to user {os.geteuid()}",
            f"its mode is {stat.S_IMODE(info.st_mode):04o}, its group {info.st_gid}: root and that group may ask",
            "run this as root, or start the daemon with --socket-group and a group of this user",
        )
    if isinstance(error, (TimeoutError, BlockingIOError)):
        return _silent(path)
    return unknown(f"{path}: {error.strerror}", "the kernel refuses the connection", f"ls -l {path}")


def _silent(path: str) -> Finding:
    return failed(
        f"{path} does not answer",
        "who listens there accepts no connection, or does not say how it is: it hangs, or is no resolver",
        f"ss -xlp | grep {path} shows who listens; restart it",
    )


def _stale(node: Node, path: str) -> Finding:
    if node.lock_holder is not None:
        return failed(
            f"nobody listens at {path}, though PID {node.lock_holder} runs",
            "another daemon's socket was there when it started, and is left over now (api_off in its log)",
            "restart the daemon: it replaces a socket that nobody listens on",
        )
    return warning(
        f"nobody listens at {path}",
        "a daemon was killed and left its socket",
        "nothing: the next start replaces it (resolver run)",
    )


def broker(node: Node) -> Finding:
    """Whether HAMi's clients would believe the broker's socket."""
    path = node.settings.broker
    if not path:
        return ok("off")
    directory = os.path.dirname(path) or "."
    try:
        place = os.stat(directory)
    except OSError as error:
        return warning(
            f"{directory}: {error.strerror}",
            "the broker's directory is made by the daemon when it starts, if it can be",
            f"start the daemon; or: install -d -m 0711 -o root -g root {directory}",
        )
    if place.st_uid != 0 or place.st_mode & 0o022:
        return failed(
            f"{directory} is user {place.st_uid}'s, mode {stat.S_IMODE(place.st_mode):04o}",
            "HAMi's clients believe a broker only in a directory of root's that nobody else can write to",
            f"chown root:root {directory} && chmod 0711 {directory}",
        )
    if not os.path.exists(path):
        judge = failed if node.status else warning
        return judge(
            f"{path} is not there",
            "no daemon runs that would make it, or it could not (broker_off in its log)",
            f"start the daemon with --broker {path}, and read its log",
        )
    return ok(f"{path} in a directory of root's")
