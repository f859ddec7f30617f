"""Checks of the API's sockets, for the node and for containers: asked as every client asks."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from resolver import client
from resolver.base.errors import NoDaemon, ResolverError
from resolver.doctor.findings import Finding, State, failed, ok, unknown, warning

if TYPE_CHECKING:
    from resolver.doctor.node import Node

_SECONDS = 3.0


def api(node: Node) -> Finding:
    """Check that the API's socket answers, and that commands trust it."""
    return _asked(node, node.settings.socket_path)


def tenants(node: Node) -> Finding:
    """Check that containers can reach their socket (``--tenant-socket``)."""
    path = node.settings.tenant_socket
    if not path:
        return ok("off")
    asked = _asked(node, path)
    if asked.state != State.OK or not os.path.exists(path):
        return asked
    directory = os.path.dirname(path)
    place, socket_mode = os.stat(directory), stat.S_IMODE(os.stat(path).st_mode)
    mode = stat.S_IMODE(place.st_mode)
    if place.st_uid not in (0, os.geteuid()) or mode & 0o022:
        return failed(
            f"{directory} is user {place.st_uid}'s, mode {mode:04o}",
            "containers mount it, and a user who can write to it can replace the socket",
            f"chown root:root {directory} && chmod 0755 {directory}",
        )
    if not mode & 0o001 or socket_mode & 0o006 != 0o006:
        return failed(
            f"{directory} has mode {mode:04o}, {path} {socket_mode:04o}",
            "processes in containers that are not root cannot connect",
            f"chmod 0755 {directory}; chmod 0666 {path}",
        )
    return asked


def _asked(node: Node, path: str) -> Finding:
    """Ask for the daemon's state; a refusal is an answer, too."""
    try:
        client.get_json("/v1/status", path, seconds=_SECONDS)
    except NoDaemon as error:
        return _silent(node, path, str(error))
    except ResolverError:
        pass
    info = os.stat(path)
    return ok(f"{path} answers, mode {stat.S_IMODE(info.st_mode):04o}, group {info.st_gid}")


def _silent(node: Node, path: str, error: str) -> Finding:
    found, _, fix = error.partition(". ")
    running = node.lock_holder is not None
    if "no such socket" in found and not running:
        return ok(f"{path} is not there, and no daemon that would make it")
    if "another kind of file" in found:
        cause = "a daemon does not replace a file that is not its own (api_off)"
        return failed(found, cause, f"check it, then: rm {path}")
    if "Permission denied" in found:
        return unknown(found, "root and the socket's group may ask", fix)
    if "no process listens" in found and not running:
        cause = "a daemon was killed and left its socket"
        return warning(found, cause, "nothing: the next start replaces it (resolver run)")
    cause = "its log says why (api_off), if it could not make its socket; clients trust root's sockets only"
    return failed(found, cause, f"{fix}; ls -ln {path}; ss -xlp | grep {path} shows the process")
