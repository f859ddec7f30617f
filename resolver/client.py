"""Client of a running daemon, over its Unix socket.

    from resolver import client

    try:
        host_pid = client.look_up("931072da1f44", 2)["host_pid"]
    except client.NotFound as error:
        ...

Everything but `get` raises a `ResolverError` with a whole sentence as text:

    NoDaemon       none answers in time; with the fix
    NotFound       404: no such container, process or route
    Ambiguous      409: several fit, ``candidates`` has them
    UsageError     400: a malformed question
    AccessDenied   403: refused for this caller
    CannotKnow     503, 429: the daemon does not know, or not now

The answers are the API's JSON documents; ``/v1/openapi.json`` describes every field, and ``CONTRIBUTING.md`` lists the
stable names. Small, because ``resolver lookup`` pays for every import.
"""

from __future__ import annotations

import os
import stat
import sys
import time

from resolver.base.errors import (
    AccessDenied,
    Ambiguous,
    CannotKnow,
    NoDaemon,
    NotFound,
    ResolverError,
    UsageError,
)

TYPE_CHECKING = False  # as typing's, which takes longer to load than this
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Generator, Iterator, Sequence
    from typing import Any

__all__ = [
    "DEFAULT_SOCKET",
    "AccessDenied",
    "Ambiguous",
    "CannotKnow",
    "NoDaemon",
    "NotFound",
    "ResolverError",
    "UsageError",
    "containers",
    "get",
    "get_changed",
    "get_json",
    "gpus",
    "look_up",
    "look_up_many",
    "processes",
    "regions",
    "reverse",
    "slots",
    "socket_of",
    "status",
    "stream_events",
    "unresolved",
]

DEFAULT_SOCKET = "/run/resolver/resolver.sock"
_SECONDS = 0.8
_MOST_BYTES = 256 << 20
#: Seconds for reading an answer that has already arrived.
_AT_ONCE = 0.001
#: The kernel's number for a user that is not mapped into this user namespace.
_UNMAPPED = 65534
#: The daemon writes to an idle stream every 30 s.
_STREAM_SILENCE = 75.0


def socket_of(given: str | None) -> str:
    """Return the daemon's socket: the given one, RESOLVER_SOCKET, or the default."""
    return given or os.environ.get("RESOLVER_SOCKET") or DEFAULT_SOCKET


def get(
    path: str, *, socket_path: str, accept: str = "application/json", seconds: float = _SECONDS
) -> tuple[int, str] | None:
    """Return status and body; None unless a trusted daemon answers completely in time."""
    try:
        channel = _connect(path, socket_path, accept, _SECONDS)
        status, body = _parse(_whole(channel, seconds))
        return status, body.decode()
    except (OSError, ValueError):
        return None


def get_json(
    path: str, socket_path: str | None = None, *, seconds: float = 5.0, question: bytes = b""
) -> dict[str, Any]:
    """Return the JSON of ``GET path``, such as ``/v1/status``; ``socket_path`` as in `socket_of`.

    With a ``question`` in JSON it is a POST. Raises the errors above.
    """
    body = get_bytes(path, socket_path, seconds=seconds, question=question)
    document: dict[str, Any] = _decode(body, socket_of(socket_path))
    return document


def get_bytes(
    path: str, socket_path: str | None = None, *, seconds: float = 5.0, question: bytes = b""
) -> bytes:
    """Return the body of ``GET path``. Raises as `get_json`, except for a body that is no JSON."""
    return _exchange(path, socket_of(socket_path), seconds, question=question)[1]


def look_up(
    container: str,
    pid: int,
    *,
    pidns: int | None = None,
    socket_path: str | None = None,
    seconds: float = 5.0,
) -> dict[str, Any]:
    """Return the process with the PID ``pid`` in a container, verified while held. Raises as `get_json`.

    ``container`` is an id, at least its first 6 characters, or ``<podUID>/<containerName>``; empty for the caller's.
    ``pidns`` is the inode of another PID namespace in it.
    """
    from urllib.parse import urlencode

    query = {"container": container, "pid": pid, "pidns": pidns}
    given = urlencode({name: value for name, value in query.items() if value not in (None, "")})
    return get_json(f"/v1/lookup?{given}", socket_path, seconds=seconds)


def look_up_many(
    pairs: Sequence[tuple[str, int]], *, socket_path: str | None = None, seconds: float = 15.0
) -> dict[str, Any]:
    """Look up at most 10,000 pairs of container and PID; the answers, in order, are numbers or reasons."""
    import json

    question = json.dumps({"pairs": pairs}).encode()
    return get_json("/v1/lookup", socket_path, seconds=seconds, question=question)


def reverse(host_pid: int, *, socket_path: str | None = None, seconds: float = 5.0) -> dict[str, Any]:
    """Return the container of a host PID, and its number in every PID namespace. Raises as `get_json`."""
    return get_json(f"/v1/reverse?host_pid={host_pid}", socket_path, seconds=seconds)


