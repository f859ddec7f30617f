"""The daemon's API: HTTP on a Unix socket. It reads; nothing in it changes anything.

``GET /v1/lookup?container=<cid>&pid=<n>`` answers with the JSON of ``resolver lookup --json``, or with the bare host
PID if ``Accept: text/plain`` is asked for. What the daemon's map does not answer is a 404 of
``application/problem+json`` (RFC 9457).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from typing import TYPE_CHECKING

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from resolver.errors import UsageError

if TYPE_CHECKING:
    from starlette.requests import Request

    from resolver.config import Settings
    from resolver.log import Journal
    from resolver.lookup.live import LiveLookup
    from resolver.view import View

_BACKLOG = 64


def application(live: LiveLookup) -> Starlette:
    """The routes."""

    async def lookup(request: Request) -> Response:
        query = request.query_params
        cid, pid = query.get("container", ""), query.get("pid", "")
        if not cid or not pid.isdigit() or len(pid) > 10:
            return _problem(400, "container and pid are needed: /v1/lookup?container=<cid>&pid=<n>")
        found = live.find(cid, int(pid))
        if found is None:
            return _problem(404, "the map does not answer this; resolver lookup asks the kernel itself then")
        if request.headers.get("accept") == "text/plain":
            return PlainTextResponse(f"{found.host_pid}\n")
        return Response(
            msgspec.json.format(msgspec.json.encode(found._asdict())), media_type="application/json"
        )

    return Starlette(routes=[Route("/v1/lookup", lookup)])


def _problem(status: int, detail: str) -> Response:
    return JSONResponse(
        {"type": "about:blank", "status": status, "detail": detail},
        status_code=status,
        media_type="application/problem+json",
    )


def bind(path: str) -> socket.socket:
    """A listening socket at ``path``: bound under another name, given its mode, then renamed into place.

    A socket that nobody listens on is replaced; one that somebody listens on, or another kind of file, is a
    `UsageError`. Raises OSError if it cannot be made.
    """
    _require_free(path)
    os.makedirs(os.path.dirname(path) or ".", mode=0o755, exist_ok=True)
    temporary = f"{path}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(temporary)
        os.chmod(temporary, 0o600)
        listener.listen(_BACKLOG)
        os.rename(temporary, path)
    except BaseException:
        listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    return listener


def _require_free(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise UsageError(f"{path} is there and is no socket: remove it, or name another with --socket")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            probe.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return
    except BlockingIOError:
        pass  # somebody listens, and is slow to answer
    raise UsageError(f"another resolver listens at {path}: stop it, or name another with --socket")


class _Server(uvicorn.Server):
    async def main_loop(self) -> None:
        """Nothing is done by the clock: the loop this replaces wakes ten times a second for a Date header."""
        await asyncio.get_running_loop().create_future()

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """Signals are the daemon's."""
        return contextlib.nullcontext()


async def serve(view: View, settings: Settings, journal: Journal) -> None:
    """Answer until cancelled, then remove the socket, unless it is another's by now."""
    path = settings.socket_path
    try:
        listener = bind(path)
    except (OSError, UsageError) as error:
        journal.log.warning("api_off", socket=path, why=str(error))
        await asyncio.get_running_loop().create_future()  # for ever
        return
    mine = os.stat(path).st_ino
    config = uvicorn.Config(
        application(view.live),
        log_config=None,
        log_level="critical",  # what a client sends is no trouble of the daemon's
        access_log=False,
        date_header=False,
        lifespan="off",
        ws="none",
        http="h11",
        loop="asyncio",
        timeout_keep_alive=5,
        limit_concurrency=_BACKLOG,
    )
    server = _Server(config)
    try:
        await server.serve(sockets=[listener])
    except asyncio.CancelledError:
        server.should_exit = True
        raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == mine:
                os.unlink(path)
        listener.close()
