"""The host PID broker of HAMi 2.10, protocol version 1."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from resolver.config import Settings
    from resolver.hami.policy import Policy
    from resolver.log import Journal
    from resolver.pidmap import PidMap
    from resolver.procfs import Procfs


async def serve(
    settings: Settings,  # noqa: ARG001
    procfs: Procfs,  # noqa: ARG001
    pidmap: PidMap,  # noqa: ARG001
    policy: Callable[[], Policy],  # noqa: ARG001
    journal: Journal,  # noqa: ARG001
) -> None:
    """Answer until cancelled."""
    await asyncio.get_running_loop().create_future()
