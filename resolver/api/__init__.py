"""The daemon's read-only API: HTTP and JSON on a Unix socket for root, and on another one for tenants.

Lists come from the daemon's snapshot and wait for nothing; only look-ups ask the map, and then the kernel.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from resolver.base.errors import UsageError
from resolver.base.retry import tried_again
from resolver.serve.unix_socket import Listening, UnixSocket, group_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from resolver.api.access import ApiGatekeeper
    from resolver.api.app import Api
    from resolver.api.context import View
    from resolver.base.journal import Journal
    from resolver.config import Settings


#: A place where another daemon listens is tried again.
_AGAIN_SECONDS = 1.0
#: In the kernel. Beyond it a client that connects waits for its turn, or, if it doesn't wait, gets EAGAIN.
TENANTS_BACKLOG = 512
_ROOT = Listening("resolver", "--socket", "or name another with --socket")
_TENANTS = Listening("resolver", "--tenant-socket", "or name another with --tenant-socket")


class ApiSockets(NamedTuple):
    """The sockets as the settings want them; None for one that cannot be had, or is not wanted."""

    root: UnixSocket | None
    tenants: UnixSocket | None

    def close(self) -> None:
        """Remove both."""
        for unix_socket in self:
            if unix_socket is not None:
                unix_socket.close()


def make_sockets(settings: Settings, journal: Journal) -> ApiSockets:
    """Make the sockets, or log why not. Needs the rights that the daemon was started with: a file goes to a group."""

    def made(path: str, make: Callable[[], UnixSocket]) -> UnixSocket | None:
        try:
            return make()
        except (OSError, UsageError) as error:
            _off(journal, path, str(error))
            return None

    def root() -> UnixSocket:
        mode, group = int(settings.socket_mode, 8), group_of(settings.socket_group)
        return UnixSocket(settings.socket_path, _ROOT, mode=mode, group=group)

    path = settings.tenant_socket
    tenants = partial(UnixSocket, path, _TENANTS, mode=0o666, backlog=TENANTS_BACKLOG)
    return ApiSockets(made(settings.socket_path, root), made(path, tenants) if path else None)


def load() -> None:
    """Import everything that the API needs: 40 ms of CPU in one go, or half a second if it has to be compiled."""
    from resolver.api import app  # noqa: F401
    from resolver.serve import server  # noqa: F401


async def serve(view: View, settings: Settings, journal: Journal, sockets: ApiSockets) -> None:
    """Answer until cancelled. The API's imports happen only now."""
    from resolver.api.access import ApiGatekeeper
    from resolver.api.app import Api
    from resolver.api.context import Context

    gatekeeper = ApiGatekeeper(view.procfs, group_of(settings.socket_group) if sockets.root else None)
    tenants = ApiGatekeeper(view.procfs, tenants=True) if sockets.tenants else None
    api = Api(Context(view, gatekeeper, settings.pod_logs_dir, tenants=tenants), journal)
    async with asyncio.TaskGroup() as serving:
        for unix_socket, its_gatekeeper in zip(sockets, (gatekeeper, tenants), strict=True):
            if unix_socket is not None and its_gatekeeper is not None:
                serving.create_task(_serve(api, its_gatekeeper, unix_socket, journal))
        await asyncio.get_running_loop().create_future()  # for ever


async def _serve(api: Api, gatekeeper: ApiGatekeeper, unix_socket: UnixSocket, journal: Journal) -> None:
    # A dry run that was there before, and is about to end, may still listen there.
    await tried_again(unix_socket.open, lambda why: _off(journal, unix_socket.path, why), _AGAIN_SECONDS)
    from resolver.serve import server

    await server.serve(api, gatekeeper, unix_socket.listener, gatekeeper.limits)


def _off(journal: Journal, path: str, why: str) -> None:
    journal.trouble(f"api {path}", why, "api_off", "", socket=path)
