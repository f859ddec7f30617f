"""Asks a running daemon, over its Unix socket: for programs of anybody's, and for our commands.

    from resolver import client

    try:
        host_pid = client.look_up("931072da1f44", 2)["host_pid"]
    except client.NotFound as error:
        ...

Everything but `get` raises errors whose text is a whole sentence:

    NoDaemon       none answers there in time; what to do
    NotFound       404: there is no such container, process or route
    Ambiguous      409: several fit, ``candidates`` has them
    UsageError     400: the question cannot be understood
    AccessDenied   403: this may not be asked from here
    CannotKnow     503, 429: the daemon does not know, or not now

All are a `ResolverError`. ``docs/stability.md`` says what is promised of the names in ``__all__`` and of the fields in
`resolver.client_types`. Small, since ``resolver lookup`` pays for every import.
"""

from __future__ import annotations

import os
import sys
import time

from resolver.errors import AccessDenied, Ambiguous, CannotKnow, NoDaemon, NotFound, ResolverError, UsageError

TYPE_CHECKING = False  # as typing's, which takes longer to load than this
if TYPE_CHECKING:
    import socket
    from collections.abc import Generator, Iterator, Sequence
    from typing import Any, Self

    from resolver import client_types as answers

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
_MOST_BYTES = 1 << 20
_MOST_JSON_BYTES = 256 << 20
#: As long as reading takes of what is there already.
_AT_ONCE = 0.001
#: The daemon says something to a silent stream every 30 s.
_STREAM_SILENCE = 75.0


def socket_of(given: str | None) -> str:
    """Where the daemon is to be asked: what was given, RESOLVER_SOCKET, or the usual place."""
    return given or os.environ.get("RESOLVER_SOCKET") or DEFAULT_SOCKET


def get(
    path: str, *, socket_path: str, accept: str = "application/json", seconds: float = _SECONDS
) -> tuple[int, str] | None:
    """Status and body of ``GET path``; None if no daemon answers there, in time and to the last byte.

    A socket that does not belong to root or to the asking user is not believed, nor is one that another user
    listens on.
    """
    asked = put(path, socket_path=socket_path, accept=accept)
    if asked is None:
        return None
    with asked:
        try:
            return asked.answer(seconds)
        except TimeoutError:
            return None


def put(path: str, *, socket_path: str, accept: str = "application/json") -> Asked | None:
    """Ask for ``GET path`` and wait for nothing; None if no daemon takes it, or none that is believed."""
    try:
        return Asked(_connect(path, socket_path, accept, _SECONDS))
    except (OSError, ValueError):
        return None


def get_json(path: str, socket_path: str | None = None, *, seconds: float = 5.0) -> Any:
    """The JSON of ``GET path``, such as ``/v1/status``; ``socket_path`` as in `socket_of`.

    Raises `NoDaemon` with what to do if none answers within that time. What the daemon refuses is raised as the error
    that it stands for: NotFound (404), Ambiguous (409), UsageError (400), AccessDenied (403), CannotKnow (503).
    """
    return _json(path, socket_path, seconds)


def _json(path: str, socket_path: str | None, seconds: float, question: bytes = b"") -> Any:
    where = socket_of(socket_path)
    try:
        code, body = _parse(
            _ask(path, where, "application/json", seconds, _MOST_JSON_BYTES, question=question)
        )
    except (OSError, ValueError) as error:
        raise _no_daemon(where, error) from None
    if code not in (200, 304):
        raise _refusal(code, body)
    return _decode(body, where)


def look_up(
    container: str,
    pid: int,
    *,
    pidns: int | None = None,
    socket_path: str | None = None,
    seconds: float = 5.0,
) -> answers.FoundProcess:
    """The process that a container knows as ``pid``, verified while it was held. Raises as `get_json`.

    ``container`` is an id, 6 or more characters of its beginning, or ``<podUID>/<containerName>``; empty for the
    asking process's own, where that may ask about no other. ``pidns`` is the inode of another PID namespace in it.
    """
    from urllib.parse import urlencode

    query = {"container": container, "pid": pid, "pidns": pidns}
    given = urlencode({name: value for name, value in query.items() if value not in (None, "")})
    found: answers.FoundProcess = get_json(f"/v1/lookup?{given}", socket_path, seconds=seconds)
    return found


