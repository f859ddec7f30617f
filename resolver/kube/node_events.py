"""Events on the node: a GPU became unhealthy or healthy. At most one per GPU and minute."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import NamedTuple

from resolver.base.errors import ApiServerFailed
from resolver.base.journal import Journal
from resolver.kube.apiserver import FIELD_MANAGER, ApiServer, Backoff
from resolver.kube.device import Health, Json, OwnerReference, rfc3339
from resolver.kube.tally import Tally

#: Where events of objects live that are in no namespace.
NAMESPACE = "default"
UNHEALTHY, HEALTHY = "GPUUnhealthy", "GPUHealthy"
APART_SECONDS = 60.0


class _Reported(NamedTuple):
    healthy: bool
    at: float  # monotonic


class NodeEvents:
    """Reported and current state of each GPU; `run` posts the differences.

    A GPU that falls ill and recovers within the minute is reported only if its state differs then.
    """

    def __init__(self, server: ApiServer, tally: Tally, journal: Journal) -> None:
        self._server = server
        self._tally = tally
        self._journal = journal
        self._node = OwnerReference("", "")
        self._reported: dict[str, _Reported] = {}
        self._now: Mapping[str, Health] = {}
        self._wake = asyncio.Event()

    def note(self, node: OwnerReference, before: Mapping[str, Health], now: Mapping[str, Health]) -> None:
        """Take the object's GPUs before and after a write."""
        # An earlier reporter's conditions count as reported; a new GPU counts as healthy.
        new = {uuid: _Reported(uuid not in before or before[uuid].healthy, -APART_SECONDS) for uuid in now}
        self._reported = {uuid: self._reported.get(uuid, state) for uuid, state in new.items()}
        self._node, self._now = node, now
        self._wake.set()

    async def run(self) -> None:
        backoff = Backoff(self._ended)
        while True:
            times = self._due()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(times.values())) if times else None):
                    await self._wake.wait()
            self._wake.clear()
            async with backoff.attempt():
                for uuid, seconds in self._due().items():
                    if seconds <= 0:
                        await self._post(uuid)

    def _ended(self, error: ApiServerFailed | None) -> None:
        if error is not None:
            self._tally.events["failed"] += 1
            self._journal.log.warning("node_event_failed", why=str(error))

    def _due(self) -> dict[str, float]:
        """Return the unreported GPUs, and the seconds until each may be reported."""
        now = time.monotonic()
        reported = ((uuid, state.healthy, self._reported[uuid]) for uuid, state in self._now.items())
        return {uuid: at + APART_SECONDS - now for uuid, healthy, (was, at) in reported if was != healthy}

    async def _post(self, uuid: str) -> None:
        if (state := self._now.get(uuid)) is None:
            return  # it went meanwhile
        await self._server.create(f"/api/v1/namespaces/{NAMESPACE}/events", event_of(self._node, uuid, state))
        self._reported[uuid] = _Reported(state.healthy, time.monotonic())
        self._tally.events["posted"] += 1


def event_of(node: OwnerReference, uuid: str, state: Health) -> Json:
    """Build an event about a node, under a unique name."""
    healthy, reason, message = state
    text = f"GPU {uuid} is healthy again" if healthy else f"GPU {uuid} is unhealthy: {reason}: {message}"
    about = {"kind": "Node", "name": node.name, "uid": node.uid}
    kind, why = ("Normal", HEALTHY) if healthy else ("Warning", UNHEALTHY)
    return event(about, f"{node.name}.{time.time_ns():x}", node.name, kind, why, text)


def event(about: Json, name: str, node: str, kind: str, reason: str, message: str) -> Json:
    """Build an event that happened once, now, about an object of the core API on this ``node``."""
    at = rfc3339(time.time())
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": about.get("namespace", NAMESPACE)},
        "involvedObject": {"apiVersion": "v1", **about},
        "type": kind,
        "reason": reason,
        "message": message,
        "source": {"component": FIELD_MANAGER, "host": node},
        "reportingComponent": FIELD_MANAGER,
        "reportingInstance": node,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
