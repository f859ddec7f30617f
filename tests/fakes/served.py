"""A picture, told by the daemon's own API on a Unix socket: all that a client sees of a daemon."""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from resolver.api.access import ApiGatekeeper
from resolver.api.app import Api
from resolver.api.context import Context, View
from resolver.base.event_log import EventLog
from resolver.base.journal import Journal
from resolver.linux.procfs import Procfs
from resolver.lookup.cached import LiveLookup
from resolver.pids.pidmap import PidMap
from resolver.pids.scan import ScanSource
from resolver.serve.http import Connection
from resolver.serve.server import serve
from resolver.serve.unix_socket import UnixSocket
from resolver.state import Snapshot
from tests.fakes.pictures import picture


class Served:
    """The API over ``shown`` at ``path``. It runs in its ``with`` block; `stop` and `start` restart it.

    ``hang`` makes it take connections and answer nothing. ``asked`` counts requests. With ``now`` the picture is always
    of now, as a living daemon's is.
    """

    def __init__(self, path: Path, shown: Snapshot, group: int | None = None, *, now: bool = True) -> None:
        self.path, self._group = str(path), group
        self.shown = shown
        self.asked = 0
        self.events, self.inventories = EventLog(), EventLog(1)
        self._api, self.gatekeeper = _api(
            self._now if now else self._shown, group, self.events, self.inventories
        )
        self._awake = threading.Event()
        self._awake.set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def hang(self) -> None:
        self._awake.clear()

    def recover(self) -> None:
        self._awake.set()

    def publish(self, kind: str, **fields: object) -> None:
        self.call(lambda: self.events.publish(kind, fields))

    def call(self, function: Callable[[], object]) -> None:
        done = threading.Event()

        def run() -> None:
            function()
            done.set()

        assert self._loop is not None
        self._loop.call_soon_threadsafe(run)
        assert done.wait(60)

    def start(self) -> None:
        self._entrance = UnixSocket(self.path, "--socket", group=self._group)
        self._entrance.open()
        ready = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(ready),), name="api")
        self._thread.start()
        assert ready.wait(60)

    def stop(self) -> None:
        if self._loop is not None:
            self.recover()
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(60)
            assert not self._thread.is_alive()
            self._entrance.close()
            self._loop = None

    async def _serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(
            serve(self._counted, self.gatekeeper, self._entrance.listener, self.gatekeeper.limits)
        )
        ready.set()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _counted(self, connection: Connection) -> None:
        self._awake.wait()  # blocks the whole loop: so hangs a daemon
        self.asked += 1
        await self._api(connection)

    def _shown(self) -> Snapshot:
        return self.shown

    def _now(self) -> Snapshot:
        return self.shown._replace(at=time.time(), passed_at=time.time())


def serving(path: Path, *, group: int | None = None, **changes: object) -> Served:
    """The API at this socket, over an empty node's picture with these fields instead."""
    return Served(path, picture(**changes), group, now=False)


def _api(
    snapshot: Callable[[], Snapshot], group: int | None, events: EventLog, inventories: EventLog
) -> tuple[Api, ApiGatekeeper]:
    """Return the API of a daemon that scans; without a ``group`` the tests' user may ask everything."""
    procfs = Procfs()
    gatekeeper = ApiGatekeeper(procfs, os.getgid() if group is None else group)
    live = LiveLookup(procfs, PidMap(ScanSource(procfs)))
    view = View(snapshot, live, procfs, events, inventories)
    return Api(Context(view, gatekeeper, "/var/log/pods"), Journal(events)), gatekeeper
