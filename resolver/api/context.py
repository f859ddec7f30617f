"""State shared by the routes: the daemon's view, the gatekeepers, and the walks."""

import asyncio
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from resolver.api.access import ApiGatekeeper
from resolver.api.own import OwnView
from resolver.api.request import Answer, encode
from resolver.api.shapes import Parts
from resolver.api.walks import Walks
from resolver.base.event_log import EventLog
from resolver.containers.log_names import PodNames
from resolver.linux.procfs import Procfs
from resolver.lookup.cached import LiveLookup
from resolver.state import Snapshot

#: Objects that are made and encoded before other tasks get their turn: a millisecond or two.
_PIECE = 500


class View(NamedTuple):
    """Inputs of the API. ``snapshot()`` never waits; ``inventories`` has an event for each new inventory or failure."""

    snapshot: Callable[[], Snapshot]
    live: LiveLookup
    procfs: Procfs
    events: EventLog
    inventories: EventLog
    refused: Callable[[OSError], None] = lambda _: None


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
        self.walks = Walks(2, 32)
        self.tenants_walks = Walks(1, 16)
        self.cordoned: list[str] = []
        self.own = OwnView(view.snapshot, view.procfs, self.tenants_walks)

    def name_of(self, container_id: str) -> str | None:
        """Return a container's name in its pod; None while it isn't known."""
        containers = self.view.snapshot().containers
        return next(
            (container.container_name for container in containers if container.container_id == container_id),
            None,
        )

    async def listed(self, parts: Callable[[Snapshot], Parts]) -> Answer:
        """Encode a list of the current snapshot piece by piece, so that others get their turn."""
        head, items = parts(self.view.snapshot())
        left, encoded = iter(items), []
        while piece := list(islice(left, _PIECE)):
            encoded.append(encode(piece)[1:-1])
            await asyncio.sleep(0)
        return Answer(encode(head)[: -len(b"]}")] + b",".join(encoded) + b"]}")
