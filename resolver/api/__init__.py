"""The daemon's API: HTTP and JSON on a Unix socket. It reads; nothing in it changes anything.

``docs/api.md`` tells how to ask, ``/v1/openapi.json`` what there is. What is shown comes from the daemon's picture,
whole and never waited for; only questions about single processes are put to the map, and, where that has no answer,
to the kernel.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from resolver.api.entrance import Entrance, group_of
from resolver.errors import UsageError

if TYPE_CHECKING:
    from resolver.config import Settings
    from resolver.log import Journal
    from resolver.view import View


#: A place where another daemon listens is tried again.
_AGAIN_SECONDS = 1.0


def make_entrance(settings: Settings, journal: Journal) -> Entrance | None:
    """The socket as the settings want it; None, with a warning in the log, if it cannot be had.

    To be called while the daemon has the rights that it was started with: it gives a file to a group.
    """
    try:
        return Entrance(
            settings.socket_path, mode=int(settings.socket_mode, 8), group=group_of(settings.socket_group)
        )
    except (OSError, UsageError) as error:
        _off(settings, journal, error)
        return None


async def serve(view: View, settings: Settings, journal: Journal, entrance: Entrance | None) -> None:
    """Answer until cancelled. What the API takes to run is imported only now."""
    if entrance is None:
        await asyncio.get_running_loop().create_future()  # for ever
        return
    await _open(entrance, settings, journal)
    from resolver.api.access import Door
    from resolver.api.app import Api
    from resolver.api.server import server

    door = Door(view.procfs, group_of(settings.socket_group))
    serving = server(Api(view, door, settings.pod_logs_dir, journal), door)
    try:
        await serving.serve(sockets=[entrance.listener])
    finally:
        serving.should_exit = True
    await asyncio.get_running_loop().create_future()


async def _open(entrance: Entrance, settings: Settings, journal: Journal) -> None:
    """As soon as nobody else listens there: a dry run that was there before, and is about to end, for one."""
    said = ""
    while True:
        try:
            entrance.open()
        except (OSError, UsageError) as error:
            if str(error) != said:
                said = str(error)
                _off(settings, journal, error)
            await asyncio.sleep(_AGAIN_SECONDS)
        else:
            return


def _off(settings: Settings, journal: Journal, error: Exception) -> None:
    journal.log.warning("api_off", socket=settings.socket_path, why=str(error))
