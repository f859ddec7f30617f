"""Who may ask what, and how much of it.

There are two sockets. On the one of root, root and the socket's group may ask everything, if they are in the daemon's
own PID namespace, which is the host's: the root of a container has UID 0, too, and can give itself any group. Nobody
else may ask anything there. On the tenants' socket, which an operator gives to containers, a process in another PID
namespace than the host's may ask about the processes in its own, and nobody may ask more. Who asks is the kernel's
word, never the request's (`resolver.linux.peers`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

from resolver.api.problems import Problem, Reason
from resolver.containers.namespaces import Namespace
from resolver.errors import ResolverError
from resolver.linux.cgroup import parse_cgroup
from resolver.linux.peers import PeerUnknown, credentials_of, peer_of, pidns_of
from resolver.serve.bucket import Bucket

if TYPE_CHECKING:
    from resolver.linux.peers import Credentials, Peer, PeerSocket
    from resolver.linux.procfs import Procfs
    from resolver.serve.http import Refusal

#: Connections to root's socket, and of them those of peers that are refused.
MOST_CONNECTIONS, _MOST_REFUSED = 512, 16
#: Connections to the tenants' socket, and of each container.
MOST_TENANTS, _MOST_EACH = 128, 16
_MOST_STREAMS = 32
#: Requests a second that may be asked for ever, and at once; a pair of a batch is a hundredth of one.
_RATE, _BURST = 2000.0, 4000.0
_TENANT_RATE, _TENANT_BURST = 50.0, 100.0
_MOST_BUCKETS = 1024

_UNREADABLE = {
    HTTPStatus.BAD_REQUEST: Reason.BAD_REQUEST,
    HTTPStatus.REQUEST_TIMEOUT: Reason.TOO_SLOW,
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: Reason.HEADERS_TOO_LARGE,
}

#: Everybody who may ask everything shares one account for each user; a tenant has one for its container.
_Key = tuple[str, int | str]

_NOT_FOR_CONTAINERS = (
    "only root and the socket's group, in the host's PID namespace, may ask here; containers ask on a socket of their "
    "own (resolver run --tenant-socket)"
)
_NOT_FOR_THE_HOST = (
    "on this socket a process may ask about its own PID namespace only, and this peer is in the host's: root and the "
    "group of the daemon's other socket ask there"
)


class Tenant(NamedTuple):
    """A peer that may ask only about its own PID namespace. ``peer`` holds the process that connected."""

    peer: Peer
    own: Namespace
    container_id: str  # empty if its cgroup has none


class Access:
    """What one connection may do. ``tenant`` is None for root and the group; ``refusal``: why nothing may be asked."""

    __slots__ = ("gatekeeper", "key", "refusal", "tenant")

    def __init__(
        self, gatekeeper: ApiGatekeeper, key: _Key, tenant: Tenant | None, refusal: Problem | None = None
    ) -> None:
        self.gatekeeper = gatekeeper
        self.key = key
        self.tenant = tenant
        self.refusal = refusal

    @property
    def everything(self) -> bool:
        """Whether all of the API is open to this peer."""
        return self.tenant is None and self.refusal is None

    @property
    def turned_away(self) -> Refusal | None:
        """What is answered before anything is asked: that there are too many connections."""
        full = self.refusal is not None and self.refusal.status == HTTPStatus.SERVICE_UNAVAILABLE
        return self.refusal.sent() if self.refusal is not None and full else None

    def require(self, *, everything: bool) -> None:
        """Raise `Problem` unless this may be asked now."""
        if self.refusal is not None:
            raise self.refusal
        if self.tenant is None:
            return
        if not self.tenant.peer.alive():
            # Its number, and the inode of its namespace, may be another's by now.
            raise Problem(
                403,
                Reason.PEER_UNKNOWN,
                "the process that connected has ended, and the one that holds the connection now is not known: "
                "connect again",
            )
        if everything:
            raise Problem(
                403,
                Reason.NOT_YOURS,
                "only root and the socket's group on the host may ask this; "
                "others may look up processes in their own PID namespace: GET /v1/lookup?pid=<n>",
            )

    def spend(self, requests: float) -> None:
        """Take from the peer's account; `Problem` if it is empty."""
        wait = self.gatekeeper.spend(self.key, requests)
        if wait > 0:
            raise Problem(
                429,
                Reason.TOO_MANY_REQUESTS,
                "this peer asks more often than is answered: ask for many pairs at once by POST, or wait",
                headers={"Retry-After": str(int(wait) + 1)}
                # A connection that costs requests all the time has to wait for its turn again.
                | ({} if self.everything else {"Connection": "close"}),
            )


