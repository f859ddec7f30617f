"""What the API and the metrics are given of the daemon: its picture, its map for look-ups, and its events."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from resolver.events import Events
    from resolver.lookup.live import LiveLookup
    from resolver.procfs import Procfs
    from resolver.snapshot import Snapshot


class View(NamedTuple):
    """``snapshot()`` never waits: it is the picture of the last pass.

    ``inventories`` has an event each time that a picture with another inventory, or another failure of NVML, is shown.
    """

    snapshot: Callable[[], Snapshot]
    live: LiveLookup
    procfs: Procfs
    events: Events
    inventories: Events
