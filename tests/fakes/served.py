"""A picture, told by the daemon's own API on a Unix socket: all that a client sees of a daemon."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from resolver.api.access import ApiGatekeeper
from resolver.api.app import Api
from resolver.api.context import Context, View
from resolver.api.server import serve
from resolver.cli._top.reading import documents_from
from resolver.cli._top.tree import Tree, build
from resolver.linux.procfs import Procfs
from resolver.log.event_log import EventLog
from resolver.log.journal import Journal
from resolver.lookup.cached import LiveLookup
from resolver.pids.ladder import open_source
from resolver.pids.pidmap import PidMap
from resolver.serve.unix_socket import Listening, UnixSocket
from resolver.state import Snapshot


class Served:
    """Serves a picture at ``path`` until it is left; `show` replaces it, `stop` and `start` are a daemon's restart.

    ``hangs``: it takes connections and answers nothing. The picture is always of now, as a living daemon's is;
    ``asked`` counts requests.
    """

    def __init__(self, path: Path, picture: Snapshot) -> None:
        self.path = path
        self.asked = 0
        self._picture = picture
        self._awake = threading.Event()
        self._awake.set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()

    def show(self, picture: Snapshot) -> None:
        """From the next answer on."""
        self._picture = picture

    def hang(self) -> None:
        """Answer nothing, until `recover`."""
        self._awake.clear()

    def recover(self) -> None:
        """Go on."""
        self._awake.set()

    def start(self) -> None:
        """Listen. The socket is there when this returns."""
        self._entrance = UnixSocket(str(self.path), Listening("resolver", "--socket", ""))
        self._entrance.open()
        ready = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(ready),))
        self._thread.start()
        assert ready.wait(60)

    def stop(self) -> None:
        """End, and take the socket away, as the daemon does."""
        if self._loop is not None:
            self.recover()
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join()
            self._entrance.close()
            self._loop = None

    async def _serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        api, gatekeeper = _api(self._now)
        self._task = asyncio.create_task(serve(self._counted(api), gatekeeper, self._entrance.listener))
        ready.set()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def _counted(self, api: Api) -> Any:
        async def application(scope: Any, receive: Any, send: Any) -> None:
            self._awake.wait()  # blocks the whole loop: so hangs a daemon
            self.asked += 1
            await api(scope, receive, send)

        return application

    def _now(self) -> Snapshot:
        return self._picture._replace(at=time.time())


def tree_of(picture: Snapshot, *, without: tuple[str, ...] = ()) -> Tree:
    """What `resolver top` makes of a picture, by way of the API; of a daemon whose regions lack these fields."""
    api, gatekeeper = _api(lambda: picture)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        access = gatekeeper.enter(ours)
        try:
            documents = documents_from(functools.partial(_answer, api, access))
            for region in documents.regions:
                for field in without:
                    del region[field]
            return build(documents)
        finally:
            gatekeeper.leave(access)


def _api(snapshot: Any) -> tuple[Api, ApiGatekeeper]:
    procfs = Procfs()
    gatekeeper = ApiGatekeeper(procfs, os.getgid())  # who runs the tests may ask everything
    live = LiveLookup(procfs, PidMap(open_source("scan", procfs, 1024)))
    view = View(snapshot, live, procfs, EventLog(), EventLog(1))
    return Api(Context(view, gatekeeper, "/nonexistent"), Journal()), gatekeeper


def _answer(api: Api, access: Any, name: str) -> dict[str, Any]:
    said: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        said.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": f"/v1/{name}",
        "query_string": b"",
        "headers": [],
        "state": {"access": access, "connection": None},
    }
    asyncio.run(api(scope, None, send))
    start, body = said
    assert start["status"] == 200, body
    answer: dict[str, Any] = msgspec.json.decode(body["body"])
    return answer
