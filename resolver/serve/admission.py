"""The places of those that a server has let in: a limited number, and the client that holds most of them loses one."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Hashable


class Served(Protocol):
    """An `asyncio.Protocol` that serves one connection. It calls `Places.leave` when the connection is lost."""

    transport: Any

    @property
    def idle(self) -> bool:
        """Whether it waits for no answer."""


_ServedT = TypeVar("_ServedT", bound=Served)


class Places(Generic[_ServedT]):
    """At most ``most`` connections; one more costs the owner that has most of them its oldest idle one.

    ``serve`` makes the protocol for a connection of this owner. Belongs to the running event loop.
    """

    def __init__(self, most: int, serve: Callable[[Hashable], _ServedT]) -> None:
        self._most = most
        self._serve = serve
        self._inside: dict[_ServedT, Hashable] = {}  # oldest first
        self._coming: dict[_ServedT, asyncio.Task[Any]] = {}
        self._loop = asyncio.get_running_loop()

    def let_in(self, channel: socket.socket, owner: Hashable) -> None:
        """Serve this connection from now on. It may have data already."""
        if len(self._inside) >= self._most:
            self._turn_one_out()
        served = self._serve(owner)
        self._inside[served] = owner
        protocol: Any = served
        task = self._loop.create_task(self._loop.connect_accepted_socket(lambda: protocol, channel))
        self._coming[served] = task
        task.add_done_callback(lambda done: self._came(done, served, channel))

    def leave(self, served: _ServedT) -> None:
        """Its connection is lost."""
        self._inside.pop(served, None)

    async def clear(self) -> None:
        """Hang up on everybody."""
        coming = list(self._coming.values())
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        for served in list(self._inside):
            self._hang_up(served)
        self._inside.clear()
        await asyncio.sleep(0)  # a turn for the transports to close what they hold

    def _came(self, task: asyncio.Task[Any], served: _ServedT, channel: socket.socket) -> None:
        del self._coming[served]
        if task.cancelled() or task.exception() is not None:  # turned out, or gone already
            channel.close()
            self.leave(served)

    def _turn_one_out(self) -> None:
        ((greedy, _),) = Counter(self._inside.values()).most_common(1)
        theirs = [served for served, owner in self._inside.items() if owner == greedy]
        oldest = next((served for served in theirs if served.idle), theirs[0])
        self.leave(oldest)
        self._hang_up(oldest)

    def _hang_up(self, served: _ServedT) -> None:
        coming = self._coming.get(served)
        if coming is not None and not coming.done():
            coming.cancel()
        elif served.transport is not None:
            served.transport.abort()
