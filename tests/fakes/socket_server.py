"""A Unix socket whose answers a test decides: slow, broken, false, or of another version."""

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

Answer = Callable[[socket.socket], None]


def http(body: bytes | str, status: str = "200 OK") -> bytes:
    data = body.encode() if isinstance(body, str) else body
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(data), data)


class SocketServer:
    """Accept connections one by one, read a request, and send the answer, or call it if it is a function."""

    def __init__(self, path: Path | str, answer: Answer | bytes) -> None:
        self.requests: list[bytes] = []
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(8)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # until the listener is shut
            while True:
                channel, _ = self._listener.accept()
                with channel, contextlib.suppress(OSError):
                    self.requests.append(channel.recv(1 << 16))
                    if isinstance(self._answer, bytes):
                        channel.sendall(self._answer)
                    else:
                        self._answer(channel)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(60)