def look_up_many(
    pairs: Sequence[tuple[str, int]], *, socket_path: str | None = None, seconds: float = 15.0
) -> answers.PairAnswers:
    """The same for up to 10,000 pairs of container and PID, answered in their order: each a number or a reason."""
    import json

    question = json.dumps({"pairs": pairs}).encode()
    document: answers.PairAnswers = _json("/v1/lookup", socket_path, seconds, question)
    return document


def reverse(
    host_pid: int, *, socket_path: str | None = None, seconds: float = 5.0
) -> answers.ReversedProcess:
    """Whose process a host PID is, and its number in every PID namespace. Raises as `get_json`."""
    found: answers.ReversedProcess = get_json(
        f"/v1/reverse?host_pid={host_pid}", socket_path, seconds=seconds
    )
    return found


def containers(socket_path: str | None = None) -> answers.Containers:
    """The containers that run on this node. Raises as `get_json`, as do all below."""
    document: answers.Containers = get_json("/v1/containers", socket_path)
    return document


def regions(socket_path: str | None = None) -> answers.Regions:
    """HAMi's cache files, and the files that are no cache file."""
    document: answers.Regions = get_json("/v1/regions", socket_path)
    return document


def slots(socket_path: str | None = None) -> answers.Slots:
    """Every slot in use: owner, repair, utilization."""
    document: answers.Slots = get_json("/v1/slots", socket_path)
    return document


def processes(socket_path: str | None = None) -> answers.Processes:
    """Every process on every GPU."""
    document: answers.Processes = get_json("/v1/processes", socket_path)
    return document


def gpus(socket_path: str | None = None) -> answers.Gpus:
    """The GPUs and their health."""
    document: answers.Gpus = get_json("/v1/gpus", socket_path)
    return document


def unresolved(socket_path: str | None = None) -> answers.Unresolved:
    """Slots and utilization samples whose owner is unknown, by reason."""
    document: answers.Unresolved = get_json("/v1/unresolved", socket_path)
    return document


def status(socket_path: str | None = None) -> answers.Status:
    """How the daemon is."""
    document: answers.Status = get_json("/v1/status", socket_path)
    return document


def get_changed(path: str, socket_path: str, *, tag: str, wait: int) -> tuple[str, Any] | None:
    """``ETag`` and JSON of ``GET path`` as soon as they are others than ``tag``.

    None if there are none within ``wait`` seconds. Raises as `get_json`.
    """
    known = f"If-None-Match: {tag}\r\n" if tag else ""
    try:
        answer = _ask(
            f"{path}?wait={wait}", socket_path, "application/json", wait + 5.0, _MOST_JSON_BYTES, known
        )
        head = answer.partition(b"\r\n\r\n")[0]
        if head.split(b" ", 2)[1:2] == [b"304"]:  # which has no body, and says no length
            return None
        status, body = _parse(answer)
    except (OSError, ValueError) as error:
        raise _no_daemon(socket_path, error) from None
    if status != 200:
        raise _refusal(status, body)
    tags = [line[5:].strip() for line in head.split(b"\r\n") if line[:5].lower() == b"etag:"]
    return (tags[0].decode("latin-1") if tags else ""), _decode(body, socket_path)


def stream_events(
    socket_path: str | None = None, *, after: str = "", kinds: Sequence[str] = ()
) -> Generator[dict[str, Any]]:
    """Events as they happen, each ``{"id", "number", "at", "kind", "fields"}``; ends when the daemon does.

    ``after`` is the ``id`` of the last event that is known: those since come first, as far as they are kept; ``0``
    gives all that are kept. ``kinds`` lets only those through. Raises as `get_json`.
    """
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
        raise _no_daemon(where, ValueError("what answered there is no resolver"))
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
    """A connection with the request sent. Raises OSError, also for a listener that is not to be believed."""
    if os.stat(socket_path).st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{socket_path} belongs to another user")
    import socket  # only where there is one: it takes longer to load than the rest of a look-up without a daemon

    channel = socket.socket(socket.AF_UNIX)
    try:
        channel.settimeout(seconds)
        channel.connect(socket_path)
        if _listener(channel) not in (0, os.geteuid()):
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


def _ask(
    path: str,
    socket_path: str,
    accept: str,
    seconds: float,
    most: int,
    headers: str = "",
    question: bytes = b"",
) -> bytes:
    """All that is answered. Raises OSError, and ValueError if it is too much."""
    with Asked(
        _connect(path, socket_path, accept, seconds, headers=headers, question=question), most
    ) as asked:
        return asked.whole(seconds)


