"""Asks the daemon for everything that a frame shows."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from resolver.base.errors import ResolverError
from resolver.cli._top.tree import Tree, build
from resolver.cli.ask_daemon import understood
from resolver.cli.documents import from_daemon

if TYPE_CHECKING:
    from resolver.cli._top.choose import ScreenPart


def read(socket_path: str | None) -> Tree:
    """Return one reading of everything. Raises as `resolver.client.get_json`, and CannotKnow for an odd answer."""
    with understood():
        return build(from_daemon(socket_path))


class Reading(NamedTuple):
    """The last reading that succeeded, and the error of those after it, since when (Unix time)."""

    tree: Tree
    read_at: float
    error: str = ""
    since: float = 0.0


class Reader(threading.Thread):
    """Reads in a thread, so that a hanging daemon delays no key. ``latest`` is replaced whole."""

    def __init__(self, socket_path: str | None, interval: float, first: Reading, part: ScreenPart) -> None:
        super().__init__(name="reader", daemon=True)
        self.latest = first
        self.failure: BaseException | None = None  # a defect of ours, which ended the thread
        self._socket_path, self._interval, self._part = socket_path, interval, part

    def run(self) -> None:
        """Read for ever."""
        try:
            while True:
                time.sleep(self._interval)
                self.latest = self._read()
        except BaseException as error:  # noqa: BLE001 - the screen ends with it
            self.failure = error

    def _read(self) -> Reading:
        now = time.time()
        try:
            return Reading(self._part.of(read(self._socket_path)), now)
        except ResolverError as error:
            return self.latest._replace(error=str(error), since=self.latest.since or now)
