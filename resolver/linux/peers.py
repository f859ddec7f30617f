"""Who is on the other end of a Unix socket, by the kernel's word and never by the peer's.

The kernel notes PID, user and groups of the process that called ``connect``, and keeps them for as long as the
connection lives, even if another process holds it by then. So they stay right, but the PID as a number does not: a
process can connect, leave the connection to another one and end, and its number can be used again in another
container before ``/proc`` is read. What ``/proc`` says under that number is believed here only while the
process that connected is held and alive:

- SO_PEERPIDFD (Linux 6.5) gives a descriptor of that very process.
- Before that, the process that has the number now is taken hold of. It is believed to be the one that connected if
  it is older than the connection can be (`Listener` knows), since then nobody else had the number in between; or if
  it has the other end of this connection among its descriptors, which sock_diag(7) shows for peers in our own network
  namespace. Such a kernel has no other proof, so any other peer is a `PeerUnknown`.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

from resolver.errors import AccessDenied, CannotKnow, ProcessGone
from resolver.linux.pidfd import HeldProcess
from resolver.reasons import PeerReason

if TYPE_CHECKING:
    from resolver.linux.procfs import Procfs

# include/uapi/asm-generic/socket.h
_SO_PEERGROUPS = 59  # Linux 4.13
_SO_PEERPIDFD = 77  # Linux 6.5
_UCRED = struct.Struct("=iII")
_MOST_GROUP_BYTES = 1024  # what Python's getsockopt asks for at most: 256 groups

# include/uapi/linux/sock_diag.h, unix_diag.h and netlink.h
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_UDIAG_SHOW_PEER = 4
_UNIX_DIAG_PEER = 2
_ANY_COOKIE = 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBHIIIII")
_ANSWER_BYTES = _HEADER.size + 16  # struct unix_diag_msg
_ATTRIBUTE = struct.Struct("=HHI")  # struct nlattr, and the number that these attributes hold

_TICKS = os.sysconf("SC_CLK_TCK")
#: A peer can have a million descriptors, and looking through them holds everybody else up.
_MOST_DESCRIPTORS = 4096


class PeerUnknown(CannotKnow):
    """It is not known who connected. ``reason`` is one of the fixed list."""

    def __init__(self, reason: PeerReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Listener(socket.socket):
    """A listening Unix socket that notes when each connection cannot have been there yet.

    To be used without blocking. Only kernels before 6.5 have a use for it.
    """

    def __init__(self) -> None:
        super().__init__(socket.AF_UNIX)
        self.setblocking(False)
        self._nobody_at = 0.0

    def listen(self, backlog: int = socket.SOMAXCONN, /) -> None:
        """As of `socket.socket`."""
        if not self._nobody_at:  # asyncio says it again, when some may already wait
            self._nobody_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        super().listen(backlog)

    def accept(self) -> tuple[socket.socket, str]:
        """As of `socket.socket`; BlockingIOError if nobody waits."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        try:
            connection, address = super().accept()
        except BlockingIOError:
            self._nobody_at = now
            raise
        _made_after[connection.fileno()] = self._nobody_at
        return connection, address


#: By descriptor, seconds since boot. One that a connection of another listener has now is too early: that is safe.
_made_after: dict[int, float] = {}


class PeerSocket(Protocol):
    """A connected Unix socket, or what asyncio shows of one (``transport.get_extra_info("socket")``)."""

    def fileno(self) -> int:
        """Its descriptor."""

    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes:
        """As of `socket.socket`."""


class Credentials(NamedTuple):
    """Who called ``connect``, at that moment; the process may be gone by now, and its number used again.

    ``host_pid`` is the number in the reader's PID namespace, 0 if it has none there. ``uid`` and ``gid`` are the
    effective ones as the reader's user namespace counts them: **the root of a container has uid 0, too**, unless
    the container has a user namespace of its own. ``groups`` are the supplementary ones; none on kernels before
    4.13, nor for a peer with more than 256 of them: the caller then gets fewer rights, never more.
    """

    host_pid: int
    uid: int
    gid: int
    groups: tuple[int, ...]


class PeerPidns(NamedTuple):
    """The PID namespace a peer is in, by its inode, and its number at every level, outermost first."""

    pidns: int
    ns_pids: tuple[int, ...]


class Peer(HeldProcess):
    """The process that connected, held so that its number stays its own.

    ``exact`` is False only if `peer_of` was called with ``exact=False``.
    """

    __slots__ = ("credentials", "exact")

    def __init__(self, credentials: Credentials, fd: int, *, is_pidfd: bool, exact: bool) -> None:
        super().__init__(fd, is_pidfd=is_pidfd)
        self.credentials = credentials
        self.exact = exact

    @property
    def host_pid(self) -> int:
        """Its number in the reader's PID namespace."""
        return self.credentials.host_pid


def credentials_of(connection: PeerSocket) -> Credentials:
    """What the kernel noted when the peer connected. Costs 2 us, opens nothing, cannot be forged."""
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


