"""HAMi's host PID broker (merged after 2.10.0), protocol version 1: a process asks for its host PID.

The kernel identifies the client (`resolver.linux.peers`); the answer follows the policy of repairs. An unidentified
client gets status 1 and no number: HAMi's client then guesses, or leaves ``hostpid`` at 0, and the next pass repairs
either. Silent clients share a limited number of places; the longest silent one gives way.
"""

import asyncio
import contextlib
import os
import socket
import stat
import struct
from collections import Counter
from collections.abc import Callable

from resolver.base.counters import CounterByReason, CounterName
from resolver.base.errors import AccessDenied, ProcessGone, UsageError
from resolver.base.journal import Journal
from resolver.base.reasons import BrokerRefusal
from resolver.config import HostpidNamespace
from resolver.hami.hostpid_policy import HostpidPolicy
from resolver.linux.node_lock import refuse_new_in_root, unusable
from resolver.linux.peers import PeerUnknown, peer_of
from resolver.linux.procfs import Procfs
from resolver.pids.pidmap import PidMap
from resolver.serve.accept import Acceptor, Waiting
from resolver.serve.unix_socket import UnixSocket

REQUEST = struct.Struct("!4sHH")  # magic, version, command
ANSWER = struct.Struct("!4sHHI")  # magic, version, status, host PID
MAGIC, VERSION, MY_HOST_PID = b"HPID", 1, 1
SUCCESS, INVALID = 0, 1

MOST_WAITING = 512
EXCHANGE_SECONDS = 0.5
_BACKLOG = 4096  # clients that connect without blocking are refused when it is full
#: Share of a CPU for accepting and answering; the event loop's own work for each client is as much again.
_SHARE = 0.1


class Broker:
    """Answers on a listening socket; belongs to the running event loop.

    Counters: ``broker_answers``, ``broker_refused_<reason>``, ``broker_busy`` (no place or descriptor left),
    ``broker_timeouts`` (no whole request in time).
    """

    def __init__(
        self,
        procfs: Procfs,
        pidmap: PidMap,
        policy: Callable[[], HostpidPolicy],
        journal: Journal,
        counters: Counter[str],
        refused: Callable[[OSError], None] = lambda _: None,
    ) -> None:
        self._procfs = procfs
        self._pidmap = pidmap
        self._policy = policy
        self._journal = journal
        self._counters = counters
        self._refused = refused
        #: Clients, and the bytes read from each.
        self._waiting: Waiting[bytearray] = Waiting(EXCHANGE_SECONDS, self._readable, self._late)

    async def serve(self, path: str) -> None:
        """Answer until cancelled; while the socket is unavailable, report the reason and retry."""
        place = await self._journal.tried_again(lambda: opened(path), "broker", "broker_off", socket=path)
        self.start(place.listener)
        self._journal.log.info("broker_on", socket=place.path)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.stop()
            place.close()

    def start(self, listener: socket.socket) -> None:
        self._acceptor = Acceptor(listener, self._taken, share=_SHARE, refused=self._lacking)

    def stop(self) -> None:
        self._acceptor.stop()
        for connection, _ in self._waiting.clear():
            connection.close()

    def _taken(self, connection: socket.socket) -> None:
        if self._read(connection, received := bytearray()):
            connection.close()
            return
        if len(self._waiting) >= MOST_WAITING:
            self._full()
            longest, _ = next(iter(self._waiting))
            self._end(longest)
        self._waiting.add(connection, received)

    def _lacking(self, error: OSError) -> None:
        self._refused(error)
        self._full()

    def _full(self) -> None:
        self._counters[CounterName.BROKER_BUSY] += 1

    def _readable(self, connection: socket.socket, received: bytearray) -> None:
        if self._read(connection, received):
            self._end(connection)

    def _late(self, connection: socket.socket, _received: bytearray) -> None:
        self._counters[CounterName.BROKER_TIMEOUTS] += 1
        connection.close()

    def _end(self, connection: socket.socket) -> None:
        self._waiting.remove(connection)
        connection.close()

    def _read(self, connection: socket.socket, received: bytearray) -> bool:
        """Read the request so far, and answer once it is complete. False while more is to come.

        There is one request per connection.
        """
        try:
            data = connection.recv(REQUEST.size - len(received))
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        received += data
        if data and len(received) < REQUEST.size:
            return False
        try:
            if received:
                connection.send(self._answer(connection, bytes(received)))
        except BrokenPipeError:
            pass  # it has gone
        except OSError as error:  # descriptors have run out
            self._lacking(error)
        except Exception:  # a bug costs one client its answer, and is logged
            self._counters[CounterName.INTERNAL_ERRORS] += 1
            self._journal.log.exception("internal_error", step="broker")
        return True

    def _answer(self, connection: socket.socket, request: bytes) -> bytes:
        valid = request == REQUEST.pack(MAGIC, VERSION, MY_HOST_PID)
        number = self._number(connection) if valid else BrokerRefusal.INVALID
        if isinstance(number, BrokerRefusal):
            self._counters[CounterByReason.BROKER_REFUSED.of(number)] += 1
            return ANSWER.pack(MAGIC, VERSION, INVALID, 0)
        self._counters[CounterName.BROKER_ANSWERS] += 1
        return ANSWER.pack(MAGIC, VERSION, SUCCESS, number)

    def _number(self, connection: socket.socket) -> int | BrokerRefusal:
        """Return the number for the client's slot, and enter the process into the map.

        Before Linux 6.5 it is right only while the client runs: ``exact=False``.
        """
        namespace = self._policy().namespace
        if namespace is None:
            return BrokerRefusal.POLICY_UNKNOWN
        try:
            with peer_of(connection, self._procfs, exact=False) as peer:
                ns_pids = self._procfs.ns_pids(peer.host_pid)
                self._pidmap.source.read(peer.host_pid)
                if not peer.alive():
                    return BrokerRefusal.ENDED
        except PeerUnknown as unknown:
            return BrokerRefusal(unknown.reason.value)
        except ProcessGone:
            return BrokerRefusal.ENDED
        except AccessDenied:
            return BrokerRefusal.ACCESS_DENIED
        answer = peer.host_pid if namespace is HostpidNamespace.HOST else ns_pids[-1]
        self._journal.log.debug("broker_answer", host_pid=peer.host_pid, ns_pid=ns_pids[-1], answer=answer)
        return answer


