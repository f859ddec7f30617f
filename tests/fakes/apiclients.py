"""Many clients of the API at once, in one thread: good ones, silent ones, slow ones, and some that talk garbage."""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

#: What the good ones ask, and what must be in the answer.
Question = tuple[bytes, bytes]


_POST = (
    b"POST /v1/lookup HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
)


#: Seconds that a good one waits for an answer.
_PATIENCE = 5.0


class Outcome(NamedTuple):
    """Milliseconds of every answer to a good client, ascending; what was wrong, counted; what the others met."""

    milliseconds: list[float]
    wrong: Counter[str]
    others: Counter[str]

    def percentile(self, per_cent: float) -> float | None:
        """Of the good ones' milliseconds; None if there was no answer."""
        if not self.milliseconds:
            return None
        return self.milliseconds[
            min(len(self.milliseconds) - 1, int(len(self.milliseconds) * per_cent / 100))
        ]


def get(path: str, accept: str = "text/plain") -> bytes:
    """A request that leaves the connection open."""
    return f"GET {path} HTTP/1.1\r\nHost: resolver\r\nAccept: {accept}\r\n\r\n".encode()


class _Client:
    """One connection, made again when it is lost."""

    def __init__(self, crowd: _Crowd, due: float) -> None:
        self.crowd = crowd
        self.due = due
        self.channel: socket.socket | None = None

    def connect(self) -> socket.socket:
        if self.channel is None:
            channel = socket.socket(socket.AF_UNIX)
            channel.setblocking(False)
            try:
                channel.connect(self.crowd.path)
            except OSError:  # its backlog is full
                channel.close()
                raise
            self.crowd.selector.register(channel, selectors.EVENT_READ, self)
            self.channel = channel
        return self.channel

    def close(self) -> None:
        if self.channel is not None:
            self.crowd.selector.unregister(self.channel)
            self.channel.close()
            self.channel = None

    def act(self, now: float) -> None:
        raise NotImplementedError

    def hear(self) -> None:
        """Something can be read."""
        assert self.channel is not None
        try:
            said = self.channel.recv(1 << 16)
        except ConnectionResetError:
            said = b""
        kind = type(self).__name__.lstrip("_")
        if not said:
            self.crowd.others[f"{kind} hung up on"] += 1
            self.close()
        else:
            self.crowd.others[f"{kind} told {said[9:12].decode('latin-1')}"] += 1


class _Good(_Client):
    """Asks, waits for the whole answer, looks at it, and asks again after a while.

    A late answer is waited for: who hangs up and comes back makes a busy machine busier, until nobody is answered.
    """

    asked_at = 0.0
    heard = b""
    wanted = b""

    def act(self, now: float) -> None:
        if self.asked_at and time.perf_counter() - self.asked_at < _PATIENCE:
            self.due = now + self.crowd.period
            return
        if self.asked_at:
            self.crowd.wrong[f"no answer within {_PATIENCE:g} s"] += 1
            self.close()
        question, self.wanted = self.crowd.chance.choice(self.crowd.questions)
        self.due = now + self.crowd.period
        self.heard = b""
        try:
            channel = self.connect()
            self.asked_at = time.perf_counter()
            channel.sendall(question)
        except OSError as error:
            self.asked_at = 0.0
            self.crowd.wrong[f"{type(error).__name__}"] += 1
            self.close()

    def hear(self) -> None:
        assert self.channel is not None
        try:
            said = self.channel.recv(1 << 16)
        except OSError:
            said = b""
        if not said:
            if self.asked_at:
                self.crowd.wrong["hung up on"] += 1
                self.asked_at = 0.0
            self.close()
            return
        self.heard += said
        head, complete, body = self.heard.partition(b"\r\n\r\n")
        length = (
            int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0) if complete else 0
        )
        if complete and len(body) >= length:
            self.crowd.milliseconds.append((time.perf_counter() - self.asked_at) * 1e3)
            self.asked_at = 0.0
            if not head.startswith(b"HTTP/1.1 200 ") or self.wanted not in body:
                self.crowd.wrong[f"{head[:20]!r} {body[:80]!r}, not {self.wanted!r}"] += 1


