"""Events on pods: what `resolver usage` finds, where people look first (``kubectl describe pod``).

One event for each state and pod. While the state lasts, its count and time are updated each ten minutes.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from resolver.base.errors import ApiServerFailed, ResolverError
from resolver.base.reasons import BypassReason
from resolver.base.retry import in_a_thread
from resolver.client import get_json
from resolver.kube.apiserver import Backoff
from resolver.kube.node_events import event
from resolver.state import LimitState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from resolver.base.journal import Journal
    from resolver.kube.apiserver import ApiServer
    from resolver.kube.device import Json
    from resolver.kube.tally import Tally

#: Seconds between two readings of the daemon, and between two requests to the API server.
READ_SECONDS, APART_SECONDS = 15.0, 1.0
#: Seconds after which an event that still holds is updated.
AGAIN_SECONDS = 600.0


class PodEvent(StrEnum):
    """Kinds of events, as ``--pod-events`` names them; each has its reason in Kubernetes' style."""

    LIMIT_EXCEEDED = "limit-exceeded"
    LIMIT_WITHOUT_EFFECT = "limit-without-effect"
    WITHOUT_LIBRARY = "without-library"
    HELD_IDLE = "held-idle"
    XID = "xid"

    @property
    def reason(self) -> str:
        """Return ``GPUHeldIdle`` for ``held-idle``."""
        return "GPU" + "".join(word.title() for word in self.split("-"))


DEFAULT = ",".join(kind for kind in PodEvent if kind is not PodEvent.HELD_IDLE)
#: Seconds for which a state must have lasted before there is an event.
_LASTS = {
    PodEvent.LIMIT_EXCEEDED: 300.0,
    PodEvent.LIMIT_WITHOUT_EFFECT: 60.0,
    PodEvent.WITHOUT_LIBRARY: 60.0,
    PodEvent.HELD_IDLE: 0.0,  # the daemon measures it
    PodEvent.XID: 0.0,
}
_HELD_SECONDS = 3600.0


class Pod(NamedTuple):
    """A pod, as an event's object."""

    namespace: str
    name: str
    uid: str


class Key(NamedTuple):
    """One event: its pod, and its kind."""

    pod: Pod
    kind: PodEvent


class _Posted(NamedTuple):
    at: float  # monotonic
    times: int


def parse_kinds(text: str) -> frozenset[PodEvent]:
    """Parse ``--pod-events``: kinds separated by commas, or ``off``. Raises ValueError."""
    return frozenset() if text == "off" else frozenset(PodEvent(kind.strip()) for kind in text.split(","))


