"""The Unix sockets of a daemon: that of the API, and the broker's. Looked at and connected to, never replaced."""

from __future__ import annotations

import os
import socket
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
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        if node.lock_holder is None:
            return ok(f"{path} is not there, and no daemon that would make it")
        return failed(
            f"{path} is not there, though PID {node.lock_holder} runs",
            "it could not make its socket (api_off in its log), or somebody removed it",
            f"look for api_off in its log; ls -ld {os.path.dirname(path)}; then restart it",
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
            f"look at it, then: rm {path}",
        )
    if info.st_uid not in (0, os.geteuid()):
        return failed(
            f"{path} belongs to user {info.st_uid}",
            "neither root's nor this user's: no command believes what answers there",
            f"ls -ln {path}; rm {path}, restart the daemon, and keep others out of {os.path.dirname(path)}",
        )
    return _connect(node, path, info)


def _connect(node: Node, path: str, info: os.stat_result) -> Finding:
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
    if node.status is None:
        return _silent(path)
    mode = f"mode {stat.S_IMODE(info.st_mode):04o}, group {info.st_gid}"
    return ok(f"{path}, {mode}, connected in {(time.monotonic() - began) * 1e3:.0f} ms")


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