def _list(name: str, about: str) -> Callable[[str | None], dict[str, Any]]:
    def ask(socket_path: str | None = None) -> dict[str, Any]:
        return get_json(f"/v1/{name}", socket_path)

    ask.__name__, ask.__doc__ = name, f"Return {about}. Raises as `get_json`."
    return ask


containers = _list("containers", "the containers of this node")
regions = _list("regions", "HAMi's cache files, and the files that are no cache file")
slots = _list("slots", "every slot in use: owner, repair, utilization")
processes = _list("processes", "every process on every GPU")
gpus = _list("gpus", "the GPUs and their health")
unresolved = _list("unresolved", "slots and utilization samples without a known owner, by reason")
status = _list("status", "the daemon's state")


def get_changed(path: str, socket_path: str, *, tag: str, wait: int) -> tuple[str, Any] | None:
    """Return ``ETag`` and JSON once they differ from ``tag``; None if they don't within ``wait`` seconds."""
    condition = f"If-None-Match: {tag}\r\n" if tag else ""
    head, body = _exchange(f"{path}?wait={wait}", socket_path, wait + 5.0, condition)
    if not body:
        return None
    tags = [line[5:].strip() for line in head.split(b"\r\n") if line[:5].lower() == b"etag:"]
    return (tags[0].decode("latin-1") if tags else ""), _decode(body, socket_path)


def stream_events(
    socket_path: str | None = None, *, after: str = "", kinds: Sequence[str] = ()
) -> Generator[dict[str, Any]]:
    """Yield events of these kinds, first those since the ``id`` in ``after`` (``0``: all). Raises as `get_json`."""
    where = socket_of(socket_path)
    query = "&".join([*(f"kind={kind}" for kind in kinds), *([f"after={after}"] if after else [])])
    try:
        channel = _connect(f"/v1/events?{query}".rstrip("?"), where, "text/event-stream", 5.0, version="1.0")
    except (OSError, ValueError) as error:
        raise _no_daemon(where, error) from None
    with channel, channel.makefile("rb") as lines:
        try:
            yield from _events_in(lines, channel, where)
        except TimeoutError:
            raise NoDaemon(
                f"the daemon at {where} has been silent for {_STREAM_SILENCE:.0f} s: it hangs"
            ) from None
        except ConnectionError:
            return


def _events_in(lines: Any, channel: socket.socket, where: str) -> Iterator[dict[str, Any]]:
    head = b""
    while (line := lines.readline(1 << 16)).strip():
        head += line
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[1].isdigit():
        raise _no_daemon(where, ValueError("the program that answered there is not resolver"))
    if words[1] != b"200":
        raise _refusal(int(words[1]), lines.read(_MOST_BYTES))
    channel.settimeout(_STREAM_SILENCE)
    event_id, data = "", b""
    while line := lines.readline(_MOST_BYTES):
        if line.startswith(b"id: "):
            event_id = line[4:].strip().decode("ascii", "replace")
        elif line.startswith(b"data: "):
            data = line[6:]
        elif line == b"\n" and data:
            yield {"id": event_id, **_decode(data, where)}
            data = b""


def _connect(
    path: str,
    socket_path: str,
    accept: str,
    seconds: float,
    version: str = "1.1",
    headers: str = "",
    question: bytes = b"",
) -> socket.socket:
    """Connect and send the request. Raises OSError, also for an untrusted listener."""
    if not _is_trusted(os.stat(socket_path).st_uid):
        raise PermissionError(f"{socket_path} belongs to another user")
    import socket  # only if a daemon may answer: it takes longer to load than the rest of a look-up

    channel = socket.socket(socket.AF_UNIX)
    try:
        channel.settimeout(seconds)
        channel.connect(socket_path)
        peer = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)  # from the kernel, see unix(7)
        peer_pid, uid = (int.from_bytes(peer[at : at + 4], sys.byteorder) for at in (0, 4))
        if not _is_trusted(uid, peer_pid):
            raise PermissionError(f"another user listens on {socket_path}")
        headers = f"Accept: {accept}\r\n{headers}Connection: close\r\n"
        if question:
            headers += f"Content-Type: application/json\r\nContent-Length: {len(question)}\r\n"
        method = "POST" if question else "GET"
        request = f"{method} {path} HTTP/{version}\r\nHost: resolver\r\n{headers}\r\n"
        channel.sendall(request.encode("ascii") + question)
    except BaseException:
        channel.close()
        raise
    return channel


def _is_trusted(uid: int, peer_pid: int = 0) -> bool:
    """Check for root, this user, or, where the host's root is unmapped, an unmapped user outside the PID namespace."""
    if uid != _UNMAPPED:
        return uid in (0, os.geteuid())
    with open("/proc/self/uid_map", encoding="ascii") as file:
        parents = [line.split()[1] for line in file]
    # A process outside has the PID 0 here. Without a map, this user is shown as unmapped, too.
    return uid == os.geteuid() if "0" in parents else bool(parents) and peer_pid == 0


