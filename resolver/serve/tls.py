"""TLS and a bearer token for a port, from files that are read again when they change."""

import os
import ssl
from collections.abc import Callable
from hmac import compare_digest
from typing import Generic, TypeVar

from resolver.base.errors import UsageError
from resolver.base.text import cause

T = TypeVar("T")


class _Files(Generic[T]):
    """Content of files that belong together, read again when one of them changes; unusable new content is not taken."""

    def __init__(self, paths: tuple[str, ...], read: Callable[..., T]) -> None:
        self._paths, self._read = paths, read
        self._seen = self._versions()  # before they are read
        self.content = read(*paths)
        self.why = ""

    def changed(self) -> bool:
        """Read changed files; ``why`` says why new content can't be used."""
        if (seen := self._versions()) == self._seen:
            return False
        self._seen, self.why = seen, ""
        try:
            self.content = self._read(*self._paths)
        except UsageError as error:
            self.why = str(error)
        return True

    def _versions(self) -> list[tuple[int, ...]]:
        """Identify the content of each file by its inode, size and times; a link, such as a secret's, is followed."""
        versions = list[tuple[int, ...]]()
        for path in self._paths:
            try:
                info = os.stat(path)
                versions.append((info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns))
            except OSError:
                versions.append(())
        return versions


class PortCredentials:
    """Certificate and token of a port, each absent without a path. Raises `UsageError`.

    A new token is used even while a half-written certificate can't be. ``refused`` has the reason.
    """

    def __init__(self, cert: str, key: str, token: str, refused: Callable[[str], None]) -> None:
        self._context = _Files((cert, key or cert), _server_context) if cert else None
        self._token = _Files((token,), token_in) if token else None
        self._refused = refused

    def session(self) -> "Session | None":
        self._refresh()
        return Session(self._context.content) if self._context else None

    def authorized(self, authorization: str) -> bool:
        """Check a request's header for the token, in the same time for each wrong one."""
        self._refresh()
        scheme, _, given = authorization.partition(" ")
        right = self._token is None or compare_digest(given.strip().encode("latin-1"), self._token.content)
        return self._token is None or (right and scheme.lower() == "bearer")

    @property
    def uses_tls(self) -> bool:
        return self._context is not None

    def _refresh(self) -> None:
        files = [file for file in (self._context, self._token) if file is not None]
        if any([file.changed() for file in files]):  # noqa: C419 - all of them
            self._refused("; ".join(file.why for file in files if file.why))


def _server_context(cert: str, key: str) -> ssl.SSLContext:
    text = _read(key)
    missing = ""  # OpenSSL's errors have no path
    if b"CERTIFICATE-----" not in _read(cert):  # also OpenSSL's TRUSTED CERTIFICATE
        missing = f"{cert} holds no certificate"
    elif b" PRIVATE KEY-----" not in text or b"ENCRYPTED" in text:
        missing = f"{key} holds no unencrypted private key"
    if missing:
        raise UsageError(f"{missing} as PEM: write one to a new file, and rename that file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0  # scrapers keep their connections
    try:
        context.load_cert_chain(cert, key, password="")  # never asks a terminal
    except (ssl.SSLError, ValueError) as error:
        why = f"{cert} or {key} is damaged, or half written"
        if "MISMATCH" in (getattr(error, "reason", "") or ""):
            why = f"{key} is another certificate's key than that of {cert}"
        raise UsageError(f"{why}: write both anew, each under another name, and rename them") from None
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


def token_in(path: str) -> bytes:
    """Read a file with a token. Raises `UsageError`."""
    words = _read(path).split()
    if len(words) != 1:
        has = "is empty" if not words else f"has {len(words)} words"
        raise UsageError(f"{path} {has}, and a token is one word: write the token alone into it")
    return words[0]


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20)
    except OSError as error:
        raise UsageError(
            f"{path} can't be read ({cause(error)}): it must exist, and root must own it"
        ) from None
