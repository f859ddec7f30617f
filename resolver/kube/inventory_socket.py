"""Reads the daemon's GPUs, and each change, over its Unix socket, without blocking the reporter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resolver.base.errors import NoDaemon, ResolverError
from resolver.base.retry import in_a_thread
from resolver.client import get_changed

if TYPE_CHECKING:
    from resolver.kube.device import Json

#: Seconds for which the daemon delays its answer while nothing changes.
_WAIT_SECONDS = 600
_REQUIRED = {"version", "error", "driver_version", "gpus"}


class InventorySocket:
    """Client of ``/v1/gpus``, which answers at a change."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._tag = ""

    async def changed(self) -> Json | None:
        """Return the answer when it differs from the last; None after a while without. Raises `NoDaemon`."""
        tag, self._tag = self._tag, ""
        try:
            answer = await in_a_thread(
                lambda: get_changed("/v1/gpus", self._path, tag=tag, wait=_WAIT_SECONDS),
                name="waits for the daemon",
            )
        except ResolverError as error:
            raise NoDaemon(str(error)) from None
        if answer is None:
            self._tag = tag
            return None
        self._tag, gpus = answer
        if not isinstance(gpus, dict) or not gpus.keys() >= _REQUIRED:
            raise NoDaemon(f"the daemon at {self._path} is of another version: restart it after an upgrade")
        return gpus
