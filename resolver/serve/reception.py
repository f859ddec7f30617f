"""Connections from unknown clients: accepted for a share of a CPU, held until a request begins, admitted one by one.

`Acceptor` takes connections from a listening socket; the excess waits in the kernel's queue. `Reception` holds them
until their turn. Owners (an address, a container) take turns: a client that sends a thousand requests delays only its
own. Within one owner, complete requests come before incomplete ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import time
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from resolver.base.limiter import Bucket
from resolver.serve.waiting import Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

_BATCH = 32
#: Accepting may use its share of a CPU, and a burst of so many seconds at once.
_BURST_SECONDS = 0.01
#: Without descriptors, nothing is accepted for so long.
_PAUSE_SECONDS = 0.5
#: How many that have gone are put away in one turn of the loop.
_MOST_GONE = 64
#: What of a request has to be there for it to be whole, and how much is looked at.
_END_OF_HEAD, _MOST_OF_HEAD = b"\r\n\r\n", 8192


class Acceptor:
    """Accepts connections on ``listener`` in batches, for at most ``share`` of a CPU, ``take`` included.

    ``take`` gets each connection, in non-blocking mode, and owns it. If it raises OSError, descriptors have run out:
    ``refused`` is called, and clients wait in the kernel's queue for a while. Belongs to the running event loop.
    """

    def __init__(
        self,
        listener: socket.socket,
        take: Callable[[socket.socket], None],
        *,
        share: float = 0.1,
        refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._listener = listener
        self._take = take
        self._refused = refused
        self._rest: asyncio.TimerHandle | None = None
        self._cpu = Bucket(share, _BURST_SECONDS)
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept)

    def stop(self) -> None:
        """Accept no more; the listener stays its owner's."""
        self._loop.remove_reader(self._listener.fileno())
        if self._rest is not None:
            self._rest.cancel()

    def _accept(self) -> None:
        began = time.thread_time()
        try:
            for _ in range(_BATCH):
                connection, _address = self._listener.accept()
                connection.setblocking(False)
                self._take(connection)
        except (BlockingIOError, ConnectionAbortedError):
            pass
        except OSError:
            self._refused()
            self._pause(_PAUSE_SECONDS)
            return
        if seconds := self._cpu.charge(time.thread_time() - began):
            self._pause(seconds)

    def _pause(self, seconds: float) -> None:
        fd = self._listener.fileno()
        self._loop.remove_reader(fd)
        self._rest = self._loop.call_later(seconds, self._loop.add_reader, fd, self._accept)


class _Guest(NamedTuple):
    connection: socket.socket
    whole: bool  # the whole head of its request has arrived


