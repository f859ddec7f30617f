"""Pauses between retries, and blocking work in threads."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from concurrent.futures import Future

T = TypeVar("T")


def doubled(first: float, most: float, times: int) -> float:
    """Return a pause in seconds: ``first`` doubled ``times`` times, at most ``most``."""
    return min(most, first * 2.0 ** min(times, 30))


def longer(pause: float, first: float, most: float) -> float:
    """Return the pause after ``pause``: ``first`` after none, doubled each time, at most ``most``."""
    return min(most, max(first, 2 * pause))


def started(work: Callable[[], T], *, name: str) -> Future[T]:
    """Start the work in a thread that doesn't delay the end of the process: a hanging one is left behind."""
    import threading
    from concurrent.futures import Future

    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whatever it is, the future raises it
            done.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return done


def in_a_thread(
    work: Callable[[], T],
    *,
    name: str,
    ended: Callable[[], None] | None = None,
    unwanted: Callable[[T], None] | None = None,
) -> asyncio.Future[T]:
    """Start the work in a thread that doesn't delay the end of the process.

    The loop calls ``ended`` after the work, and ``unwanted`` with the result if the future was cancelled.
    """
    import asyncio  # commands that only double a pause do not need it

    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(done: Future[T]) -> None:
        if ended is not None:
            ended()
        error = done.exception()
        if not future.cancelled():
            future.set_exception(error) if error else future.set_result(done.result())
        elif unwanted is not None and not error:
            unwanted(done.result())

    def tell(done: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, done)

    started(work, name=name).add_done_callback(tell)
    return future