def _exchange(
    path: str, where: str, seconds: float, headers: str = "", question: bytes = b"", *, again: bool = True
) -> tuple[bytes, bytes]:
    """Return head and body of an answer; the body is empty if nothing changed (304). Raises as `get_json`."""
    try:
        channel = _connect(path, where, "application/json", seconds, headers=headers, question=question)
        answer = _whole(channel, seconds)
        head = answer.partition(b"\r\n\r\n")[0]
        if head.split(b" ", 2)[1:2] == [b"304"]:  # it has neither body nor length
            return head, b""
        code, body = _parse(answer)
    except (OSError, ValueError) as error:
        raise _no_daemon(where, error) from None
    if again and code == 403 and b'"peer_unknown"' in body:
        # Before Linux 6.5 the daemon may know a caller only if it is older than the last accepted connection.
        return _exchange(path, where, seconds, headers, question, again=False)
    if code != 200:
        raise _refusal(code, body)
    return head, body


def _whole(channel: socket.socket, seconds: float) -> bytes:
    """Return everything until the end, within ``seconds``. Raises ValueError if it is too long."""
    deadline, answer = time.monotonic() + seconds, bytearray()
    with channel:
        while True:
            left = deadline - time.monotonic()
            channel.settimeout(max(left, _AT_ONCE))
            if not (chunk := channel.recv(1 << 16)):
                return bytes(answer)
            answer += chunk
            if len(answer) > _MOST_BYTES:
                raise ValueError(f"its answer is longer than {_MOST_BYTES} bytes")
            if left <= -_AT_ONCE:
                raise TimeoutError(f"it did not finish its answer within {seconds:g} s")


def _parse(answer: bytes) -> tuple[int, bytes]:
    """Return status and body; ValueError if it is not HTTP, or cut short: half a number is another number."""
    head, separator, body = answer.partition(b"\r\n\r\n")
    status, *headers = head.split(b"\r\n")
    words = status.split(b" ", 2)
    lengths = [line[15:].strip() for line in headers if line[:15].lower() == b"content-length:"]
    if not separator or len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise ValueError("the program that answered there is not resolver")
    if len(words[1]) != 3 or lengths != [b"%d" % len(body)]:
        raise ValueError("its answer was cut short")
    return int(words[1]), body


def _no_daemon(where: str, error: Exception) -> NoDaemon:
    causes: dict[type[Exception], str] = {
        FileNotFoundError: "there is no such socket",
        ConnectionRefusedError: "no process listens there any more",
        TimeoutError: "it does not answer in time",
        BlockingIOError: "too many are waiting for it",
    }
    why = causes.get(type(error)) or getattr(error, "strerror", None)
    if isinstance(error, ConnectionRefusedError) and not stat.S_ISSOCK(os.stat(where).st_mode):
        why = "it is another kind of file, and no socket"
    refused = isinstance(error, PermissionError) and error.errno is not None
    event = "this user may not ask the daemon at" if refused else "no daemon answers at"
    return NoDaemon(f"{event} {where}: {why or error}. {_what_to_do(where, error)}")


def _what_to_do(where: str, error: Exception) -> str:
    """Suggest a fix; starting a daemon only if none runs."""
    if isinstance(error, PermissionError) and error.errno is not None:
        return "Ask as root (sudo), or as a member of its group, which resolver run --socket-group sets"
    from resolver.base.lock_holder import ailment, lock_holder

    if host_pid := lock_holder(os.path.dirname(where)):
        cause, fix = ailment(host_pid, where)
        return f"PID {host_pid} {cause}: {fix}; resolver doctor --only daemon says more"
    if isinstance(error, (TimeoutError, BlockingIOError)):
        return "It hangs, or the node is overloaded: resolver doctor --only daemon says which"
    return (
        "Start one with: resolver run (as root, on the host), or name its socket with --socket or "
        "RESOLVER_SOCKET"
    )


def _refusal(status: int, body: bytes) -> ResolverError:
    import json

    try:
        problem = json.loads(body)
        detail = str(problem["detail"])
    except (ValueError, KeyError, TypeError):
        problem, detail = {}, f"the daemon answered with HTTP status {status}"
    if status == 409:
        return Ambiguous(detail, tuple(map(str, problem.get("candidates", ()))))
    kinds: dict[int, type[ResolverError]] = {400: UsageError, 403: AccessDenied, 404: NotFound}
    return kinds.get(status, CannotKnow)(detail)


def _decode(body: bytes, where: str) -> Any:
    import json

    try:
        return json.loads(body)
    except ValueError:
        raise NoDaemon(f"the answer from {where} is no JSON: does another program listen there?") from None
