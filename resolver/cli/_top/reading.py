"""Asks the daemon for everything that a frame shows."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from resolver import client
from resolver.cli._top.choose import ScreenPart
from resolver.cli._top.tree import Documents, Tree, build
from resolver.errors import CannotKnow, ResolverError

if TYPE_CHECKING:
    from collections.abc import Callable

    from resolver.cli._top.tree import Json

#: A person waits: a daemon that takes longer is reported, and asked again.
_SECONDS = 2.0
EVERYTHING = ScreenPart()


def read(socket_path: str | None) -> Tree:
    """One reading, of all. Raises as `resolver.client.get_json`, and CannotKnow for answers that are not understood."""

    def ask(name: str) -> Json:
        answer: Json = client.get_json(f"/v1/{name}", socket_path, seconds=_SECONDS)
        return answer

    try:
        return build(documents_from(ask))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CannotKnow(
            f"the daemon's answer is not understood ({error!r}): is it of another version? `resolver status` and "
            "`resolver --version` show both; restart the daemon after an upgrade"
        ) from None


def documents_from(ask: Callable[[str], Json]) -> Documents:
    """What there is to be read, one route after the other."""
    regions = ask("regions")
    return Documents(
        status=ask("status"),
        gpus=ask("gpus")["gpus"],
        containers=ask("containers")["containers"],
        processes=ask("processes")["processes"],
        regions=regions["regions"],
        slots=ask("slots")["slots"],
        rejected=regions["rejected"],
    )


class Reading(NamedTuple):
    """The last reading that succeeded, and why the one after it did not, since when (Unix time)."""

    tree: Tree
    read_at: float
    error: str = ""
    since: float = 0.0


class Reader:
    """Reads in a thread of its own, so that a daemon that hangs delays no key.

    ``latest`` is replaced whole; ``notify`` is called, from that thread, after it was.
    """

    def __init__(
        self,
        socket_path: str | None,
        interval: float,
        first: Reading,
        notify: Callable[[], None],
        part: ScreenPart = EVERYTHING,
    ) -> None:
        self.latest = first
        self.failure: BaseException | None = None  # what ended the thread, which nothing should
        self._socket_path = socket_path
        self._interval = interval
        self._notify = notify
        self._part = part
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)

    def start(self) -> None:
        """Read until `stop`."""
        self._thread.start()

    def stop(self) -> None:
        """Read no more; an answer that is still waited for is not taken."""
        self._ended.set()

    def _run(self) -> None:
        try:
            self._read_on()
        except BaseException as error:  # noqa: BLE001 (a defect of ours: who draws has to end with it)
            self.failure = error
            self._notify()

    def _read_on(self) -> None:
        due = time.monotonic()
        while True:
            due = max(due + self._interval, time.monotonic())
            if self._ended.wait(due - time.monotonic()):
                return
            before, now = self.latest, time.time()
            try:
                self.latest = Reading(self._part.of(read(self._socket_path)), now)
            except ResolverError as error:
                self.latest = before._replace(error=str(error), since=before.since or now)
            if not self._ended.is_set():
                self._notify()
