"""The daemon's API: HTTP and JSON on a Unix socket for root, and on another one for tenants.

Lists come from the daemon's snapshot; only look-ups ask the map, and then the kernel. Imports are in the functions
because commands, which only need the shapes, would pay for asyncio and the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from resolver.base.errors import UsageError

if TYPE_CHECKING:
    from resolver.api.access import ApiGatekeeper
    from resolver.api.app import Api
    from resolver.api.context import View
    from resolver.base.journal import Journal
    from resolver.config import Settings
    from resolver.serve.unix_socket import UnixSocket


class ApiSockets(NamedTuple):
    """The API's sockets; None for one that is off or can't be made."""

    root: UnixSocket | None
    tenants: UnixSocket | None

    def close(self) -> None:
        for unix_socket in self:
            if unix_socket is not None:
                unix_socket.close()


def make_sockets(settings: Settings, journal: Journal) -> ApiSockets:
    """Make the sockets, or log why not. A socket's group needs rights that the daemon drops later."""
    from resolver.serve.unix_socket import UnixSocket, group_of

    def made(path: str, option: str, mode: int, group: str = "") -> UnixSocket | None:
        try:
            return UnixSocket(path, option, mode=mode, group=group_of(group))
        except (OSError, UsageError) as error:
            journal.trouble(f"api {path}", str(error), "api_off", "", socket=path)
            return None

    root = made(settings.socket_path, "--socket", 0o660, settings.socket_group)
    tenants = made(settings.tenant_socket, "--tenant-socket", 0o666) if settings.tenant_socket else None
    return ApiSockets(root, tenants)


def load() -> None:
    """Import the API's modules: 40 ms of CPU, or half a second if they have to be compiled."""
    from resolver.api import app  # noqa: F401
    from resolver.serve import server  # noqa: F401


async def serve(view: View, settings: Settings, journal: Journal, sockets: ApiSockets) -> None:
    """Answer until cancelled."""
    import asyncio

    from resolver.api.access import ApiGatekeeper
    from resolver.api.app import Api
    from resolver.api.context import Context
    from resolver.serve.unix_socket import group_of

    gatekeeper = ApiGatekeeper(view.procfs, group_of(settings.socket_group) if sockets.root else None)
    tenants = ApiGatekeeper(view.procfs, tenants=True) if sockets.tenants else None
    api = Api(Context(view, gatekeeper, settings.pod_logs_dir, tenants=tenants), journal)
    async with asyncio.TaskGroup() as serving:
        for unix_socket, its_gatekeeper in zip(sockets, (gatekeeper, tenants), strict=True):
            if unix_socket is not None and its_gatekeeper is not None:
                its_gatekeeper.refused = view.refused
                serving.create_task(_serve(api, its_gatekeeper, unix_socket, journal))
        await asyncio.get_running_loop().create_future()  # until cancelled


async def _serve(api: Api, gatekeeper: ApiGatekeeper, unix_socket: UnixSocket, journal: Journal) -> None:
    # A dry run that is about to end may still listen there.
    path = unix_socket.path
    await journal.tried_again(unix_socket.open, f"api {path}", "api_off", socket=path)
    from resolver.serve import server

    await server.serve(api, gatekeeper, unix_socket.listener, gatekeeper.limits)
