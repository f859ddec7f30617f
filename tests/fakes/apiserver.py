"""The real API over pictures that a test makes: real server, real socket, real look-ups, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from resolver.api.access import ApiGatekeeper
from resolver.api.app import Api
from resolver.api.context import Context, View
from resolver.api.server import serve
from resolver.linux.procfs import Procfs
from resolver.log.event_log import EventLog
from resolver.log.journal import Journal
from resolver.lookup.cached import LiveLookup
from resolver.pids.listing import Listing
from resolver.pids.pidmap import PidMap
from resolver.pids.scan import ScanSource
from resolver.serve.unix_socket import Listening, UnixSocket
from resolver.state import Snapshot
from tests.fakes.pictures import picture


class Served:
    """A running API. Exchange ``shown`` at any time; `publish` events."""

    def __init__(self, path: Path, shown: Snapshot, group: int | None) -> None:
        self.path = str(path)
        self.shown = shown
        self.events = EventLog()
        procfs = Procfs()
        live = LiveLookup(procfs, PidMap(Listing(ScanSource(procfs))))
        self.inventories = EventLog(1)
        self.view = View(lambda: self.shown, live, procfs, self.events, self.inventories)
        self.gatekeeper = ApiGatekeeper(procfs, group)
        self._entrance = UnixSocket(self.path, Listening("resolver", "--socket", ""), group=group)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),), name="api")

    async def _serve(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._entrance.open()
        api = Api(Context(self.view, self.gatekeeper, "/var/log/pods"), Journal(self.events))
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await serve(api, self.gatekeeper, self._entrance.listener)
        finally:
            self._entrance.close()

    def publish(self, kind: str, **fields: object) -> None:
        """An event, as the daemon's journal tells it."""
        self.call(lambda: self.events.publish(kind, fields))

    def call(self, function: Callable[[], object]) -> None:
        """Run it in the server's thread, and wait for it."""
        done = threading.Event()

        def run() -> None:
            function()
            done.set()

        assert self._loop is not None
        self._loop.call_soon_threadsafe(run)
        assert done.wait(60)

    def start(self) -> None:
        self._thread.start()
        deadline = time.monotonic() + 60
        while not Path(self.path).exists():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def stop(self) -> None:
        assert self._loop is not None
        assert self._task is not None
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(60)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def serving(path: Path, *, group: int | None = None, **changes: object) -> Iterator[Served]:
    """The API at this socket, over an empty node's picture with these fields instead."""
    served = Served(path, picture(**changes), group)
    served.start()
    try:
        yield served
    finally:
        served.stop()
