"""The kernel's process events from a proc connector socket, which a short-lived child opens.

The kernel ignores refused requests silently, so its acknowledgement, which arrives like an event, is awaited.
Layouts: include/uapi/linux/cn_proc.h and connector.h, unchanged since Linux 3.2. No filter is set: sequence numbers are
counted before it, and a filtered event would look lost.
"""

import errno
import os
import secrets
import select
import socket
import struct
import sysconfig
import time

from resolver.base.errors import CannotKnow
from resolver.linux.host_view import require_host_view
from resolver.linux.procfs import Procfs
from resolver.workers.spawn import ask_once, child

#: The connector's index and multicast group of process events.
CN_IDX_PROC = 1

#: Meanings of the kernel's refusals.
NEEDS_NET_ADMIN = (
    "the proc connector needs CAP_NET_ADMIN on this kernel: run as root, or give it "
    "(Kubernetes: securityContext.capabilities.add: [NET_ADMIN])"
)
NOT_HOST_NETWORK = (
    "the proc connector answers only in the host's network namespace, and this process is in another: run it with "
    "hostNetwork: true (Kubernetes) or --network=host (Docker), or give CAP_SYS_ADMIN and CAP_SYS_PTRACE, "
    "so that it can be reached through /proc/2/ns/net"
)

_SO_RCVBUFFORCE = 33  # include/uapi/asm-generic/socket.h
_LISTEN, _IGNORE = 1, 2
_NONE, _FORK, _EXEC, _EXIT = 0, 1, 2, 0x80000000

_NO_CPU = 0xFFFFFFFF  # on acknowledgements before Linux 6.6, which have no sequence number either

_REQUEST = struct.Struct("=IHHII IIIIHH I")
_NLMSG_DONE = 3
#: cn_msg: idx, val, seq, ack; proc_event: kind, cpu, and four words that depend on the kind.
_EVENT = struct.Struct("=16x IIII4x II8x IIII")
_EVENT_SIZE = 76

#: Most events of one drain: 25 ms of work. At one drain a pass, that is more than any node makes for long.
_MOST_EVENTS = 1 << 14

_ACK_SECONDS = 1.0
_OPENER_SECONDS = 10.0
#: To bind and listen (before Linux 6.6), to enter the host's network namespace, to reach it.
_RIGHTS = ("NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE")
_USER_NS_INIT = 0xEFFFFFFD  # PROC_USER_INIT_INO in include/linux/proc_ns.h
_REFUSALS = {
    "import": "pyroute2 cannot be loaded ({}): install it (make setup), or use --source scan",
    "netns": "the host's network namespace could not be entered ({}): " + NOT_HOST_NETWORK,
    "socket": "this kernel gives no proc connector socket ({}): it needs CONFIG_CONNECTOR; use --source scan",
    "bind": "the proc connector socket could not be bound ({}): " + NEEDS_NET_ADMIN,
}


