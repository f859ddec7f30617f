"""What the routes share: the daemon's view, the gatekeepers, and what is kept between requests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

from resolver.api.request import Answer, encode
from resolver.api.walks import Walks
from resolver.containers.pod_names import PodNames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from msgspec import Struct

    from resolver.api.access import ApiGatekeeper
    from resolver.linux.procfs import Procfs
    from resolver.log.event_log import EventLog
    from resolver.lookup.cached import LiveLookup
    from resolver.state import Snapshot

#: Objects that are made and encoded at a time, before others get their turn: a millisecond or two.
_PIECE = 500
_MOST_KEPT_BYTES = 1 << 20


class View(NamedTuple):
    """What the API reads: the last pass's snapshot, the map for look-ups, and the events.

    ``snapshot()`` never waits. ``inventories`` has an event each time that a snapshot with another inventory, or
    another failure of NVML, is shown.
    """

    snapshot: Callable[[], Snapshot]
    live: LiveLookup
    procfs: Procfs
    events: EventLog
    inventories: EventLog


class Context:
    """Belongs to one event loop's thread. ``tenants`` is that of the tenants' socket, None without one."""

    def __init__(
        self,
        view: View,
        gatekeeper: ApiGatekeeper,
        pod_logs_dir: str,
        *,
        tenants: ApiGatekeeper | None = None,
    ) -> None:
        self.view = view
        self.gatekeeper = gatekeeper
        self.tenants = tenants
        self.pods = PodNames(pod_logs_dir)
        self.kept = Kept()
        self.walks = Walks(2, 32)
        self.tenants_walks = Walks(1, 16)


class Kept:
    """The last answer of each list, and of which picture it was made."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[tuple[float, int], bytes]] = {}

    async def answer(
        self,
        path: str,
        picture: Snapshot,
        head: Struct,
        items: Iterable[Any],
        make: Callable[[Any], Struct] | None = None,
    ) -> Answer:
        """``head`` with ``items`` in the place of its last field, an empty list; ``make`` gives what is sent of one."""
        # Not the picture itself: it would be kept for as long as nobody asks again.
        known, which = self._answers.get(path), (picture.at, picture.passes)
        if known is not None and known[0] == which:
            return Answer(known[1])
        parts, piece = [], []
        for number, item in enumerate(items, 1):
            piece.append(make(item) if make else item)
            if number % _PIECE == 0:
                parts.append(encode(piece)[1:-1])
                piece.clear()
                await asyncio.sleep(0)
        if piece:
            parts.append(encode(piece)[1:-1])
        body = encode(head)[: -len(b"]}")] + b",".join(parts) + b"]}"
        self._answers.pop(path, None)
        if len(body) <= _MOST_KEPT_BYTES:
            self._answers[path] = which, body
        return Answer(body)
