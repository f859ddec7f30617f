"""Access rules and limits of the API's callers, identified by the kernel (`resolver.linux.peers`).

On root's socket, root and the socket's group may ask everything, from the host's PID namespace only: the root of a
container has UID 0, too. On the tenants' socket a process of any other PID namespace may ask about that namespace.
"""

import contextlib
import socket
from collections import Counter, OrderedDict
from collections.abc import Iterator
from http import HTTPStatus
from typing import NamedTuple

from resolver.api.problems import Problem, Reason
from resolver.base.budget import Bucket
from resolver.base.errors import ResolverError
from resolver.containers.namespaces import Namespace
from resolver.linux.cgroup import parse_cgroup
from resolver.linux.peers import Peer, credentials_of, peer_of, pidns_of
from resolver.linux.procfs import Procfs
from resolver.serve.http import Gatekeeper, HangUp, Limits

#: Most connections to root's socket, and most of them from refused peers.
MOST_CONNECTIONS, _MOST_REFUSED = 512, 16
#: Most connections to the tenants' socket, and most from one container.
MOST_TENANTS, _MOST_PER_CONTAINER = 128, 16
#: Most bytes of request bodies in memory for one socket.
MOST_BODIES_BYTES = 8 << 20
_MOST_STREAMS = 32
#: Requests a second in the long run, and at once; a pair of a batch counts as a hundredth.
_RATE, _BURST = 2000.0, 4000.0
_TENANT_RATE, _TENANT_BURST = 50.0, 100.0
_MOST_BUCKETS = 1024

#: Root's clients are served in order of arrival, tenants in turns by container.
ROOT_LIMITS = Limits(
    connections=1024,  # those beyond `MOST_CONNECTIONS` get a refusal as their answer
    head_bytes=16 << 10,
    seconds=10.0,
    idle_seconds=30,
    share=0.5,
)
TENANT_LIMITS = ROOT_LIMITS._replace(
    connections=MOST_TENANTS,
    share=0.1,
    waiting=MOST_TENANTS,
    apart=0.004,
    busy="too many connections of this container are waiting; come back in a second",
)

_UNREADABLE = {
    HTTPStatus.BAD_REQUEST: Reason.BAD_REQUEST,
    HTTPStatus.REQUEST_TIMEOUT: Reason.TOO_SLOW,
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: Reason.HEADERS_TOO_LARGE,
}

#: Fully permitted callers share one account per user; a tenant has one per container.
_Key = tuple[str, int | str]

_NOT_FOR_CONTAINERS = (
    "only root and the socket's group, in the host's PID namespace, may ask here; containers ask on a socket of their "
    "own (resolver run --tenant-socket)"
)
_NOT_FOR_THE_HOST = (
    "this socket answers only about the caller's PID namespace, which must not be the host's: on the host, ask on the "
    "daemon's other socket, as root or with its group"
)


_ENDED = "the process that connected has ended, and the one that holds the connection now is not known: connect again"


class Tenant(NamedTuple):
    """Peer that may ask only about its PID namespace; ``peer`` holds the process that connected."""

    peer: Peer
    own: Namespace
    container_id: str  # empty if its cgroup has none

    def require_alive(self) -> None:
        """Raise `Problem` if the peer ended, because its PID and its namespace's inode may be reused."""
        if not self.peer.alive():
            raise Problem(403, Reason.PEER_UNKNOWN, _ENDED)


class Access(NamedTuple):
    """Rights of one connection. ``tenant`` is None for root and the group; ``refusal`` refuses all requests."""

    gatekeeper: "ApiGatekeeper"
    key: _Key
    tenant: Tenant | None = None
    refusal: Problem | None = None

    @property
    def everything(self) -> bool:
        """Return True if this peer may use the whole API."""
        return self.tenant is None and self.refusal is None

    def require(self, *, everything: bool) -> None:
        """Raise `Problem` if the peer may not make this request; ``everything``: one about the whole node."""
        if self.refusal is not None:
            raise self.refusal
        if self.tenant is None:
            return
        self.tenant.require_alive()
        if everything:
            raise Problem(
                403,
                Reason.NOT_YOURS,
                "only root and the socket's group on the host may ask this; a container may look up processes in its "
                "own PID namespace (GET /v1/lookup?pid=<n>), and read its own /v1/processes, /v1/usage and /v1/slots",
            )

    def spend(self, requests: float) -> None:
        """Take requests from the peer's account; raise `Problem` if it is empty."""
        wait = self.gatekeeper.spend(self.key, requests)
        if wait > 0:
            raise Problem(
                429,
                Reason.TOO_MANY_REQUESTS,
                "too many requests from this peer: ask for many pairs in one POST, or wait",
                headers={"Retry-After": str(int(wait) + 1)}
                # A tenant above its rate has to wait for its next turn with a new connection.
                | ({} if self.everything else {"Connection": "close"}),
            )