class ApiGatekeeper:
    """Lets connections to one socket in, counts them, and keeps the accounts. Belongs to one event loop's thread.

    ``group`` may ask everything beside root, None for nobody. ``tenants``: it is the tenants' socket.
    """

    def __init__(self, procfs: Procfs, group: int | None = None, *, tenants: bool = False) -> None:
        self.tenants = tenants
        self._procfs = procfs
        self._group = group
        self._our_pidns = 0
        self._inside: Counter[_Key] = Counter()
        self._streams = 0
        self._accounts: OrderedDict[_Key, Bucket] = OrderedDict()  # latest last
        self.counters: Counter[str] = Counter(
            connections=0, refused_connections=0, requests=0, refused_requests=0, dropped_slow=0
        )

    # -- connections --------------------------------------------------------------------------------

    def enter(self, connection: PeerSocket) -> Access:
        """Who has connected, and what that is worth. Never raises; pair it with `leave`.

        A connection too many has a refusal with status 503; it is counted all the same until it leaves.
        """
        self.counters["connections"] += 1
        access = self._known(connection)
        self._inside[access.key] += 1
        each = _MOST_EACH if self.tenants else _MOST_REFUSED
        if self._inside.total() > (MOST_TENANTS if self.tenants else MOST_CONNECTIONS) or (
            access.key[0] != "user" and self._inside[access.key] > each
        ):
            self.counters["refused_connections"] += 1
            access.refusal = Problem(
                503,
                Reason.TOO_MANY_CONNECTIONS,
                "this peer has, or all together have, as many connections as are served: close some, or come back",
                headers={"Retry-After": "1"},
            )
        return access

    def leave(self, access: Access) -> None:
        """The connection is closed."""
        self._inside[access.key] -= 1
        if not self._inside[access.key]:
            del self._inside[access.key]
        if access.tenant is not None:
            access.tenant.peer.close()

    @property
    def inside(self) -> int:
        """How many are connected now."""
        return self._inside.total()

    def owner(self, connection: PeerSocket) -> _Key | None:
        """The container that a connection counts for; None if the process that connected is gone.

        OSError: no descriptors. Goes by the number of the process that connected, which is fair enough for a queue;
        `enter` makes sure.
        """
        try:
            return _account(self._procfs.cgroup(credentials_of(connection).host_pid))
        except ResolverError:
            return None

    @staticmethod
    def refusal(status: HTTPStatus, why: str) -> Refusal:
        """Why what comes is not read."""
        return Problem(status, _UNREADABLE[status], why).sent()

    def _known(self, connection: PeerSocket) -> Access:
        try:
            peer = peer_of(connection, self._procfs)
        except (PeerUnknown, OSError) as error:
            return self._unknown(error)
        access: Access | None = None
        try:
            access = self._may(peer)
        except (ResolverError, OSError, Problem) as error:
            return self._unknown(error)
        finally:
            if access is None or access.tenant is None:
                peer.close()
        return access

    def _may(self, peer: Peer) -> Access:
        """What this process may ask here; the `Tenant` in it owns the peer."""
        pidns, ns_pids = pidns_of(peer, self._procfs)
        host = pidns == self._own_pidns()
        if not self.tenants:
            if host and self._trusts(peer.credentials):
                return Access(self, ("user", peer.credentials.uid), None)
            return self._refused(_NOT_FOR_CONTAINERS)
        if host:
            return self._refused(_NOT_FOR_THE_HOST)
        cgroup = self._procfs.cgroup(peer.host_pid)
        container = parse_cgroup(cgroup)
        own = Namespace(pidns, len(ns_pids) - 1)
        access = Access(
            self, _account(cgroup), Tenant(peer, own, container.container_id if container else "")
        )
        access.require(everything=False)
        return access

    def _refused(self, why: str) -> Access:
        return Access(self, ("refused", 0), None, Problem(403, Reason.NOT_YOURS, why))

    def _unknown(self, error: Exception) -> Access:
        why = f"the calling process cannot be determined ({error}), so the request is refused"
        return Access(self, ("refused", 0), None, Problem(403, Reason.PEER_UNKNOWN, why))

    def _own_pidns(self) -> int:
        if not self._our_pidns:
            self._our_pidns = self._procfs.pidns("self")
        return self._our_pidns

    def _trusts(self, who: Credentials) -> bool:
        return who.uid == 0 or (self._group is not None and self._group in (who.gid, *who.groups))

    # -- accounts -----------------------------------------------------------------------------------

    def spend(self, key: _Key, requests: float) -> float:
        """Take that many from the account; else the seconds until there are enough, and nothing is taken."""
        account = self._accounts.pop(key, None)
        if account is None:
            account = Bucket(_RATE, _BURST) if key[0] == "user" else Bucket(_TENANT_RATE, _TENANT_BURST)
        self._accounts[key] = account
        if len(self._accounts) > _MOST_BUCKETS:
            self._accounts.popitem(last=False)
        return account.spend(requests)

    # -- streams of events ----------------------------------------------------------------------------

    def open_stream(self) -> None:
        """One more; `Problem` if there are as many as are served."""
        if self._streams >= _MOST_STREAMS:
            raise Problem(
                503,
                Reason.BUSY,
                f"{_MOST_STREAMS} streams of events are open, and no more are served",
                headers={"Retry-After": "5"},
            )
        self._streams += 1

    def close_stream(self) -> None:
        """One less."""
        self._streams -= 1


def _account(cgroup: str) -> _Key:
    """A container's, by what ``/proc/<pid>/cgroup`` says: by its id, or else by the cgroup, which it cannot leave."""
    container = parse_cgroup(cgroup)
    return ("container", container.container_id) if container else ("cgroup", cgroup)
