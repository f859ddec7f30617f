"""Events on pods: the findings of `resolver usage`, where people look first (``kubectl describe pod``).

One event for each state and pod. While the state lasts, its count and time are updated each ten minutes.
"""

import asyncio
import hashlib
import math
import time
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

import msgspec

from resolver.api.shapes import ContainerUses
from resolver.base.errors import ApiServerFailed, ResolverError
from resolver.base.journal import Journal
from resolver.base.retry import in_a_thread
from resolver.client import get_bytes
from resolver.kube.apiserver import ApiServer, Backoff
from resolver.kube.node_events import event
from resolver.kube.tally import Tally
from resolver.state import ContainerUse, LimitState, Process

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
#: Seconds that a state must last before its event; the daemon measures how long a GPU is idle.
LASTS = {PodEvent.LIMIT_EXCEEDED: 300.0, PodEvent.LIMIT_WITHOUT_EFFECT: 60.0, PodEvent.WITHOUT_LIBRARY: 60.0}
_HELD_SECONDS = 3600.0


class Key(NamedTuple):
    """One event: its pod, and its kind."""

    namespace: str
    pod: str
    pod_uid: str
    kind: PodEvent


class _State(NamedTuple):
    """State of a pod, with its event. Times are monotonic; ``text`` is empty once it has ended."""

    text: str = ""
    since: float = math.inf
    posted_at: float = -math.inf
    times: int = 0


def parse_kinds(text: str) -> frozenset[PodEvent]:
    """Parse ``--pod-events``: kinds separated by commas, or ``off``. Raises ValueError."""
    return frozenset() if text == "off" else frozenset(PodEvent(kind.strip()) for kind in text.split(","))


