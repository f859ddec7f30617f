"""The process at the other end of a Unix socket, identified by the kernel.

The caller of ``connect`` can hand the connection over and end, and its PID can be reused. So it is held, and must be
alive: by SO_PEERPIDFD (Linux 6.5), else by its number if it is older than the connection can be (`Listener`).
"""

import contextlib
import errno
import os
import socket
import struct
import time
from typing import NamedTuple

from resolver.base.errors import AccessDenied, CannotKnow, ProcessGone
from resolver.base.reasons import PeerReason
from resolver.linux.pidfd import HeldProcess
from resolver.linux.procfs import Procfs
from resolver.linux.safe_open import let_go

# include/uapi/asm-generic/socket.h
_SO_PEERGROUPS = 59  # Linux 4.13
_SO_PEERPIDFD = 77  # Linux 6.5
_SO_PASSRIGHTS = 83  # Linux 6.16
_UCRED = struct.Struct("=iII")
_MOST_GROUP_BYTES = 1024  # the limit of Python's getsockopt: 256 groups
_TICKS = os.sysconf("SC_CLK_TCK")


class PeerUnknown(CannotKnow):
    """Unidentified peer, for this ``reason``."""

    def __init__(self, reason: PeerReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ClientSocket(socket.socket):
    """A client's Unix socket. Neither `recv` nor `close` drops a descriptor that the client passed.

    Its last reference may be a TCP socket's, which lingers for as long as the client has chosen.
    """

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """Receive, as `socket.socket`; ConnectionResetError if the client passes descriptors, which stay queued."""
        data, _, message_flags, _ = self.recvmsg(bufsize, 0, flags | socket.MSG_PEEK)
        if message_flags & socket.MSG_CTRUNC:
            raise ConnectionResetError(errno.ECONNRESET, "the client passes descriptors")
        return data if not data or flags & socket.MSG_PEEK else super().recv(len(data), flags)

    def close(self) -> None:
        """Close in a thread: unread descriptors go with it."""
        if self.fileno() >= 0:
            let_go(self.detach())


class Listener(socket.socket):
    """Listening Unix socket that takes no descriptors from clients, if the kernel can forbid it (Linux 6.16).

    It notes when no connection waited, for kernels before 6.5.
    """

    def __init__(self) -> None:
        super().__init__(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            self.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
        self.setblocking(False)
        self._empty_at = 0.0  # when no connection waited

    def close(self) -> None:
        """Refuse clients, and close in a thread, as a `ClientSocket`: those not accepted go with it."""
        if self.fileno() >= 0:
            self.shutdown(socket.SHUT_RDWR)
            let_go(self.detach())

    def listen(self, backlog: int = socket.SOMAXCONN, /) -> None:
        self._empty_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        super().listen(backlog)

    def accept(self) -> tuple[ClientSocket, str]:
        """Accept, as `socket.socket`; BlockingIOError without a connection."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        try:
            fd, address = self._accept()  # type: ignore[attr-defined]
        except BlockingIOError:
            self._empty_at = now
            raise
        made_after[fd] = self._empty_at
        return ClientSocket(self.family, self.type, self.proto, fd), address


#: By descriptor: the connection was made after this (seconds since boot). An earlier connection's entry is safe.
made_after: dict[int, float] = {}


class Credentials(NamedTuple):
    """Credentials of the caller of ``connect`` at that moment.

    ``host_pid`` is 0 if not visible here. **A container's root has uid 0, too**. ``groups`` may be missing (before
    Linux 4.13, more than 256), which gives fewer rights.
    """

    host_pid: int
    uid: int
    gid: int
    groups: tuple[int, ...]


class Peer(HeldProcess):
    """Process that connected."""

    __slots__ = ("credentials",)

    def __init__(self, credentials: Credentials, fd: int, *, is_pidfd: bool) -> None:
        super().__init__(fd, is_pidfd=is_pidfd)
        self.credentials = credentials

    @property
    def host_pid(self) -> int:
        return self.credentials.host_pid


def credentials_of(connection: socket.socket) -> Credentials:
    """Return the kernel's note (2 us)."""
    host_pid, uid, gid = _UCRED.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    )
    try:
        groups = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_GROUP_BYTES)
    except OSError as error:
        if error.errno not in (errno.ENOPROTOOPT, errno.ERANGE):
            raise
        groups = b""
    numbers = struct.unpack(f"={len(groups) // 4}I", groups)
    return Credentials(host_pid=host_pid, uid=uid, gid=gid, groups=numbers)


def peer_of(connection: socket.socket, procfs: Procfs, *, exact: bool = True) -> Peer:
    """Hold the process that connected. Raises `PeerUnknown`, and OSError without descriptors.

    ``exact=False`` accepts the number's present process: for answers that only it can use.
    """
    credentials = credentials_of(connection)
    if credentials.host_pid <= 0:
        raise PeerUnknown(
            PeerReason.NOT_VISIBLE,
            "the peer has no number in this process's PID namespace: run the daemon on the host, or with hostPID: true",
        )
    peer = by_pidfd(connection, credentials) or _by_number(connection, procfs, credentials, exact=exact)
    if not peer.alive():
        peer.close()
        raise _ended(credentials.host_pid)
    return peer


def pidns_of(peer: Peer, procfs: Procfs) -> tuple[int, tuple[int, ...]]:
    """Return a living peer's PID namespace (inode) and PIDs, outermost first. Raises `PeerUnknown`."""
    try:
        namespace = procfs.pidns(peer.host_pid), procfs.ns_pids(peer.host_pid)
    except ProcessGone:
        raise _ended(peer.host_pid) from None
    except AccessDenied as error:
        raise PeerUnknown(PeerReason.ACCESS_DENIED, str(error)) from None
    if not peer.alive():
        raise _ended(peer.host_pid)
    return namespace


def _ended(host_pid: int) -> PeerUnknown:
    return PeerUnknown(PeerReason.ENDED, f"the process that connected ({host_pid}) has ended")


def by_pidfd(connection: socket.socket, credentials: Credentials) -> Peer | None:
    """Get SO_PEERPIDFD; None before Linux 6.5."""
    try:
        answer = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
    except OSError as error:
        if error.errno == errno.ENOPROTOOPT:
            return None
        # Reaped: EINVAL in the first kernels that have it, ESRCH since; a descriptor of the dead since 6.16.
        if error.errno in (errno.EINVAL, errno.ESRCH, errno.ENODATA):
            raise _ended(credentials.host_pid) from None
        raise
    (fd,) = struct.unpack("=i", answer)
    return Peer(credentials, fd, is_pidfd=True)


def _by_number(connection: socket.socket, procfs: Procfs, credentials: Credentials, *, exact: bool) -> Peer:
    host_pid = credentials.host_pid
    try:
        handle = procfs.open_handle(host_pid)
    except ProcessGone:
        raise _ended(host_pid) from None
    except AccessDenied as error:
        raise PeerUnknown(PeerReason.ACCESS_DENIED, str(error)) from None
    older = (handle.process.start_time + 1) / _TICKS <= made_after.get(connection.fileno(), 0.0)
    if exact and not older:
        handle.close()
        raise PeerUnknown(
            PeerReason.NOT_PROVEN,
            f"whether PID {host_pid} is still the process that connected cannot be determined on this kernel. "
            "Linux 6.5 shows it; before, it must be older than the connection: let the same process connect again",
        )
    return Peer(credentials, handle.fd, is_pidfd=handle.is_pidfd)
