"""A bounded HTTP server: holds connections until a request begins, and admits them one by one.

The excess waits in the kernel's queue. Owners (an address, a container) take turns, so a thousand requests delay only
their owner's. Complete ones come first.
"""

import asyncio
import contextlib
import select
import socket
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

from resolver.serve.accept import Acceptor, Waiting
from resolver.serve.http import PLAIN, Application, Connection, Gatekeeper, Limits, refusal

#: How many connections that have gone are closed in one turn of the loop.
_MOST_GONE = 64
#: The mark of a complete request, and how many bytes are searched for it.
_END_OF_HEAD, _MOST_OF_HEAD = b"\r\n\r\n", 8192
_TLS_HANDSHAKE = b"\x16\x03"
_GONE = select.POLLHUP | select.POLLERR | select.POLLNVAL | select.POLLRDHUP


class _Guest(NamedTuple):
    channel: socket.socket
    whole: bool  # the whole head of its request has arrived


class Server:
    """Answers on a listening socket; belongs to the running event loop.

    A connection is silent, then ready, then inside; without ``limits.waiting`` it is inside at once. One too many
    waiting costs the owner of most of them the longest silent one, else its oldest incomplete request, else its latest.
    One too many inside costs the owner of most of them its oldest idle one.
    """

    def __init__(
        self, application: Application, gatekeeper: Gatekeeper, listener: socket.socket, limits: Limits
    ) -> None:
        self._application, self._gatekeeper, self._limits = application, gatekeeper, limits
        #: Silent connections with their owners.
        self._silent: Waiting[Hashable] = Waiting(
            limits.seconds, self._readable, late=lambda channel, _: channel.close()
        )
        #: By owner, the next one first; of each, whole requests first.
        self._ready: OrderedDict[Hashable, list[_Guest]] = OrderedDict()
        self._inside: dict[asyncio.Task[None], tuple[Connection, Hashable]] = {}  # oldest first
        self._next_at = 0.0
        self._turn: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        busy = f"{limits.busy}\n".encode()
        self._busy = refusal(503, PLAIN, busy, {"Retry-After": "1"}).answer if limits.busy else b""
        take = self._take if limits.waiting else self.let_in
        self._acceptor = Acceptor(
            listener,
            take,
            share=limits.share,
            refused=gatekeeper.refused,
            answering=lambda: any(not connection.idle for connection, _ in self._inside.values()),
        )

    async def stop(self) -> None:
        self._acceptor.stop()
        if self._turn is not None:
            self._turn.cancel()
        guests = [guest.channel for guests in self._ready.values() for guest in guests]
        for channel in (*guests, *(channel for channel, _ in self._silent.clear())):
            channel.close()
        for task in (inside := list(self._inside)):
            task.cancel()
        await asyncio.gather(*inside, return_exceptions=True)

    def _take(self, channel: socket.socket) -> None:
        state = _state(channel)
        try:
            owner = None if state & _GONE else self._gatekeeper.owner(channel)
        except OSError:
            channel.close()
            raise
        if owner is None:
            channel.close()
        elif state:
            self._make_ready(channel, owner)
        else:
            self._silent.add(channel, owner)
        if len(self._silent) + sum(map(len, self._ready.values())) > self._limits.waiting:
            self._turn_one_away(channel)

    def _readable(self, channel: socket.socket, owner: Hashable) -> None:
        self._silent.remove(channel)
        if _state(channel) & _GONE:
            channel.close()
        else:
            self._make_ready(channel, owner)

    def _make_ready(self, channel: socket.socket, owner: Hashable) -> None:
        guests = self._ready.setdefault(owner, [])
        insort(guests, _Guest(channel, _is_whole(channel)), key=lambda guest: not guest.whole)
        self._await_turn()

    def _await_turn(self) -> None:
        if self._ready and self._turn is None:
            self._turn = self._loop.call_at(max(self._next_at, self._loop.time()), self._next)

    def _next(self) -> None:
        self._turn = None
        for _ in range(_MOST_GONE):
            if not self._ready:
                break
            owner, guests = self._ready.popitem(last=False)
            channel, _whole = guests.pop(0)
            if guests:
                self._ready[owner] = guests
            if not _state(channel) & _GONE:
                self._next_at = self._loop.time() + self._limits.apart
                self.let_in(channel, owner)
                break
            channel.close()
        self._await_turn()

    def _turn_one_away(self, latest: socket.socket) -> None:
        held = Counter(owner for _, owner in self._silent)
        held.update({owner: len(guests) for owner, guests in self._ready.items()})
        ((greedy, _),) = held.most_common(1)
        guests = self._ready.get(greedy, [])
        channel = next((channel for channel, owner in self._silent if owner == greedy), None)
        # Whole ones are first. The request of a client that has only just come may be on its way.
        if channel is None or (channel is latest and guests and not guests[-1].whole):
            guest = next((guest for guest in guests if not guest.whole), guests[-1])
            channel = guest.channel
            guests.remove(guest)
            if not guests:
                del self._ready[greedy]
        else:
            self._silent.remove(channel)
        _hang_up(channel, self._busy)

    def let_in(self, channel: socket.socket, owner: Hashable = None) -> None:
        """Serve this connection from now on. It may have data already."""
        if len(self._inside) >= self._limits.connections:
            ((greedy, _),) = Counter(owner for _, owner in self._inside.values()).most_common(1)
            theirs = [task for task, (_, owner) in self._inside.items() if owner == greedy]
            oldest = next((task for task in theirs if self._inside[task][0].idle), theirs[0])
            del self._inside[oldest]
            oldest.cancel()
        connection = Connection(channel, self._application, self._gatekeeper, self._limits)
        task = self._loop.create_task(connection.run())
        self._inside[task] = connection, owner
        task.add_done_callback(lambda task: self._left(task, connection))

    def _left(self, task: asyncio.Task[None], connection: Connection) -> None:
        self._inside.pop(task, None)
        _hang_up(connection.channel, connection.last_words)


async def serve(
    application: Application, gatekeeper: Gatekeeper, listener: socket.socket, limits: Limits
) -> None:
    """Answer until cancelled. The listener stays its owner's."""
    server = Server(application, gatekeeper, listener, limits)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        await server.stop()


def _state(channel: socket.socket) -> int:
    """Return the pending poll(2) events. A client that has shut down sending counts as gone."""
    poll = select.poll()
    poll.register(channel, select.POLLIN | select.POLLRDHUP)
    return sum(events for _, events in poll.poll(0))


def _is_whole(channel: socket.socket) -> bool:
    """Check if the whole head of a request has arrived, or TLS's first record."""
    try:
        head = channel.recv(_MOST_OF_HEAD, socket.MSG_PEEK)
    except OSError:
        return False  # a closed one is noticed at its turn
    if head.startswith(_TLS_HANDSHAKE):
        return len(head) >= 5 + int.from_bytes(head[3:5])
    return _END_OF_HEAD in head


def _hang_up(channel: socket.socket, answer: bytes) -> None:
    """Send a short answer if the socket's buffer has room, and close the connection.

    Pending data is read, because the kernel discards the answer if a socket is closed with unread data.
    """
    if answer:
        with contextlib.suppress(OSError):
            channel.send(answer)
        with contextlib.suppress(OSError):
            channel.recv(1 << 16)
    channel.close()
