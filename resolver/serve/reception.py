"""Connections from strangers: accepted for a share of a CPU, held until they ask something, let in one by one.

`Acceptor` takes connections from a listening socket; faster clients wait in the kernel's queue. `Reception`
holds them behind it: a client that has gone by its turn costs an accept and a close and nothing else, a silent one
holds a descriptor and no more, and turns go round by owner (an address, a container), so that a client that sends a
thousand requests delays its own. Of one owner's, those whose request is there come before those that have begun one:
who sends it byte by byte keeps nobody of the same address waiting. Nothing here runs by the clock while nobody
connects.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import time
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, NamedTuple

from resolver.serve.waiting import Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

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
    """Accepts on ``listener``, in batches, for at most ``share`` of a CPU, ``take`` included.

    ``take`` gets each connection, which does not block, and owns it. An OSError of its own means that descriptors
    have run out: ``refused`` is called, and clients wait in the kernel's queue for a while. Belongs to the running
    event loop.
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
        self._share = share
        self._refused = refused
        self._rest: asyncio.TimerHandle | None = None
        self._debt = 0.0  # CPU seconds spent beyond the share, as of `_debt_at`
        self._debt_at = time.monotonic()
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
        now = time.monotonic()
        self._debt = max(0.0, self._debt - (now - self._debt_at) * self._share) + time.thread_time() - began
        self._debt_at = now
        if self._debt > _BURST_SECONDS:
            self._pause((self._debt - _BURST_SECONDS) / self._share)

    def _pause(self, seconds: float) -> None:
        fd = self._listener.fileno()
        self._loop.remove_reader(fd)
        self._rest = self._loop.call_later(seconds, self._loop.add_reader, fd, self._accept)


class _Guest(NamedTuple):
    connection: socket.socket
    owner: Hashable


class _Queue:
    """The guests of one owner, in the order in which they are let in."""

    __slots__ = ("begun", "whole")

    def __init__(self) -> None:
        self.whole: deque[_Guest] = deque()  # their request's head is there
        self.begun: deque[_Guest] = deque()

    def __bool__(self) -> bool:
        return bool(self.whole or self.begun)

    def __iter__(self) -> Iterator[_Guest]:
        yield from self.whole
        yield from self.begun

    def add(self, guest: _Guest) -> None:
        (self.whole if _is_whole(guest.connection) else self.begun).append(guest)

    def first(self) -> _Guest:
        return (self.whole or self.begun).popleft()

    def least(self) -> _Guest:
        """Whom to turn away."""
        return self.begun.popleft() if self.begun else self.whole.pop()


class Reception:
    """Holds what an `Acceptor` takes until a request has begun to come, then lets it in: one each ``apart`` seconds.

    ``owner`` names whom a connection counts for; None turns it away (having answered, or not), and OSError means
    that descriptors have run out. ``let_in`` gets the connection, and owns it. Of more than ``most`` connections the
    owner with the most of them loses one, with ``refusal`` for an answer: the silent one that waits longest, or else
    the one that began its request first and has not ended it, or else its latest. A connection that says nothing for
    ``seconds`` is closed.
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
        self._owner = owner
        self._let_in = let_in
        self._refusal = refusal
        self._most = most
        self._apart = apart
        self._silent: Waiting[Hashable] = Waiting(
            seconds, self._readable, self._dismiss_silent
        )  # with its owner
        self._ready: OrderedDict[Hashable, _Queue] = OrderedDict()  # by owner, next one first
        self._held: Counter[Hashable] = Counter()
        self._next_at = 0.0
        self._turn: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._acceptor = Acceptor(listener, self._take, share=share)

    def stop(self) -> None:
        """Accept no more, and let go of everybody who waits."""
        self._acceptor.stop()
        if self._turn is not None:
            self._turn.cancel()
        for silent in self._silent.clear():
            self._dismiss_silent(*silent)
        for queue in self._ready.values():
            for guest in queue:
                self._dismiss(guest)
        self._ready.clear()

    @property
    def held(self) -> int:
        """How many wait, silent or not."""
        return self._held.total()

    def charge(self, turns: float) -> None:
        """An admitted client asks again: that uses up turns of those that wait."""
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
            self._make_ready(_Guest(connection, owner))
        else:
            self._silent.add(connection, owner)
        if self.held > self._most:
            self._turn_one_away(connection)

    def _readable(self, connection: socket.socket, owner: Hashable) -> None:
        self._silent.remove(connection)
        guest = _Guest(connection, owner)
        if _state(connection) & _GONE:
            self._dismiss(guest)
        else:
            self._make_ready(guest)

    def _make_ready(self, guest: _Guest) -> None:
        self._ready.setdefault(guest.owner, _Queue()).add(guest)
        if self._turn is None:
            self._turn = self._loop.call_at(max(self._next_at, self._loop.time()), self._next)

    def _next(self) -> None:
        """Let the next one in who is still there."""
        self._turn = None
        for _ in range(_MOST_GONE):
            if not self._ready:
                return
            owner, queue = self._ready.popitem(last=False)
            guest = queue.first()
            if queue:
                self._ready[owner] = queue
            if not _state(guest.connection) & _GONE:
                self._leave(owner)
                self.charge(1)
                self._let_in(guest.connection, owner)
                break
            self._dismiss(guest)
        if self._ready and self._turn is None:
            self._turn = self._loop.call_at(max(self._next_at, self._loop.time()), self._next)

    def _leave(self, owner: Hashable) -> None:
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]

    def _dismiss(self, guest: _Guest) -> None:
        self._leave(guest.owner)
        guest.connection.close()

    def _dismiss_silent(self, connection: socket.socket, owner: Hashable) -> None:
        self._dismiss(_Guest(connection, owner))

    def _turn_one_away(self, latest: socket.socket) -> None:
        ((greedy, _),) = self._held.most_common(1)
        silent = next((connection for connection, owner in self._silent if owner == greedy), None)
        queue = self._ready.get(greedy)
        # The request of who has only just come may be on its way.
        if silent is None or (silent is latest and queue is not None and queue.begun):
            queue = self._ready[greedy]
            guest = queue.least()
            if not queue:
                del self._ready[greedy]
        else:
            self._silent.remove(silent)
            guest = _Guest(silent, greedy)
        refuse(guest.connection, self._refusal)
        self._dismiss(guest)


_GONE = select.POLLHUP | select.POLLERR | select.POLLNVAL | select.POLLRDHUP


def _state(connection: socket.socket) -> int:
    """The events of poll(2), without waiting; 0 while nothing has come. Who sends no more counts as gone."""
    poll = select.poll()
    poll.register(connection, select.POLLIN | select.POLLRDHUP)
    return sum(events for _, events in poll.poll(0))


def _is_whole(connection: socket.socket) -> bool:
    """Whether a request's head has come."""
    try:
        return _END_OF_HEAD in connection.recv(_MOST_OF_HEAD, socket.MSG_PEEK)
    except OSError:
        return False  # it has gone, which its turn will show


def refuse(connection: socket.socket, answer: bytes) -> None:
    """Send a short answer, if the client takes it at once. The caller closes.

    What came is read first: closing with something unread would make the kernel throw the answer away.
    """
    with contextlib.suppress(OSError):
        connection.recv(1 << 16)
    with contextlib.suppress(OSError):
        connection.send(answer)


def http_refusal(retry_after: int, why: str) -> bytes:
    """503 as HTTP, for `Reception`."""
    body = f"{why}\n".encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: {retry_after}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
