"""Reads the daemon's GPUs, and each change of them, over its Unix socket, without blocking the reporter."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import httpx2

from resolver.base.errors import NoDaemon

if TYPE_CHECKING:
    from resolver.kube.device import Json

#: How long the daemon keeps the answer back while nothing changes.
_WAIT_SECONDS = 600


class InventorySocket:
    """Asks ``/v1/gpus``, and is answered when something changed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._tag = ""
        self._client = httpx2.AsyncClient(
            base_url="http://resolver",
            transport=httpx2.AsyncHTTPTransport(uds=path),
            timeout=httpx2.Timeout(5.0, read=_WAIT_SECONDS + 10.0),
            trust_env=False,
        )

    async def close(self) -> None:
        """Hang up."""
        await self._client.aclose()

    async def changed(self) -> Json | None:
        """Return the answer when it differs from the last; None after a while without. Raises `NoDaemon`."""
        tag, self._tag = self._tag, ""
        try:
            if os.stat(self._path).st_uid not in (0, os.geteuid()):
                raise NoDaemon(f"{self._path} belongs to another user")
            response = await self._client.get(
                "/v1/gpus", params={"wait": str(_WAIT_SECONDS)}, headers={"If-None-Match": tag} if tag else {}
            )
            if response.status_code == 304:
                self._tag = tag
                return None
            if response.status_code != 200:
                raise NoDaemon(
                    f"the daemon at {self._path} answered {response.status_code}: {response.text[:300]}"
                )
            answer: Json = response.json()
            if not {"version", "error", "driver_version", "gpus"} <= answer.keys():
                raise NoDaemon(
                    f"the daemon at {self._path} is of another version: restart it after an upgrade"
                )
        except (httpx2.HTTPError, OSError, ValueError, AttributeError) as error:
            raise NoDaemon(f"no daemon answers at {self._path}: {error or type(error).__name__}") from None
        self._tag = response.headers.get("etag", "")
        return answer
