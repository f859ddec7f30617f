"""Having what another program holds for now: tried again, and said once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from resolver.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


async def tried_again(make: Callable[[], _T], off: Callable[[str], None], seconds: float) -> _T:
    """What ``make()`` returns, as soon as it raises no OSError or UsageError; it is called again after ``seconds``.

    ``off`` gets the reason of a failure, once for as long as it stays the same.
    """
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