def peer_of(
    connection: PeerSocket, procfs: Procfs, *, exact: bool = True, use_peerpidfd: bool = True
) -> Peer:
    """Take hold of the process that connected. `PeerUnknown` if it is gone, or is not certain.

    ``exact=False`` also takes, where nothing better is to be had, the process that has the number now. Then what
    is read about it is right *if the process that connected still runs*: enough for an answer that only that
    process can use, and not enough to decide what somebody may see. ``use_peerpidfd=False`` forces the way of
    kernels before 6.5. Raises OSError when descriptors run out.
    """
    credentials = credentials_of(connection)
    if credentials.host_pid <= 0:
        raise PeerUnknown(
            PeerReason.NOT_VISIBLE,
            "the peer has no number in this process's PID namespace: run the daemon on the host, or with hostPID: true",
        )
    peer = _by_pidfd(connection, credentials) if use_peerpidfd else None
    if peer is None:
        peer = _by_number(connection, procfs, credentials, exact=exact)
    if not peer.alive():
        peer.close()
        raise _ended(credentials.host_pid)
    return peer


def pidns_of(peer: Peer, procfs: Procfs) -> PeerPidns:
    """The PID namespace that the peer is in, and its numbers; `PeerUnknown` if it ended or may not be read.

    A process never changes its PID namespace, so this holds for as long as it lives. About another process's, it
    needs CAP_SYS_PTRACE.
    """
    try:
        found = PeerPidns(procfs.pidns(peer.host_pid), procfs.ns_pids(peer.host_pid))
    except ProcessGone:
        raise _ended(peer.host_pid) from None
    except AccessDenied as error:
        raise PeerUnknown(PeerReason.ACCESS_DENIED, str(error)) from None
    if not found.ns_pids:
        raise PeerUnknown(PeerReason.NOT_PROVEN, "this kernel's status has no NSpid line: Linux 4.1 has it")
    if not peer.alive():
        raise _ended(peer.host_pid)
    return found


def _ended(host_pid: int) -> PeerUnknown:
    return PeerUnknown(PeerReason.ENDED, f"the process that connected ({host_pid}) has ended")


def _by_pidfd(connection: PeerSocket, credentials: Credentials) -> Peer | None:
    """By the descriptor that the kernel hands out; None where it does not know how to."""
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
    return Peer(credentials, fd, is_pidfd=True, exact=True)


def _by_number(connection: PeerSocket, procfs: Procfs, credentials: Credentials, *, exact: bool) -> Peer:
    host_pid = credentials.host_pid
    try:
        handle = procfs.open_handle(host_pid)
    except ProcessGone:
        raise _ended(host_pid) from None
    except AccessDenied as error:
        raise PeerUnknown(PeerReason.ACCESS_DENIED, str(error)) from None
    peer = Peer(credentials, handle.fd, is_pidfd=handle.is_pidfd, exact=True)
    try:
        older = (handle.process.start_time + 1) / _TICKS <= _made_after.get(connection.fileno(), 0.0)
        if not older and not _has_socket(procfs, host_pid, _other_end(connection)):
            if exact:
                raise PeerUnknown(
                    PeerReason.NOT_PROVEN,
                    f"whether PID {host_pid} is still the process that connected cannot be determined on this kernel. "
                    "Linux 6.5 shows it; before, the peer must be in the host's network namespace, or have started "
                    "well before it connects: let it try again",
                )
            peer.exact = False
    except BaseException:
        peer.close()
        raise
    return peer


def _other_end(connection: PeerSocket) -> int:
    """Inode of the socket that ours is connected to; 0 if it is in another network namespace, or unknown."""
    inode = os.fstat(connection.fileno()).st_ino
    request = _REQUEST.pack(socket.AF_UNIX, 0, 0, 0, inode, _UDIAG_SHOW_PEER, _ANY_COOKIE, _ANY_COOKIE)
    header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as diag:
            diag.setblocking(False)
            diag.sendto(header + request, (0, 0))
            answer = diag.recv(4096)  # the kernel answers within the call that asks
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return 0
    return _parse_other_end(answer, inode)


def _parse_other_end(answer: bytes, inode: int) -> int:
    """The peer's inode in the kernel's answer about the socket ``inode``; 0 if it is an error, or about another."""
    if len(answer) < _ANSWER_BYTES:
        return 0
    length, kind, *_ = _HEADER.unpack_from(answer)
    (about,) = struct.unpack_from("=I", answer, _HEADER.size + 4)
    if kind != _SOCK_DIAG_BY_FAMILY or about != inode:
        return 0
    at, end = _ANSWER_BYTES, min(length, len(answer))
    while at + 4 <= end:
        size, attribute = struct.unpack_from("=HH", answer, at)
        if attribute == _UNIX_DIAG_PEER and size == _ATTRIBUTE.size and at + size <= end:
            return int(_ATTRIBUTE.unpack_from(answer, at)[2])
        at += max(size + 3 & ~3, 4)
    return 0


def _has_socket(procfs: Procfs, host_pid: int, inode: int) -> bool:
    """Whether it is among the first descriptors of the process (needs CAP_SYS_PTRACE for others' processes)."""
    if not inode:
        return False
    wanted, directory = f"socket:[{inode}]", f"{procfs.root}/{host_pid}/fd"
    try:
        with os.scandir(directory) as listing:
            for number, entry in enumerate(listing):
                if number >= _MOST_DESCRIPTORS:
                    return False
                try:
                    if os.readlink(entry.path) == wanted:
                        return True
                except FileNotFoundError:
                    continue
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
    return False