def opened(path: str) -> UnixSocket:
    """Listen at the path. Raises `UsageError` if it is unavailable."""
    directory, name = os.path.split(os.path.abspath(path))
    directory = os.path.realpath(directory)  # /var/run is a link
    if os.geteuid() != 0:
        raise UsageError(
            "the broker must run as root, because HAMi's clients trust no other user: run the daemon as root, "
            "or leave --broker out"
        )
    try:
        _make(directory)
    except OSError as error:
        raise unusable(f"the directory {directory}", "--broker", error) from None
    place = os.path.join(directory, name)
    made = UnixSocket(place, "--broker", mode=0o666, backlog=_BACKLOG)  # any tenant may ask
    try:
        made.open()
    except BaseException:
        made.close()
        raise
    return made


def _make(directory: str) -> None:
    """Create the directory and its parents; `UsageError` unless root alone can change them.

    HAMi's client checks the directory in the same way.
    """
    refuse_new_in_root(directory, "--broker")
    parts = directory.split("/")[1:]
    for depth in range(1, len(parts) + 1):
        path, last = "/" + "/".join(parts[:depth]), depth == len(parts)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
            os.chmod(path, 0o711 if last else 0o755)  # whatever the umask says
        status = os.lstat(path)
        writable = status.st_mode & 0o022 and (last or not status.st_mode & stat.S_ISVTX)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != 0 or writable:
            raise UsageError(
                f"{path} is not a directory of root's alone, so HAMi's clients would not believe what is in it: "
                f"chown root {path} && chmod go-w {path}, or name another place with --broker"
            )
        if last and not status.st_mode & 0o001:
            raise UsageError(f"{path} may not be entered by tenants that are not root: chmod 711 {path}")
