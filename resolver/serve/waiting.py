"""Waiting connections: watched until they become readable, given up after a time limit."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

_T = TypeVar("_T")


class _Watched(NamedTuple, Generic[_T]):
    connection: socket.socket
    about: _T
    deadline: float


class Waiting(Generic[_T]):
    """Connections with a value each, kept for at most ``seconds``; iterated in order of arrival.

    ``readable`` is called when a connection is readable or hung up; ``late``, with the same arguments, when the time is
    over: the connection is no longer watched, and the callee closes it. Belongs to the running event loop.
    """

    def __init__(
        self,
        seconds: float,
        readable: Callable[[socket.socket, _T], None],
        late: Callable[[socket.socket, _T], None],
    ) -> None:
        self._seconds = seconds
        self._readable = readable
        self._late = late
        self._watched: OrderedDict[int, _Watched[_T]] = OrderedDict()  # by descriptor
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._watched)

    def __iter__(self) -> Iterator[tuple[socket.socket, _T]]:
        for watched in self._watched.values():
            yield watched.connection, watched.about

    def add(self, connection: socket.socket, about: _T) -> None:
        """Wait for this one, too."""
        fd = connection.fileno()
        watched = _Watched(connection, about, self._loop.time() + self._seconds)
        self._watched[fd] = watched
        self._loop.add_reader(fd, self._readable, connection, about)
        if self._timer is None:
            self._timer = self._loop.call_at(watched.deadline, self._expire)

    def remove(self, connection: socket.socket) -> None:
        """Wait for it no more. It stays open."""
        fd = connection.fileno()
        self._loop.remove_reader(fd)
        del self._watched[fd]

    def clear(self) -> list[tuple[socket.socket, _T]]:
        """Stop watching all connections; return them, still open."""
        if self._timer is not None:
            self._timer.cancel()
        everybody = list(self)
        for connection, _ in everybody:
            self.remove(connection)
        return everybody

    def _expire(self) -> None:
        self._timer = None
        while self._watched:
            first = next(iter(self._watched.values()))
            if first.deadline > self._loop.time():
                self._timer = self._loop.call_at(first.deadline, self._expire)
                return
            self.remove(first.connection)
            self._late(first.connection, first.about)
