"""Many clients of the API at once, in one thread: good ones, silent ones, slow ones, and some that talk garbage."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

#: A good client's request, and what must be in the answer.
Question = tuple[bytes, bytes]

_POST = (
    b"POST /v1/lookup HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
)
#: Seconds that a good one waits for an answer.
_PATIENCE = 5.0


class Outcome(NamedTuple):
    """Milliseconds of every answer to a good client, ascending; what was wrong, counted."""

    milliseconds: list[float]
    wrong: Counter[str]

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


def crowd(
    path: str,
    questions: Sequence[Question],
    seconds: float,
    *,
    good: int = 160,
    period: float = 0.2,
    meanwhile: Callable[[], object] = lambda: None,
) -> Outcome:
    """Let that many good ones ask every `period` seconds, and a quarter of that number disturb them.

    ``meanwhile`` is called each second.
    """
    return asyncio.run(_Crowd(path, questions, period).run(seconds, good, meanwhile))


class _Crowd:
    def __init__(self, path: str, questions: Sequence[Question], period: float) -> None:
        self._path, self._questions, self._period = path, questions, period
        self._chance = random.Random(1)
        self._found = Outcome([], Counter())

    async def run(self, seconds: float, good: int, meanwhile: Callable[[], object]) -> Outcome:
        ends = time.monotonic() + seconds
        asking = [asyncio.create_task(self._good(self._period * n / good, ends)) for n in range(good)]
        bad = (self._silent, self._slow, self._deaf, self._garbage)
        others = [asyncio.create_task(self._again(each)) for each in bad for _ in range(good // 16)]
        while time.monotonic() < ends:
            await asyncio.sleep(1.0)
            meanwhile()
        await asyncio.gather(*asking)  # what was asked last is answered
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._found.milliseconds.sort()
        return self._found

    async def _good(self, delay: float, ends: float) -> None:
        """Ask, wait for the whole answer, look at it, and ask again after a while, on one connection."""
        channel: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        await asyncio.sleep(delay)
        while (asked := time.monotonic()) < ends:
            question, wanted = self._chance.choice(self._questions)
            try:
                channel = channel or await asyncio.open_unix_connection(self._path)
                began = time.perf_counter()
                channel[1].write(question)
                head, body = await asyncio.wait_for(_answer(channel[0]), _PATIENCE)
                self._found.milliseconds.append((time.perf_counter() - began) * 1e3)
                if not head.startswith(b"HTTP/1.1 200 ") or wanted not in body:
                    self._found.wrong[f"{head[:20]!r} {body[:80]!r}, not {wanted!r}"] += 1
            except (OSError, EOFError, TimeoutError) as error:
                self._found.wrong[type(error).__name__] += 1
                if channel:
                    channel[1].close()
                channel = None
            await asyncio.sleep(max(0.0, asked + self._period - time.monotonic()))
        if channel:
            channel[1].close()

    async def _again(self, client: Callable[..., Awaitable[object]]) -> None:
        """A client that disturbs, connected again whenever it was hung up on."""
        while True:
            with contextlib.suppress(OSError, EOFError):
                reader, writer = await asyncio.open_unix_connection(self._path, limit=4096)
                try:
                    await client(reader, writer)
                finally:
                    writer.close()
            await asyncio.sleep(0.2)

    async def _silent(self, reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def _slow(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send the headers a byte at a time."""
        for byte in self._questions[0][0][:-4]:
            writer.write(bytes((byte,)))
            await writer.drain()
            await asyncio.sleep(0.3)

    async def _deaf(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Ask for much, and read no answer: more than ``limit`` bytes of them stop the reading."""
        while True:
            writer.write(get("/v1/openapi.json", "application/json") * 4)
            await writer.drain()
            await asyncio.sleep(0.2)

    async def _garbage(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Say what is no HTTP, or no request that is served."""
        text = self._chance.choice(
            (
                self._chance.randbytes(self._chance.randrange(1, 3000)),
                b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 5000,
                b"GET /v1/lookup?" + b"x" * 30_000,
                _POST % (99_999_999, b""),
                _POST % (7, b"[" * 7),
                b"GET /v1/lookup?container=../../etc&pid=%00 HTTP/1.1\r\nHost: r\r\n\r\n",
                b"DELETE /v1/status HTTP/1.1\r\nHost: r\r\n\r\n",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            )
        )
        writer.write(text)
        await reader.read(1 << 16)


async def _answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return head, await reader.readexactly(length)
