"""Standard error that never blocks: lines wait in a bounded queue.

A pipe, socket or terminal that poll(2) reports writable takes at most PIPE_BUF bytes without blocking (pipe_poll in
fs/pipe.c).
"""

import os
import select
from collections import deque

_PIECE = select.PIPE_BUF
#: Most bytes that wait; further output is lost.
MOST_BYTES = 1 << 18


class Output:
    """Write text to a descriptor. ``lost`` counts lines without room since they were last logged."""

    def __init__(self, fd: int) -> None:
        self.lost = 0
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._queue: deque[bytes] = deque()
        self._waiting = 0

    def write(self, text: str) -> None:
        """Write a line, or keep it for later."""
        data = text.encode("utf-8", "backslashreplace")
        self.flush()
        if self._waiting + len(data) > MOST_BYTES:
            self.lost += 1
            return
        self._queue.extend(data[at : at + _PIECE] for at in range(0, len(data), _PIECE))
        self._waiting += len(data)
        self.flush()

    def flush(self) -> None:
        while self._queue and any(event & select.POLLOUT for _, event in self._poll.poll(0)):
            piece = self._queue.popleft()
            try:
                written = os.write(self._fd, piece)
            except OSError:  # the reader is gone, or the disk is full
                written = len(piece)
                self.lost += 1
            self._waiting -= written
            if written < len(piece):
                self._queue.appendleft(piece[written:])

    def take_lost(self) -> int:
        """Return and reset the number of lost lines; 0 until the queue is empty."""
        self.flush()
        lost = 0 if self._queue else self.lost
        self.lost -= lost
        return lost