class Reception:
    """Holds connections from an `Acceptor` until a request has begun, and admits one every ``apart`` seconds.

    ``owner`` returns the key under which a connection is queued. None rejects it, with or without an answer; OSError
    means that descriptors have run out. ``let_in`` gets the connection, and owns it.

    Beyond ``most`` connections, the owner with the most loses one, with ``refusal`` as the answer: the longest silent
    one, else its oldest incomplete request, else its latest request. A connection that is silent for ``seconds`` is
    closed.
    """

    def __init__(
        self,
        listener: socket.socket,
        owner: Callable[[socket.socket], Hashable | None],
        let_in: Callable[[socket.socket, Hashable], None],
        *,
        refusal: bytes,
        most: int,
        apart: float,
        seconds: float,
        share: float = 0.1,
    ) -> None:
        self._owner, self._let_in, self._refusal, self._most = owner, let_in, refusal, most
        self._apart = apart
        self._silent: Waiting[Hashable] = Waiting(seconds, self._readable, self._dismiss)  # with its owner
        #: By owner, the next one first; of each, whole requests first.
        self._ready: OrderedDict[Hashable, list[_Guest]] = OrderedDict()
        self._held: Counter[Hashable] = Counter()
        self._next_at = 0.0
        self._turn: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._acceptor = Acceptor(listener, self._take, share=share)

    def stop(self) -> None:
        """Stop accepting, and close all waiting connections."""
        self._acceptor.stop()
        if self._turn is not None:
            self._turn.cancel()
        for silent in self._silent.clear():
            self._dismiss(*silent)
        for owner, guests in self._ready.items():
            for guest in guests:
                self._dismiss(guest.connection, owner)
        self._ready.clear()

    def charge(self, turns: float) -> None:
        """Delay the next admission by ``turns``, for further requests of an admitted client."""
        self._next_at = max(self._next_at, self._loop.time()) + turns * self._apart

    # -- in and out -----------------------------------------------------------------------------------

    def _take(self, connection: socket.socket) -> None:
        state = _state(connection)
        owner = None
        try:
            if state & _GONE or (owner := self._owner(connection)) is None:
                return
            self._held[owner] += 1
        finally:
            if owner is None:
                connection.close()
        if state:
            self._make_ready(connection, owner)
        else:
            self._silent.add(connection, owner)
        if self._held.total() > self._most:
            self._turn_one_away(connection)

    def _readable(self, connection: socket.socket, owner: Hashable) -> None:
        self._silent.remove(connection)
        if _state(connection) & _GONE:
            self._dismiss(connection, owner)
        else:
            self._make_ready(connection, owner)

    def _make_ready(self, connection: socket.socket, owner: Hashable) -> None:
        guests = self._ready.setdefault(owner, [])
        guests.append(_Guest(connection, _is_whole(connection)))
        guests.sort(key=lambda guest: not guest.whole)
        self._await_turn()

    def _await_turn(self) -> None:
        if self._ready and self._turn is None:
            self._turn = self._loop.call_at(max(self._next_at, self._loop.time()), self._next)

    def _next(self) -> None:
        """Admit the next guest that is still connected."""
        self._turn = None
        for _ in range(_MOST_GONE):
            if not self._ready:
                break
            owner, guests = self._ready.popitem(last=False)
            connection, _whole = guests.pop(0)
            if guests:
                self._ready[owner] = guests
            if not _state(connection) & _GONE:
                self._leave(owner)
                self.charge(1)
                self._let_in(connection, owner)
                break
            self._dismiss(connection, owner)
        self._await_turn()

    def _leave(self, owner: Hashable) -> None:
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]

    def _dismiss(self, connection: socket.socket, owner: Hashable) -> None:
        self._leave(owner)
        connection.close()

    def _turn_one_away(self, latest: socket.socket) -> None:
        ((greedy, _),) = self._held.most_common(1)
        guests = self._ready.get(greedy, [])
        begun = [guest for guest in guests if not guest.whole]
        connection = next((connection for connection, owner in self._silent if owner == greedy), None)
        # The request of a client that has only just come may be on its way.
        if connection is None or (connection is latest and begun):
            guest = (begun or guests[-1:])[0]
            connection = guest.connection
            guests.remove(guest)
            if not guests:
                del self._ready[greedy]
        else:
            self._silent.remove(connection)
        refuse(connection, self._refusal)
        self._dismiss(connection, greedy)


_GONE = select.POLLHUP | select.POLLERR | select.POLLNVAL | select.POLLRDHUP


def _state(connection: socket.socket) -> int:
    """Return the pending poll(2) events, 0 if there are none. A client that has shut down sending counts as gone."""
    poll = select.poll()
    poll.register(connection, select.POLLIN | select.POLLRDHUP)
    return sum(events for _, events in poll.poll(0))


def _is_whole(connection: socket.socket) -> bool:
    """Check if the whole head of a request has arrived."""
    try:
        return _END_OF_HEAD in connection.recv(_MOST_OF_HEAD, socket.MSG_PEEK)
    except OSError:
        return False  # it has gone, which its turn will show


def refuse(connection: socket.socket, answer: bytes) -> None:
    """Send a short answer if the socket buffer has room. The caller closes the connection.

    Reads pending data first: if a socket is closed with unread data, the kernel discards the answer.
    """
    with contextlib.suppress(OSError):
        connection.recv(1 << 16)
    with contextlib.suppress(OSError):
        connection.send(answer)