class Asked:
    """A question that was put to the daemon, and as much of its answer as has come."""

    def __init__(self, channel: socket.socket, most: int = _MOST_BYTES) -> None:
        self._channel = channel
        self._most = most
        self._said = bytearray()

    def whole(self, seconds: float) -> bytes:
        """All that is answered. TimeoutError: not yet, ask again; any other OSError, and ValueError if it is too much.

        The time limit is for all of it: one byte now and then keeps nobody waiting.
        """
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            self._channel.settimeout(max(left, _AT_ONCE))
            if not (chunk := self._channel.recv(1 << 16)):
                return bytes(self._said)
            self._said += chunk
            if len(self._said) > self._most:
                raise ValueError(f"its answer is longer than {self._most} bytes")
            if left <= -_AT_ONCE:
                raise TimeoutError(f"it did not finish its answer within {seconds:g} s")

    def answer(self, seconds: float) -> tuple[int, str] | None:
        """Status and body; None if what comes is no answer. TimeoutError: not yet, ask again."""
        try:
            status, body = _parse(self.whole(seconds))
            return status, body.decode()
        except TimeoutError:
            raise
        except (OSError, ValueError):
            return None

    def hang_up(self) -> None:
        """Wait no longer: for another thread than the one that waits. What has come is no whole answer then."""
        import socket

        self._channel.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._channel.close()


def _listener(channel: socket.socket) -> int:
    """The user who listens, by the kernel's word (SO_PEERCRED in unix(7): pid, uid, gid)."""
    import socket

    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], sys.byteorder)


def _parse(answer: bytes) -> tuple[int, bytes]:
    """Status and body; ValueError if it is no HTTP, or cut short: half of a number is another number."""
    head, separator, body = answer.partition(b"\r\n\r\n")
    status, *headers = head.split(b"\r\n")
    words = status.split(b" ", 2)
    lengths = [line[15:].strip() for line in headers if line[:15].lower() == b"content-length:"]
    if not separator or len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise ValueError("what answered there is no resolver")
    if len(words[1]) != 3 or lengths != [b"%d" % len(body)]:
        raise ValueError("its answer was cut short")
    return int(words[1]), body


def _no_daemon(where: str, error: Exception) -> NoDaemon:
    known: dict[type[Exception], str] = {
        FileNotFoundError: "there is no such socket",
        ConnectionRefusedError: "nobody listens there any more",
        TimeoutError: "it does not answer in time",
        BlockingIOError: "too many are waiting for it",
    }
    why = known.get(type(error)) or getattr(error, "strerror", None) or str(error)
    return NoDaemon(f"no daemon answers at {where}: {why}. {_what_to_do(where, error)}")


def _what_to_do(where: str, error: Exception) -> str:
    """Where one runs already, another would not help."""
    if isinstance(error, PermissionError) and error.errno is not None:
        group = _group_of(where)
        return (
            f"Ask as root (sudo), or as a member of its group{group}, which resolver run --socket-group sets"
        )
    if isinstance(error, (TimeoutError, BlockingIOError)):
        return (
            f"{_listening(where)} hangs, or the node is overloaded: resolver doctor --only daemon says which, then "
            "restart it"
        )
    return (
        "Start one with: resolver run (as root, on the host), or name its socket with --socket or "
        "RESOLVER_SOCKET"
    )


def _group_of(where: str) -> str:
    """The name of the socket's group in brackets; empty for root's, or where it is out of sight."""
    try:
        gid = os.stat(where).st_gid
    except OSError:
        return ""
    try:
        import grp

        return f" ({grp.getgrgid(gid).gr_name})" if gid else ""
    except KeyError:
        return f" ({gid})"


def _listening(where: str) -> str:
    """Who listens there, by PID if the kernel says it."""
    import socket

    with socket.socket(socket.AF_UNIX) as channel:
        try:
            channel.settimeout(0.2)
            channel.connect(where)
            credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        except OSError:
            return "It"
    host_pid = int.from_bytes(credentials[:4], sys.byteorder)  # 0: of a PID namespace that is out of sight
    return f"PID {host_pid}" if host_pid else "It"


def _refusal(status: int, body: bytes) -> ResolverError:
    """The error that a problem+json (RFC 9457) stands for."""
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
        raise NoDaemon(f"what answered at {where} is no JSON: is it a resolver?") from None
