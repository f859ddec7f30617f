"""Events on the node: a GPU became unhealthy or healthy. At most one per GPU and minute."""

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping

from resolver.base.errors import ApiServerFailed
from resolver.base.journal import Journal
from resolver.kube.apiserver import FIELD_MANAGER, ApiServer, Backoff
from resolver.kube.device import Health, Json, OwnerReference, rfc3339
from resolver.kube.tally import Tally

#: Namespace for events about objects without a namespace.
NAMESPACE = "default"
UNHEALTHY, HEALTHY = "GPUUnhealthy", "GPUHealthy"
APART_SECONDS = 60.0


class NodeEvents:
    """Reported and current state of each GPU; `run` posts the differences.

    A GPU that falls ill and recovers within the minute is reported only if its state differs then.
    """

    def __init__(self, server: ApiServer, tally: Tally, journal: Journal) -> None:
        self._server = server
        self._tally = tally
        self._journal = journal
        self._node = OwnerReference("", "")
        self._reported: dict[str, tuple[bool, float]] = {}  # healthy, and when it was reported (monotonic)
        self._now: Mapping[str, Health] = {}
        self._wake = asyncio.Event()

    def note(self, node: OwnerReference, before: Mapping[str, Health], now: Mapping[str, Health]) -> None:
        """Take the object's GPUs before and after a write."""
        # An earlier reporter's conditions count as reported; a new GPU counts as healthy.
        new = {uuid: (uuid not in before or before[uuid].healthy, -math.inf) for uuid in now}
        self._reported = new | self._reported
        self._node, self._now = node, now
        self._wake.set()

    async def run(self) -> None:
        await Backoff(self._ended).repeat(self._post_due, self._news)

    async def _news(self) -> None:
        times = self._due()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(times.values())) if times else None):
                await self._wake.wait()
        self._wake.clear()

    async def _post_due(self) -> None:
        for uuid, seconds in self._due().items():
            if seconds <= 0:
                await self._post(uuid)

    def _ended(self, error: ApiServerFailed | None) -> None:
        if error is not None:
            self._tally.events["failed"] += 1
            self._journal.log.warning("node_event_failed", why=str(error))

    def _due(self) -> dict[str, float]:
        """Return the unreported GPUs, and the seconds until each may be reported."""
        until = APART_SECONDS - time.monotonic()
        states = {uuid: (self._reported[uuid], state.healthy) for uuid, state in self._now.items()}
        return {uuid: at + until for uuid, ((was, at), healthy) in states.items() if was != healthy}

    async def _post(self, uuid: str) -> None:
        if (state := self._now.get(uuid)) is None:
            return  # it went meanwhile
        healthy, reason, message = state
        node, kind, why, text = self._node, "Normal", HEALTHY, f"GPU {uuid} is healthy again"
        if not healthy:
            kind, why, text = "Warning", UNHEALTHY, f"GPU {uuid} is unhealthy: {reason}: {message}"
        about = {"kind": "Node", "name": node.name, "uid": node.uid}
        body = event(about, f"{node.name}.{time.time_ns():x}", node.name, kind, why, text)
        await self._server.create(f"/api/v1/namespaces/{NAMESPACE}/events", body)
        self._reported[uuid] = healthy, time.monotonic()
        self._tally.events["posted"] += 1


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
