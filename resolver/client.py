"""Asks a running daemon, over its Unix socket. Small, since ``resolver lookup`` pays for every import."""

from __future__ import annotations

import os
import socket

DEFAULT_SOCKET = "/run/resolver/resolver.sock"
_SECONDS = 1.0


def get(path: str, *, socket_path: str, accept: str = "application/json") -> tuple[int, str] | None:
    """Status and body of ``GET path``; None if no daemon answers there in time.

    A socket that does not belong to root or to the asking user is not believed.
    """
    try:
        if os.stat(socket_path).st_uid not in (0, os.geteuid()):
            return None
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(_SECONDS)
            channel.connect(socket_path)
            request = (
                f"GET {path} HTTP/1.1\r\nHost: resolver\r\nAccept: {accept}\r\nConnection: close\r\n\r\n"
            )
            channel.sendall(request.encode("ascii"))
            answer = b""
            while chunk := channel.recv(1 << 16):
                answer += chunk
    except (OSError, UnicodeEncodeError):
        return None
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        return None
    return int(words[1]), body.decode("utf-8", "replace")