class PodEvents:
    """Reads the daemon's accounts and posts lasting states; at most one request each `APART_SECONDS`."""

    def __init__(
        self,
        server: ApiServer,
        socket_path: str,
        node: str,
        kinds: frozenset[PodEvent],
        tally: Tally,
        journal: Journal,
    ) -> None:
        self._server, self._socket_path, self._node, self._kinds = server, socket_path, node, kinds
        self._tally, self._journal = tally, journal
        self._states: dict[Key, _State] = {}
        self._read_at = 0.0  # monotonic, the next time
        #: By pod's UID and GPU: XID errors that are in an event, or from before, and all.
        self._xids: dict[tuple[str, str], tuple[int, int]] = {}

    async def run(self) -> None:
        if self._kinds:
            await Backoff(self._ended, APART_SECONDS).repeat(self._post_next)

    async def _post_next(self) -> None:
        if time.monotonic() >= self._read_at:
            self._read_at = time.monotonic() + READ_SECONDS
            await self._read_accounts()
        key = min(self._due(), key=lambda key: self._states[key].since, default=None)
        if key is None:
            await asyncio.sleep(max(0.0, self._read_at - time.monotonic()))
        else:
            await self._post(key)

    def _ended(self, error: ApiServerFailed | None) -> None:
        self._tally.pod_events["failed"] += error is not None
        self._journal.trouble("pod events", str(error or ""), "pod_event_failed", "pod_events_work")

    async def _read_accounts(self) -> None:
        try:
            body = await in_a_thread(
                lambda: get_bytes("/v1/usage", self._socket_path), name="reads the accounts"
            )
            usage = msgspec.json.decode(body, type=ContainerUses)
        except (ResolverError, msgspec.DecodeError):
            return  # the reporter's other task logs it; a restarted daemon proves nothing about a pod
        now, texts = time.monotonic(), self._texts(usage)
        # A state that came back within the time is the same event, and is counted on.
        self._states = {
            key: old._replace(
                text=texts.get(key, ""), since=min(old.since, now) if key in texts else math.inf
            )
            for key, old in (dict.fromkeys(texts, _State()) | self._states).items()
            if key in texts or now - old.posted_at < AGAIN_SECONDS
        }

    def _due(self) -> Iterator[Key]:
        now = time.monotonic()
        for key, state in self._states.items():
            if now - state.since >= LASTS.get(key.kind, 0.0) and now - state.posted_at >= AGAIN_SECONDS:
                yield key

    def _texts(self, usage: ContainerUses) -> dict[Key, str]:
        result: dict[Key, dict[str, None]] = {}
        for named, kind, text in self._findings(usage):
            key = Key(named.namespace or "", named.pod or "", named.pod_uid or "", kind)
            if kind in self._kinds and all(key):
                result.setdefault(key, {})[f"container {named.container_name}: {text}"] = None
        return {key: "; ".join(texts)[:1000] for key, texts in result.items()}

    def _findings(self, usage: ContainerUses) -> Iterator[tuple[ContainerUse | Process, PodEvent, str]]:
        for without in usage.without_slot:
            causes = ". ".join("; fix: ".join(cause.for_terminal()) for cause in without.causes)
            text = f"a process on {without.process.device_uuid} has no slot, so HAMi limits nothing there"
            yield without.process, PodEvent.WITHOUT_LIBRARY, text + (f" ({causes})" if causes else "")
        before, self._xids = self._xids, {}
        for use in usage.containers:
            device, limit, number = use.device_uuid, use.core_limit, use.xids
            if use.limit_state is LimitState.EXCEEDED:
                text = f"uses more of {device} than its core limit of {limit} %: resolver explain shows its processes"
                yield use, PodEvent.LIMIT_EXCEEDED, text
            if use.limit_state is LimitState.NO_EFFECT:
                text = f"its core limit of {limit} % on {device} has no effect, because its HAMi library can't read "
                text += "this driver's samples: update HAMi to 2.10 and restart the pod"
                yield use, PodEvent.LIMIT_WITHOUT_EFFECT, text
            if use.idle_since is not None and time.time() - use.idle_since >= _HELD_SECONDS:
                yield use, PodEvent.HELD_IDLE, f"has held {device} without using it for an hour or more"
            place = use.pod_uid or "", device
            posted = before.get(place, (number, number))[0]
            self._xids[place] = posted, number
            if number > posted:
                text = (
                    f"{number - posted} XID errors of {device} while it used it: resolver devices names them"
                )
                yield use, PodEvent.XID, text

    async def _post(self, key: Key) -> None:
        """Create the event, or update its count. Its name is always the same for a pod and kind."""
        state = self._states[key]
        path, posted = f"/api/v1/namespaces/{key.namespace}/events", state.times
        digest = hashlib.sha256(f"{key.pod_uid}/{key.kind}".encode()).hexdigest()[:16]
        about = {"kind": "Pod", "name": key.pod, "namespace": key.namespace, "uid": key.pod_uid}
        level = "Normal" if key.kind is PodEvent.HELD_IDLE else "Warning"
        name = f"{key.pod[:230]}.{digest}"
        body = event(about, name, self._node, level, key.kind.reason, state.text) | {"count": posted + 1}
        again = {name: body[name] for name in ("count", "lastTimestamp", "message")}
        try:
            await (self._server.patch(f"{path}/{name}", again) if posted else self._server.create(path, body))
        except ApiServerFailed as error:
            if posted and error.status == 404:  # Kubernetes deletes events after an hour
                await self._server.create(path, body)
            elif not posted and error.status == 409:  # an earlier reporter made it
                earlier = await self._server.get(f"{path}/{name}")
                again["count"] = int(earlier.get("count") or 1) + 1
                await self._server.patch(f"{path}/{name}", again)
            else:
                raise
        self._states[key] = state._replace(posted_at=time.monotonic(), times=again["count"])
        if key.kind is PodEvent.XID:
            for place, (_, number) in self._xids.items():
                if place[0] == key.pod_uid:
                    self._xids[place] = number, number
        self._tally.pod_events["posted"] += 1