class _Silent(_Client):
    """Connects and says nothing."""

    def act(self, now: float) -> None:
        self.due = now + 1.0
        with contextlib.suppress(OSError):
            self.connect()


class _Slow(_Client):
    """Sends its headers a byte at a time."""

    sent = 0

    def act(self, now: float) -> None:
        self.due = now + 0.3
        text = self.crowd.questions[0][0]
        try:
            channel = self.connect()
            channel.send(text[self.sent % (len(text) - 4) :][:1])
            self.sent += 1
        except OSError:
            self.close()


class _Deaf(_Client):
    """Asks for much, and never reads an answer."""

    def connect(self) -> socket.socket:
        if self.channel is None:
            self.channel = socket.socket(socket.AF_UNIX)
            self.channel.setblocking(False)
            self.channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            self.channel.connect(self.crowd.path)
        return self.channel

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def act(self, now: float) -> None:
        self.due = now + 0.2
        try:
            self.connect().send(get("/v1/openapi.json", "application/json") * 4)
        except BlockingIOError:
            pass
        except OSError:
            self.crowd.others["Deaf hung up on"] += 1
            self.close()


class _Garbage(_Client):
    """Says what is no HTTP, or no request that is served."""

    def act(self, now: float) -> None:
        self.due = now + 0.2
        chance = self.crowd.chance
        text = chance.choice(
            (
                chance.randbytes(chance.randrange(1, 3000)),
                b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 5000,
                b"GET /v1/lookup?" + b"x" * 30_000,
                _POST % (99_999_999, b""),
                _POST % (7, b"[" * 7),
                b"GET /v1/lookup?container=../../etc&pid=%00 HTTP/1.1\r\nHost: r\r\n\r\n",
                b"DELETE /v1/status HTTP/1.1\r\nHost: r\r\n\r\n",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            )
        )
        try:
            self.connect().send(text)
        except OSError:
            self.close()


class _Crowd:
    def __init__(self, path: str, questions: Sequence[Question], period: float, seed: int) -> None:
        self.path = path
        self.questions = questions
        self.period = period
        self.chance = random.Random(seed)
        self.selector = selectors.DefaultSelector()
        self.milliseconds: list[float] = []
        self.wrong: Counter[str] = Counter()
        self.others: Counter[str] = Counter()

    def run(self, clients: Sequence[_Client], seconds: float, meanwhile: Callable[[], None] | None) -> None:
        ends = time.monotonic() + seconds
        next_look = time.monotonic() + 1.0
        while (now := time.monotonic()) < ends:
            soonest = min(clients, key=lambda client: client.due)
            for key, _ in self.selector.select(max(0.0, min(soonest.due, ends) - now)):
                key.data.hear()
            now = time.monotonic()
            if soonest.due <= now < ends:
                soonest.act(now)
            if meanwhile is not None and now >= next_look:
                next_look = now + 1.0
                meanwhile()
        ends = time.monotonic() + _PATIENCE  # what was asked last is answered
        while any(isinstance(client, _Good) and client.asked_at for client in clients):
            if (left := ends - time.monotonic()) <= 0:
                break
            for key, _ in self.selector.select(left):
                key.data.hear()
        for client in clients:
            if isinstance(client, _Good) and client.asked_at:
                self.wrong["no answer at the end"] += 1
            client.close()
        self.selector.close()


def crowd(
    path: str,
    questions: Sequence[Question],
    seconds: float,
    *,
    good: int = 160,
    period: float = 0.2,
    seed: int = 1,
    meanwhile: Callable[[], None] | None = None,
) -> Outcome:
    """Let that many good ones ask every `period` seconds, and a quarter of that number disturb them."""
    those = _Crowd(path, questions, period, seed)
    begins = time.monotonic()
    clients: list[_Client] = [_Good(those, begins + period * number / good) for number in range(good)]
    for number in range(good // 16):
        clients += [kind(those, begins + number * 0.01) for kind in (_Silent, _Slow, _Deaf, _Garbage)]
    those.run(clients, seconds, meanwhile)
    return Outcome(sorted(those.milliseconds), those.wrong, those.others)