class ApiGatekeeper(Gatekeeper):
    """Admits connections to one socket, counts them, and keeps the accounts. Belongs to one event loop's thread."""

    def __init__(self, procfs: Procfs, group: int | None = None, *, tenants: bool = False) -> None:
        super().__init__()
        self.tenants = tenants
        self.limits = TENANT_LIMITS if tenants else ROOT_LIMITS
        self._procfs = procfs
        self._group = group
        self._inside: Counter[_Key] = Counter()
        self.streams = 0
        self._body_bytes = 0
        self.accounts: OrderedDict[_Key, Bucket] = OrderedDict()  # latest last
        self.counters.update(
            connections=0, refused_connections=0, requests=0, refused_requests=0, dropped_slow=0
        )

    def enter(self, channel: socket.socket) -> Access:
        """Return the peer's rights, until `leave`. Raises `HangUp` if there are too many connections."""
        self.counters["connections"] += 1
        access = self._rights_of(channel)
        most, most_per_peer = (
            (MOST_TENANTS, _MOST_PER_CONTAINER) if self.tenants else (MOST_CONNECTIONS, _MOST_REFUSED)
        )
        limited = access.key[0] != "user" and self._inside[access.key] >= most_per_peer
        self._inside[access.key] += 1
        if limited or self.inside > most:
            self.leave(access)
            self.counters["refused_connections"] += 1
            raise Problem(
                503,
                Reason.TOO_MANY_CONNECTIONS,
                "too many connections, from this peer or in all: close some, or try again",
                headers={"Retry-After": "1"},
            ).hang_up()
        return access

    def leave(self, access: Access) -> None:
        self._inside[access.key] -= 1
        if not self._inside[access.key]:
            del self._inside[access.key]
        if access.tenant is not None:
            access.tenant.peer.close()

    def hold(self, count: int) -> None:
        """Add to the bytes of bodies in memory; ``count`` is negative when freed. Raises `Problem` above the limit."""
        self._body_bytes += count
        if count > 0 and self._body_bytes > MOST_BODIES_BYTES:
            why = "other requests' bodies take up all the memory for bodies: try again"
            raise Problem(503, Reason.BUSY, why, headers={"Retry-After": "1", "Connection": "close"})

    @property
    def inside(self) -> int:
        return self._inside.total()

    def owner(self, channel: socket.socket) -> _Key | None:
        """Return the container of the process that connected; None if it has ended. OSError: no descriptors."""
        try:
            return _account(self._procfs.cgroup(credentials_of(channel).host_pid))
        except ResolverError:
            return None

    def refusal(self, status: HTTPStatus, why: str) -> HangUp:
        return Problem(status, _UNREADABLE[status], why).hang_up()

    def _rights_of(self, channel: socket.socket) -> Access:
        peer: Peer | None = None
        tenant: Tenant | None = None
        try:
            peer = peer_of(channel, self._procfs)
            pidns, ns_pids = pidns_of(peer, self._procfs)
            host, credentials = pidns == self._procfs.pidns("self"), peer.credentials
            if not self.tenants:
                if host and (credentials.uid == 0 or self._group in (credentials.gid, *credentials.groups)):
                    return Access(self, ("user", credentials.uid))
                return self._refused(Reason.NOT_YOURS, _NOT_FOR_CONTAINERS)
            if host:
                return self._refused(Reason.NOT_YOURS, _NOT_FOR_THE_HOST)
            cgroup = self._procfs.cgroup(peer.host_pid)
            if not peer.alive():
                return self._refused(Reason.PEER_UNKNOWN, _ENDED)
            container = parse_cgroup(cgroup)
            own = Namespace(pidns, len(ns_pids) - 1)
            tenant = Tenant(peer, own, container.container_id if container else "")
            return Access(self, _account(cgroup), tenant)
        except (ResolverError, OSError) as error:
            why = f"the daemon cannot determine the caller, so it refuses. The daemon's error: {error}"
            return self._refused(Reason.PEER_UNKNOWN, why)
        finally:
            if peer is not None and tenant is None:
                peer.close()

    def _refused(self, reason: Reason, why: str) -> Access:
        return Access(self, ("refused", 0), None, Problem(403, reason, why))

    def spend(self, key: _Key, requests: float) -> float:
        """Take requests from the account and return 0, or take none and return the seconds to wait."""
        account = self.accounts.pop(key, None)
        if account is None:
            account = Bucket(_RATE, _BURST) if key[0] == "user" else Bucket(_TENANT_RATE, _TENANT_BURST)
        self.accounts[key] = account
        if len(self.accounts) > _MOST_BUCKETS:
            self.accounts.popitem(last=False)
        return account.take(requests)

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream while the block runs. Raises `Problem` if there are too many."""
        if self.streams >= _MOST_STREAMS:
            why = f"{_MOST_STREAMS} streams of events are open, which is the limit"
            raise Problem(503, Reason.BUSY, why, headers={"Retry-After": "5"})
        self.streams += 1
        try:
            yield
        finally:
            self.streams -= 1


def _account(cgroup: str) -> _Key:
    """Return the account of a cgroup: its container's id, or else its path, which no tenant can change."""
    container = parse_cgroup(cgroup)
    return ("container", container.container_id) if container else ("cgroup", cgroup)
