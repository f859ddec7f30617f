"""Asks a running daemon, over its Unix socket. Small, since ``resolver lookup`` pays for every import."""

from __future__ import annotations

import os
import socket
import sys
import time

DEFAULT_SOCKET = "/run/resolver/resolver.sock"
_SECONDS = 0.8
_MOST_BYTES = 1 << 20


def get(path: str, *, socket_path: str, accept: str = "application/json") -> tuple[int, str] | None:
    """Status and body of ``GET path``; None if no daemon answers there, in time and to the last byte.

    A socket that does not belong to root or to the asking user is not believed, nor is one that another user
    listens on.
    """
    deadline = time.monotonic() + _SECONDS
    try:
        if os.stat(socket_path).st_uid not in (0, os.geteuid()):
            return None
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(_SECONDS)
            channel.connect(socket_path)
            if _listener(channel) not in (0, os.geteuid()):
                return None
            request = (
                f"GET {path} HTTP/1.1\r\nHost: resolver\r\nAccept: {accept}\r\nConnection: close\r\n\r\n"
            )
            channel.sendall(request.encode("ascii"))
            answer = b""
            while chunk := channel.recv(1 << 16):
                answer += chunk
                # The time limit is for all of it: one byte now and then keeps nobody waiting.
                channel.settimeout(max(0.001, deadline - time.monotonic()))
                if time.monotonic() > deadline or len(answer) > _MOST_BYTES:
                    return None
    except (OSError, ValueError):
        return None
    return _parse(answer)


def _listener(channel: socket.socket) -> int:
    """The user who listens, by the kernel's word (SO_PEERCRED in unix(7): pid, uid, gid)."""
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], sys.byteorder)


def _parse(answer: bytes) -> tuple[int, str] | None:
    """Status and body; None if it is no HTTP, or cut short: half of a number is another number."""
    head, separator, body = answer.partition(b"\r\n\r\n")
    status, *headers = head.split(b"\r\n")
    words = status.split(b" ", 2)
    if not separator or len(words) < 2 or not words[0].startswith(b"HTTP/1.") or len(words[1]) != 3:
        return None
    lengths = [line[15:].strip() for line in headers if line[:15].lower() == b"content-length:"]
    if not words[1].isdigit() or lengths != [b"%d" % len(body)]:
        return None
    try:
        return int(words[1]), body.decode()
    except UnicodeDecodeError:
        return None
