"""A TCP socket whose close waits: unsent data, SO_LINGER, and a peer that reads nothing."""

import contextlib
import socket
import struct
from collections.abc import Iterator


@contextlib.contextmanager
def lingering(seconds: int) -> Iterator[int]:
    """Yield the socket's descriptor, which the block has to close; the peer lives as long as the block."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        channel = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, seconds))
        channel.setblocking(False)
        with peer:
            with contextlib.suppress(BlockingIOError):
                while True:
                    channel.send(bytes(1 << 16))
            yield channel.detach()