class PodEvents:
    """Reads the daemon's accounts and posts what lasts; at most one request each `APART_SECONDS`."""

    def __init__(
        self,
        server: ApiServer,
        socket_path: str,
        node: str,
        kinds: frozenset[PodEvent],
        tally: Tally,
        journal: Journal,
        read: Callable[[], Json] | None = None,
    ) -> None:
        """Take ``read``, which returns ``/v1/usage``, in place of the daemon's socket."""
        self._server, self._node, self._kinds = server, node, kinds
        self._tally, self._journal = tally, journal
        self._read = read or (lambda: get_json("/v1/usage", socket_path))
        self._since: dict[Key, float] = {}  # monotonic: when a state was first seen
        self._texts: dict[Key, str] = {}
        self._posted: dict[Key, _Posted] = {}
        self._xids: dict[
            tuple[Pod, str], int
        ] = {}  # of each pod and GPU: counted in an event, or from before
        self._xids_now: dict[tuple[Pod, str], int] = {}

    async def run(self) -> None:
        """Post until cancelled."""
        backoff, read_at = Backoff(), 0.0
        while self._kinds:
            if time.monotonic() >= read_at:
                read_at = time.monotonic() + READ_SECONDS
                await self._take()
            key = min(self._due(), key=lambda key: self._since[key], default=None)
            if key is None:
                await asyncio.sleep(max(0.0, read_at - time.monotonic()))
                continue
            wait = APART_SECONDS
            try:
                await self._post(key)
                backoff.reset()
                self._journal.trouble("pod events", "", "pod_event_failed", "pod_events_work")
            except ApiServerFailed as error:
                self._tally.pod_events["failed"] += 1
                self._journal.trouble("pod events", str(error), "pod_event_failed", "pod_events_work")
                wait = max(wait, backoff.seconds(error))
            await asyncio.sleep(wait)

    async def _take(self) -> None:
        try:
            usage = await in_a_thread(self._read, name="reads the accounts")
        except ResolverError:
            return  # the reporter's other task says so; a restarted daemon proves nothing about a pod
        now, self._xids_now = time.monotonic(), {}
        self._texts = dict(self._states(usage))
        self._xids = {place: number for place, number in self._xids.items() if place in self._xids_now}
        self._since = {key: self._since.get(key, now) for key in self._texts}
        # A state that came back within the time is the same event, and is counted on.
        self._posted = {
            key: posted
            for key, posted in self._posted.items()
            if key in self._texts or now - posted.at < AGAIN_SECONDS
        }

    def _due(self) -> Iterator[Key]:
        now = time.monotonic()
        for key, since in self._since.items():
            posted = self._posted.get(key)
            if now - since >= _LASTS[key.kind] and (posted is None or now - posted.at >= AGAIN_SECONDS):
                yield key

    def _states(self, usage: Json) -> Iterator[tuple[Key, str]]:
        """Yield the states that the accounts show, each with its text."""
        found: dict[Key, list[str]] = {}
        for use in usage["containers"]:
            if (pod := _pod_of(use)) is not None:
                for kind, text in self._of_use(pod, use):
                    found.setdefault(Key(pod, kind), []).append(f"container {use['container_name']}: {text}")
        for without in usage["without_slot"]:
            process = without["process"]
            if (pod := _pod_of(process)) is not None:
                causes = ["; fix: ".join(BypassReason(cause).for_terminal()) for cause in without["causes"]]
                text = f"a process on {process['device_uuid']} has no slot, so HAMi limits nothing there"
                text += f" ({'. '.join(causes)})" if causes else ""
                key = Key(pod, PodEvent.WITHOUT_LIBRARY)
                found.setdefault(key, []).append(f"container {process['container_name']}: {text}")
        for key, texts in found.items():
            if key.kind in self._kinds:
                yield key, "; ".join(dict.fromkeys(texts))[:1000]

    def _of_use(self, pod: Pod, use: Json) -> Iterator[tuple[PodEvent, str]]:
        device, limit = use["device_uuid"], use["core_limit"]
        if use["limit_state"] == LimitState.EXCEEDED:
            text = f"uses more of {device} than its core limit of {limit} %: resolver explain shows its processes"
            yield PodEvent.LIMIT_EXCEEDED, text
        if use["limit_state"] == "no_effect":
            text = f"its core limit of {limit} % on {device} has no effect, because its HAMi library can't read this "
            yield (
                PodEvent.LIMIT_WITHOUT_EFFECT,
                text + "driver's samples: update HAMi to 2.10 and restart the pod",
            )
        idle = use["idle_since"]
        if idle is not None and time.time() - idle >= _HELD_SECONDS:
            yield PodEvent.HELD_IDLE, f"has held {device} without using it for an hour or more"
        self._xids_now[pod, device] = use["xids"]
        before = self._xids.setdefault((pod, device), use["xids"])
        if use["xids"] > before:
            text = (
                f"{use['xids'] - before} XID errors of {device} while it used it: resolver devices names them"
            )
            yield PodEvent.XID, text

    async def _post(self, key: Key) -> None:
        """Create the event, or update its count."""
        posted, path = self._posted.get(key), f"/api/v1/namespaces/{key.pod.namespace}/events"
        count = posted.times + 1 if posted else 1
        body = event_of(key, self._node, self._texts[key], count)
        again = {name: body[name] for name in ("count", "lastTimestamp", "message")}
        name = f"{path}/{body['metadata']['name']}"
        try:
            await (self._server.patch(name, again) if posted else self._server.create(path, body))
        except ApiServerFailed as error:
            if posted and error.status == 404:  # Kubernetes deletes events after an hour
                await self._server.create(path, body)
            elif not posted and error.status == 409:  # of an earlier reporter
                known = await self._server.get(name)
                count = again["count"] = int(known.get("count") or 1) + 1
                await self._server.patch(name, again)
            else:
                raise
        self._posted[key] = _Posted(time.monotonic(), count)
        if key.kind is PodEvent.XID:
            self._xids |= {place: number for place, number in self._xids_now.items() if place[0] == key.pod}
        self._tally.pod_events["posted"] += 1


def event_of(key: Key, node: str, text: str, times: int) -> Json:
    """Build the event of a pod. Its name is always the same for a pod and kind."""
    pod = key.pod
    digest = hashlib.sha256(f"{pod.uid}/{key.kind}".encode()).hexdigest()[:16]
    about = {"kind": "Pod", "name": pod.name, "namespace": pod.namespace, "uid": pod.uid}
    level = "Normal" if key.kind is PodEvent.HELD_IDLE else "Warning"
    name = f"{pod.name[:230]}.{digest}"
    return event(about, name, node, level, key.kind.reason, text) | {"count": times}


def _pod_of(named: Json) -> Pod | None:
    namespace, name, uid = named["namespace"], named["pod"], named["pod_uid"]
    return Pod(namespace, name, uid) if namespace and name and uid else None
