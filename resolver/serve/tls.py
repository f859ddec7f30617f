"""TLS and a bearer token for a port, from files that are read again when they change."""

from __future__ import annotations

import os
import ssl
from hmac import compare_digest
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from resolver.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


class Kept(Generic[_T]):
    """The result of ``make(*paths)``, made again when a file has changed.

    While new files can't be used, the old result stays and ``refused`` has the reason. Raises `UsageError` at first.
    """

    def __init__(
        self, make: Callable[..., _T], paths: tuple[str, ...], refused: Callable[[str], None]
    ) -> None:
        self._make, self._paths, self._refused = make, paths, refused
        self._seen = [_version(path) for path in paths]  # before they are read
        self._value = make(*paths)

    def value(self) -> _T:
        """Return the newest usable value."""
        seen = [_version(path) for path in self._paths]
        if seen != self._seen:
            self._seen, why = seen, ""
            try:
                self._value = self._make(*self._paths)
            except UsageError as error:
                why = str(error)
            self._refused(why)
        return self._value


class Lock(NamedTuple):
    """Conditions for the clients of a port; None: there is none."""

    context: Kept[ssl.SSLContext] | None
    token: Kept[bytes] | None

    def opens(self, authorization: str) -> bool:
        """Check a request's header for the token, in the same time for each wrong one."""
        scheme, _, given = authorization.partition(" ")
        if self.token is None:
            return True
        return scheme.lower() == "bearer" and compare_digest(
            given.strip().encode("latin-1"), self.token.value()
        )


def lock(cert: str, key: str, token: str, refused: Callable[[str], None]) -> Lock:
    """Return the lock that these files make; empty paths: none. Raises `UsageError`."""
    return Lock(
        Kept(server_context, (cert, key or cert), refused) if cert else None,
        Kept(_token, (token,), refused) if token else None,
    )


def server_context(cert: str, key: str) -> ssl.SSLContext:
    """Return a server's context. Raises `UsageError`."""
    for path in (cert, key):
        _read(path)  # OpenSSL's errors have no path
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0  # scrapers keep their connections
    try:
        context.load_cert_chain(
            cert, key, password=""
        )  # an encrypted key fails, instead of asking a terminal
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", "") or str(error)
        why = (
            "they don't belong together"
            if reason == "KEY_VALUES_MISMATCH"
            else reason.lower().replace("_", " ")
        )
        raise UsageError(
            f"no certificate chain in {cert} with its unencrypted key in {key}, both as PEM: {why}"
        ) from None
    return context


class Session:
    """TLS of one connection, without I/O. Its errors are OSErrors."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=True)

    def take(self, data: bytes) -> bytes:
        """Return the plain text of received data; empty during the handshake."""
        self._in.write(data)
        plain = b""
        try:
            while piece := self._tls.read(len(data)):
                plain += piece
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        return plain

    def to_send(self, plain: bytes = b"") -> bytes:
        """Return ``plain`` encrypted, after the handshake's pending messages and alerts."""
        while plain:
            plain = plain[self._tls.write(plain) :]
        return self._out.read()


def _token(path: str) -> bytes:
    words = _read(path).split()
    if len(words) != 1:
        raise UsageError(f"{path} has {len(words)} words: a token is one word")
    return words[0]


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise UsageError(f"{path} can't be read ({why}): it must exist, and root must own it") from None


def _version(path: str) -> tuple[int, ...]:
    """Identify the content of a file by what changes with it; a link, such as a secret's, is followed."""
    try:
        info = os.stat(path)
    except OSError:
        return ()
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns
