"""Events on the node: a GPU became unhealthy, or healthy again. At most one for each GPU and minute."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, NamedTuple

from resolver.errors import ApiServerFailed
from resolver.kube.apiserver import FIELD_MANAGER, ApiServer, Backoff
from resolver.kube.device import OwnerReference, rfc3339

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resolver.kube.device import Json
    from resolver.kube.tally import Tally
    from resolver.log.journal import Journal

#: Where events of objects live that are in no namespace.
NAMESPACE = "default"
UNHEALTHY, HEALTHY = "GPUUnhealthy", "GPUHealthy"
_APART_SECONDS = 60.0


class _Report(NamedTuple):
    healthy: bool
    at: float  # monotonic


class NodeEvents:
    """Holds for each GPU what was reported last and its state now; `run` reports the difference.

    A GPU that falls ill and recovers within the minute is reported later only if its state differs then.
    """

    def __init__(self, server: ApiServer, tally: Tally, journal: Journal) -> None:
        self._server = server
        self._tally = tally
        self._journal = journal
        self._node: OwnerReference | None = None
        self._reported: dict[str, _Report] = {}
        self._now: dict[str, tuple[bool, str, str]] = {}
        self._wake = asyncio.Event()

    def note(
        self,
        node: OwnerReference,
        before: Mapping[str, tuple[bool, str, str]],
        now: Mapping[str, tuple[bool, str, str]],
    ) -> None:
        """The object's GPUs before and after it was written, as `resolver.kube.device.health` gives them."""
        self._node = node
        for uuid in now:
            # What an earlier reporter wrote counts as reported; a new GPU is expected to be healthy.
            was = before[uuid][0] if uuid in before else True
            self._reported.setdefault(uuid, _Report(was, -_APART_SECONDS))
        self._reported = {uuid: state for uuid, state in self._reported.items() if uuid in now}
        self._now = dict(now)
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        backoff = Backoff()
        while True:
            wait = self._seconds_to_the_next()
            try:
                async with asyncio.timeout(wait):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                for uuid in self._due():
                    await self._post(uuid)
                backoff.reset()
            except ApiServerFailed as error:
                self._tally.events["failed"] += 1
                self._journal.log.warning("node_event_failed", why=str(error))
                await asyncio.sleep(backoff.seconds(error))

    def _different(self) -> list[str]:
        return [uuid for uuid, state in self._now.items() if state[0] != self._reported[uuid].healthy]

    def _due(self) -> list[str]:
        now = time.monotonic()
        return [uuid for uuid in self._different() if self._reported[uuid].at + _APART_SECONDS <= now]

    def _seconds_to_the_next(self) -> float | None:
        times = [self._reported[uuid].at + _APART_SECONDS for uuid in self._different()]
        return max(0.0, min(times) - time.monotonic()) if times else None

    async def _post(self, uuid: str) -> None:
        healthy, reason, message = self._now[uuid]
        assert self._node is not None  # noqa: S101 - it comes with the first GPU
        await self._server.create(
            f"/api/v1/namespaces/{NAMESPACE}/events", event_of(self._node, uuid, healthy, reason, message)
        )
        self._reported[uuid] = _Report(healthy, time.monotonic())
        self._tally.events["posted"] += 1


def event_of(node: OwnerReference, uuid: str, healthy: bool, reason: str, message: str) -> Json:  # noqa: FBT001
    """An event about a node, whose name nobody else has: the API server refuses one that is there."""
    nanoseconds = time.time_ns()
    at = rfc3339(nanoseconds / 1e9)
    said = f"GPU {uuid} is healthy again" if healthy else f"GPU {uuid} is unhealthy: {reason}: {message}"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{node.name}.{nanoseconds:x}", "namespace": NAMESPACE},
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node.name, "uid": node.uid},
        "type": "Normal" if healthy else "Warning",
        "reason": HEALTHY if healthy else UNHEALTHY,
        "message": said,
        "source": {"component": FIELD_MANAGER, "host": node.name},
        "reportingComponent": FIELD_MANAGER,
        "reportingInstance": node.name,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
