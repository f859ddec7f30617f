"""Connections on their way in: none is left open by who was turned out, or by the end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Hashable

from resolver.serve.admission import Places


class Client(asyncio.Protocol):
    idle = True
    transport: asyncio.BaseTransport | None = None

    def __init__(self, places: Places[Client]) -> None:
        self._places = places

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, _exc: Exception | None) -> None:
        self._places.leave(self)


async def let_in(most: int, count: int) -> tuple[Places[Client], list[socket.socket], list[socket.socket]]:
    def serve(owner: Hashable) -> Client:
        return Client(places)

    places: Places[Client] = Places(most, serve)
    pairs = [socket.socketpair() for _ in range(count)]
    for ours, _ in pairs:
        ours.setblocking(False)
        places.let_in(ours, "them")
    return places, [ours for ours, _ in pairs], [theirs for _, theirs in pairs]


def test_who_is_on_the_way_in_at_the_end_is_hung_up_on() -> None:
    async def run() -> None:
        places, ours, theirs = await let_in(most=8, count=3)
        await places.clear()
        assert [channel.fileno() for channel in ours] == [-1] * 3
        for client in theirs:
            assert client.recv(1) == b""
            client.close()

    asyncio.run(run())


def test_who_is_turned_out_on_the_way_in_is_not_served_later() -> None:
    async def run() -> None:
        places, ours, theirs = await let_in(most=2, count=5)
        await asyncio.sleep(0.05)
        assert [channel.fileno() >= 0 for channel in ours] == [False] * 3 + [True] * 2
        await places.clear()
        assert [channel.fileno() for channel in ours] == [-1] * 5
        for client in theirs:
            client.close()

    asyncio.run(run())
