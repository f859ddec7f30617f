"""Accepting connections for a share of a CPU, and waiting until they become readable, for a limited time."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from resolver.base.budget import Bucket

_T = TypeVar("_T")

_BATCH = 32
#: Accepting may use its share of a CPU, and a burst of so many seconds at once.
_BURST_SECONDS = 0.01
#: Without descriptors, nothing is accepted for so long.
_PAUSE_SECONDS = 0.5


class Acceptor:
    """Accepts connections on ``listener`` in batches, for at most ``share`` of a CPU, ``take`` included.

    ``take`` owns each connection, which doesn't block. If it raises OSError, descriptors or epoll watches have run out:
    ``refused`` is called with it, and clients wait in the kernel's queue for a while. While ``answering()``, the share
    is of the CPU that this process gets: on a busy node an answer doesn't wait for a flood. It belongs to the loop.
    """

    def __init__(
        self,
        listener: socket.socket,
        take: Callable[[socket.socket], None],
        *,
        share: float = 0.1,
        refused: Callable[[OSError], None] = lambda _: None,
        answering: Callable[[], bool] = lambda: False,
    ) -> None:
        self._answering = answering
        self._listener = listener
        self._take = take
        self._refused = refused
        self._rest: asyncio.TimerHandle | None = None
        self._cpu = Bucket(share, _BURST_SECONDS)
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept)

    def stop(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        if self._rest is not None:
            self._rest.cancel()

    def _accept(self) -> None:
        began, began_cpu = time.monotonic(), time.thread_time()
        try:
            for _ in range(_BATCH):
                connection, _address = self._listener.accept()
                connection.setblocking(False)
                self._take(connection)
        except (BlockingIOError, ConnectionAbortedError):
            pass
        except OSError as error:
            self._refused(error)
            self._pause(_PAUSE_SECONDS)
            return
        spent = time.monotonic() - began if self._answering() else time.thread_time() - began_cpu
        if seconds := self._cpu.charge(spent):
            self._pause(seconds)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._rest = self._loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        try:
            self._loop.add_reader(self._listener.fileno(), self._accept)
        except OSError as error:  # no further epoll watch is allowed
            self._refused(error)
            self._pause(_PAUSE_SECONDS)


class Waiting(Generic[_T]):
    """Connections with a value each, kept for at most ``seconds``; iterated in order of arrival.

    ``readable`` is called when a connection is readable or hung up, ``late`` after the time, when it is no longer
    watched, and must close it. Belongs to the running event loop.
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
        self._watched: dict[socket.socket, tuple[_T, asyncio.TimerHandle]] = {}
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._watched)

    def __iter__(self) -> Iterator[tuple[socket.socket, _T]]:
        return ((connection, value) for connection, (value, _) in self._watched.items())

    def add(self, connection: socket.socket, value: _T) -> None:
        timer = self._loop.call_later(self._seconds, self._expire, connection, value)
        self._watched[connection] = value, timer
        self._loop.add_reader(connection.fileno(), self._readable, connection, value)

    def remove(self, connection: socket.socket) -> None:
        """Stop waiting for a connection, which stays open."""
        self._loop.remove_reader(connection.fileno())
        self._watched.pop(connection)[1].cancel()

    def clear(self) -> list[tuple[socket.socket, _T]]:
        """Stop waiting for all connections; return them, still open."""
        cleared = list(self)
        for connection, _ in cleared:
            self.remove(connection)
        return cleared

    def _expire(self, connection: socket.socket, value: _T) -> None:
        self.remove(connection)
        self._late(connection, value)