class EventStream:
    """Bound proc connector socket. The reader empties ``touched`` and ``ended``, and resets ``incomplete``.

    ``touched`` are host PIDs of new processes, ``ended`` those with an exited leader; their threads may run on.
    ``incomplete``: an event was lost. If the kernel lacks memory for one, only the next event's number shows the loss;
    ``gaps`` counts these.
    """

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self._channel = channel
        self._buffer = bytearray(256)
        self._next: dict[int, int] = {}  # sequence number by CPU
        self._awaited: int | None = None
        self._answer: int | None = None
        self.touched: set[int] = set()
        self.ended: set[int] = set()
        self.events = self.overruns = self.gaps = 0
        self.incomplete = self.emptied = False

    def grow_buffer(self, size: int) -> int:
        """Request a receive buffer of ``size`` bytes; return the granted size."""
        try:
            self._channel.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, size)
        except PermissionError:  # without CAP_NET_ADMIN as much as net.core.rmem_max allows
            self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
        return self._channel.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)

    # -- the request and its answer -----------------------------------------------------------------

    def listen(self, timeout: float) -> None:
        """Request events; raise `CannotKnow` without an acknowledgement within ``timeout`` seconds."""
        number = secrets.randbits(31)
        # Every listener gets the acknowledgement. Only its ack number identifies this listener: Linux 6.6 and later
        # overwrite the sequence number (cn_proc_ack in drivers/connector/cn_proc.c).
        self._awaited, self._answer = number + 1, None
        self._request(_LISTEN, number)
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        deadline = time.monotonic() + timeout
        while self._answer is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise CannotKnow(
                    f"the kernel did not acknowledge the request for process events within {timeout:g} s: it "
                    "ignores requests from outside the initial PID and user namespaces, and without "
                    "CONFIG_PROC_EVENTS; use hostPID: true and no user namespace, or --source scan"
                )
            poll.poll(left * 1000)
            self.drain()
        self._awaited = None
        if self._answer == errno.EPERM:
            raise CannotKnow(NEEDS_NET_ADMIN)
        if self._answer:
            name = errno.errorcode.get(self._answer, str(self._answer))
            raise CannotKnow(f"the kernel refused the request for process events ({name}): use --source scan")

    def close(self) -> None:
        if self._channel.fileno() < 0:
            return
        try:
            self._request(_IGNORE, 0)
        except (CannotKnow, OSError):
            pass  # the socket is closed in any case
        finally:
            self._channel.close()

    def _request(self, operation: int, number: int) -> None:
        message = _REQUEST.pack(
            _REQUEST.size, _NLMSG_DONE, 0, 0, 0, CN_IDX_PROC, CN_IDX_PROC, 0, number, 4, 0, operation
        )
        try:
            self._channel.send(message)  # to the kernel by default
        except ConnectionRefusedError:
            raise CannotKnow(NOT_HOST_NETWORK) from None
        except PermissionError:
            raise CannotKnow(NEEDS_NET_ADMIN) from None

    # -- events -------------------------------------------------------------------------------------

    def drain(self, most: int = _MOST_EVENTS) -> int:
        """Read at most ``most`` events; return how many. Raises OSError.

        ``emptied``: the socket was empty at the end.
        """
        before, self.emptied = self.events, False
        while self.events - before < most:
            try:
                self._receive(before + most)
            except BlockingIOError:
                self.emptied = True
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                # The kernel dropped events, and drops all until the socket is empty (NETLINK_S_CONGESTED in
                # net/netlink/af_netlink.c). Reported once, before the kept events.
                self.overruns += 1
                self.incomplete = True
        return self.events - before

    def _receive(self, until: int) -> None:
        receive, unpack, buffer = self._channel.recv_into, _EVENT.unpack_from, self._buffer
        touch, end, following = self.touched.add, self.ended.add, self._next
        events = self.events
        try:
            while events < until:
                size = receive(buffer)
                events += 1
                index, value, sequence, ack, kind, cpu, first, second, third, fourth = unpack(buffer)
                if size < _EVENT_SIZE or index != CN_IDX_PROC or value != CN_IDX_PROC:
                    self.incomplete = True
                    continue
                if cpu != _NO_CPU:
                    if following.get(cpu, sequence) != sequence:
                        self.gaps += 1
                        self.incomplete = True
                    following[cpu] = (sequence + 1) & 0xFFFFFFFF
                if kind == _FORK:  # parent's tid and tgid, child's tid and tgid; a thread's differ
                    if third == fourth:
                        touch(third)
                elif kind == _EXIT:  # tid, tgid
                    if first == second:
                        end(first)
                elif kind == _EXEC:  # a thread that execs takes over the PID of a leader that had exited
                    self.ended.discard(second)
                elif kind == _NONE and ack == self._awaited:
                    self._answer = first
        finally:
            self.events = events


def attach(procfs: Procfs, buffer_bytes: int) -> EventStream:
    """Return an acknowledged stream. Raises `CannotKnow`."""
    require_host_view(procfs)
    if os.stat(f"{procfs.root}/self/ns/user").st_ino != _USER_NS_INIT:
        raise CannotKnow(
            "the proc connector ignores requests from a user namespace, and this process is in one: run it without "
            "(Kubernetes: hostUsers: true; Docker: --userns=host), or use --source scan"
        )
    stream = EventStream(_open_socket(_host_network(procfs) or "ours"))
    try:
        stream.grow_buffer(buffer_bytes)
        stream.listen(_ACK_SECONDS)
    except BaseException:
        stream.close()
        raise
    return stream


def _host_network(procfs: Procfs) -> str | None:
    """Return the host's network namespace, if this process is certainly in another one."""
    # kthreadd, always PID 2 (rest_init in init/main.c), never leaves the initial namespaces.
    path = f"{procfs.root}/2/ns/net"
    try:
        ours, hosts = os.stat(f"{procfs.root}/self/ns/net"), os.stat(path)
    except OSError:  # without CAP_SYS_PTRACE; `listen` fails in another namespace
        return None
    return None if (ours.st_dev, ours.st_ino) == (hosts.st_dev, hosts.st_ino) else path


def _open_socket(network: str) -> socket.socket:
    argv = child(
        "resolver.workers.netlink_opener", "netlink opener", _RIGHTS, sysconfig.get_paths()["purelib"]
    )
    try:
        answer, descriptors, _ = ask_once(argv, network.encode(), _OPENER_SECONDS)
    except OSError as error:
        raise CannotKnow(f"the netlink opener did not answer: {error}; use --source scan") from None
    if descriptors:
        return socket.socket(fileno=descriptors[0])
    failed = answer or {"stage": "", "errno": 0}
    name = errno.errorcode.get(failed["errno"], "an unknown error")
    refusal = _REFUSALS.get(failed["stage"], "the netlink opener ended without a socket")
    raise CannotKnow(refusal.format(name))
