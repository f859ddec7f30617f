"""The source of PIDs while the daemon runs: kept up with every pass, replaced when it fails."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resolver.base.journal import Journal
    from resolver.pids.ladder import Ladder
    from resolver.pids.pidmap import PidMap
    from resolver.pids.source import PidSource


class SourceUpkeep:
    """``failed`` is set when the source in use has failed, to bring `tend` forward."""

    def __init__(self, ladder: Ladder, pidmap: PidMap, journal: Journal) -> None:
        self.ladder = ladder
        self.failed = asyncio.Event()
        self.pidmap, self._journal = pidmap, journal
        self._known_failed: PidSource | None = None

    def keep_up(self) -> None:
        """Check the source with every pass, and log any shortage."""
        source = self.pidmap.source
        if self.ladder.keep_up(source):
            if source is not self._known_failed:
                self._known_failed = source  # once each: the next try to replace it comes at the usual pace
                self.failed.set()
            return
        self._journal.trouble(
            "source", source.shortage(), "source_incomplete", "source_complete", source=source.name
        )

    async def tend(self) -> None:
        """Check the source at a slower pace; fall back if it fails, and climb when it is time."""
        await self.ladder.tend(self.pidmap.source)
