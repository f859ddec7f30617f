"""Waiting before the next try, and work that the event loop cannot wait for."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

from resolver.errors import UsageError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

T = TypeVar("T")

_MOST_DOUBLINGS = 30


def doubled(first: float, most: float, times: int) -> float:
    """Seconds to wait: ``first``, doubled so many times, and at most ``most``."""
    return min(most, first * 2.0 ** min(times, _MOST_DOUBLINGS))


def longer(pause: float, first: float, most: float) -> float:
    """The pause after this one, in seconds: ``first`` after none, doubled each time, at most ``most``."""
    return min(most, max(first, 2 * pause))


async def tried_again(make: Callable[[], T], off: Callable[[str], None], seconds: float) -> T:
    """What ``make()`` returns, as soon as it raises no OSError or UsageError; it is called again after ``seconds``.

    ``off`` gets the reason of a failure, once for as long as it stays the same.
    """
    import asyncio

    said = ""
    while True:
        try:
            return make()
        except (OSError, UsageError) as error:
            why = str(error)
        if why != said:
            said = why
            off(why)
        await asyncio.sleep(seconds)


def in_a_thread(
    work: Callable[[], T],
    *,
    name: str,
    ended: Callable[[], None] | None = None,
    unwanted: Callable[[T], None] | None = None,
) -> asyncio.Future[T]:
    """Begin the work in a thread of its own, which the end of the process does not wait for.

    ``ended`` is called on the loop when it is over, also if nobody waits for the future any more; ``unwanted`` is then
    given what came out.
    """
    import asyncio  # commands that only double a pause do not pay for these
    import threading

    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def hand_over(take: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left
            loop.call_soon_threadsafe(take)

    def took(result: T) -> None:
        if ended is not None:
            ended()
        if not future.cancelled():
            future.set_result(result)
        elif unwanted is not None:
            unwanted(result)

    def broke(error: BaseException) -> None:
        if ended is not None:
            ended()
        if not future.cancelled():
            future.set_exception(error)

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised where it is awaited
            failure = error
            hand_over(lambda: broke(failure))
        else:
            hand_over(lambda: took(result))

    threading.Thread(target=run, daemon=True, name=name).start()
    return future
