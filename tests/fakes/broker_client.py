"""A client of the host PID broker, as strict as HAMi's: it trusts only answers of the node's root.

It uses only the standard library, because it also runs inside containers, as a script.

    python broker_client.py PATH [--read-only]   prints {"status": 0, "number": 4711} or {"error": "..."}
"""

import json
import os
import socket
import stat
import struct
import sys

REQUEST = b"HPID\x00\x01\x00\x01"
TIMEOUT_S = 60.0


class Distrust(Exception):
    """The place, the server or its answer breaks the protocol."""


def connect(path: str, *, read_only: bool = False) -> socket.socket:
    directory = os.path.dirname(path)
    folder, node = os.lstat(directory), os.lstat(path)
    if not stat.S_ISDIR(folder.st_mode) or folder.st_uid != 0 or folder.st_mode & 0o022:
        raise Distrust(f"{directory} is not root's alone")
    if not stat.S_ISSOCK(node.st_mode) or node.st_uid != 0:
        raise Distrust(f"{path} is no socket of root's")
    if read_only and not os.statvfs(directory).f_flag & os.ST_RDONLY:
        raise Distrust(f"{directory} is not mounted read-only")
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(TIMEOUT_S)
    try:
        connection.connect(path)
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != 0:
            raise Distrust(f"user {uid} listens at {path}")
    except BaseException:
        connection.close()
        raise
    return connection


def receive(connection: socket.socket) -> bytes:
    answer = b""
    while chunk := connection.recv(64):
        answer += chunk
    return answer


def parse(answer: bytes) -> tuple[int, int]:
    """Return the status and number of an answer of exactly twelve bytes."""
    if len(answer) != 12 or answer[:6] != b"HPID\x00\x01":
        raise Distrust(f"no answer of this protocol: {answer!r}")
    status, number = int.from_bytes(answer[6:8], "big"), int.from_bytes(answer[8:], "big")
    if status not in (0, 1) or (status == 0) != (number != 0):
        raise Distrust(f"status {status} with the number {number}")
    return status, number


def ask(path: str, *, read_only: bool = False) -> tuple[int, int]:
    with connect(path, read_only=read_only) as connection:
        connection.sendall(REQUEST)
        return parse(receive(connection))


if __name__ == "__main__":
    try:
        found, number = ask(sys.argv[1], read_only="--read-only" in sys.argv)
        print(json.dumps({"status": found, "number": number}), flush=True)
    except (OSError, Distrust) as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
    sys.stdin.readline()
