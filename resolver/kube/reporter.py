"""Keeps the node's ``Device`` object up to date with the daemon's GPUs.

Event-driven tasks in one loop: one waits for the daemon's next answer, one watches the node for its UID and the
operator's mark, one writes the object, one the node's condition, one posts events.
"""

import asyncio
import contextlib
import json
import random
import time
from typing import NamedTuple

from resolver.base.errors import ApiServerFailed, NoDaemon, ResolverError
from resolver.base.journal import Journal
from resolver.base.retry import in_a_thread
from resolver.client import get_changed, get_json
from resolver.kube.apiserver import STRATEGIC_PATCH, ApiServer, Backoff
from resolver.kube.device import (
    Health,
    Json,
    OwnerReference,
    Report,
    cordoned,
    desired,
    health,
    left_out,
    patch,
    rfc3339,
)
from resolver.kube.hami_cordon import HamiCordon, foreign_entries
from resolver.kube.node_events import NodeEvents
from resolver.kube.tally import Tally

DEVICES = "/apis/scheduling.koordinator.sh/v1alpha1/devices"
NODES = "/api/v1/nodes"
#: The type of the node's condition: True while a GPU is unhealthy.
CONDITION = "GPUUnhealthy"
#: Seconds without an answer from NVML before the GPUs count as failing: a driver is slow now and then.
NVML_PATIENCE_SECONDS = 10.0
#: Seconds between two writes, which merges changes, and between two requests to a daemon that does not answer.
APART_SECONDS = 1.0
#: Seconds between two reads of the object, which another program may have changed or deleted.
_CHECK_SECONDS = 8.0
#: Least and most seconds after which the watch restarts and the object is read again.
_WATCH_SECONDS = (3000, 4200)

#: Seconds that the daemon delays an unchanged answer.
_WAIT_SECONDS = 600
_REQUIRED = {"version", "error", "driver_version", "gpus", "cordoned"}


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

    async def cordon(self, uuids: list[str]) -> None:
        """Tell the daemon which GPUs an operator has marked."""
        question = json.dumps({"gpus": uuids}).encode()
        await in_a_thread(
            lambda: get_json("/v1/cordon", self._path, question=question), name="tells the daemon"
        )


class Plan(NamedTuple):
    """Node and options. ``spread``: seconds over which simultaneous starts are spread."""

    node: str
    spread: float = 10.0
    node_condition: bool = False
    hami_cordon: bool = False


class Reporter:
    """One node's reporter. Belongs to one event loop."""

    def __init__(
        self, server: ApiServer, daemon: InventorySocket, plan: Plan, tally: Tally, journal: Journal
    ) -> None:
        self._server = server
        self._daemon = daemon
        self._plan = plan
        self._tally = tally
        self._journal = journal
        self._events = NodeEvents(server, tally, journal)
        self._hami_cordon = HamiCordon(server, f"{NODES}/{plan.node}", journal)
        self._path = f"{DEVICES}/{plan.node}"
        # All nodes lose their watch at once when an API server restarts.
        self._watch = Backoff(self._watch_ended, apart=random.uniform(Backoff.FIRST, 2))  # noqa: S311 - no secret
        self._wake = asyncio.Event()
        self._gpus: Json | None = None
        self._failing_since: float | None = None  # monotonic
        self._node: OwnerReference | None = None
        self.node_version = "0"  # version from which the watch continues
        self._cordoned: frozenset[str] = frozenset()
        self._device: Json | None = None  # as last read or written; None: there is none
        self._to_read = True
        self._health: dict[str, Health] = {}  # as in the object
        self._health_changed = asyncio.Event()
        self._condition: tuple[str, str] | None = None  # status and reason, as last written
        self._refusals: dict[str, str] = {}  # reason by refused task

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_daemon())
            # Spreads the requests of a thousand nodes that start at once.
            await asyncio.sleep(random.uniform(0, self._plan.spread))  # noqa: S311 - no secret
            tasks.create_task(self._watch.repeat(self._follow_node))
            tasks.create_task(Backoff(self._write_ended, APART_SECONDS).repeat(self._sync, self._news))
            if self._plan.node_condition:
                backoff = Backoff(self._condition_ended, APART_SECONDS)
                tasks.create_task(backoff.repeat(self._keep_condition, self._health_changed.wait))
            tasks.create_task(self._events.run())
            if self._plan.hami_cordon:
                tasks.create_task(self._hami_cordon.run())

    def _changed(self, why: str) -> None:
        self._tally.not_in_sync = next(iter(self._refusals.values()), why)
        self._wake.set()

    def _note(self, task: str, error: ApiServerFailed | None) -> None:
        """Keep why a task is refused, until it succeeds."""
        why = str(error or "")
        self._journal.trouble(task, why, "report_failed", "report_works")
        if why:
            self._tally.not_in_sync = self._refusals[task] = why
        elif self._refusals.pop(task, ""):
            self._changed(f"the {task} is written again")

    async def _follow_daemon(self) -> None:
        while True:
            try:
                gpus = await self._daemon.changed()
            except NoDaemon as error:
                # The report stays: a restarted daemon says nothing about a GPU.
                self._tally.daemon_up = False
                self._tally.not_in_sync = str(error)
                self._journal.trouble("daemon", str(error), "daemon_unreachable", "daemon_answers")
                await asyncio.sleep(APART_SECONDS)
                continue
            self._journal.trouble("daemon", "", "daemon_unreachable", "daemon_answers")
            self._tally.daemon_up = True
            if gpus is not None:
                self._apply_gpus(gpus)

    def _apply_gpus(self, gpus: Json) -> None:
        self._gpus = gpus
        if not gpus["error"]:
            self._failing_since = None
            self._hami_cordon.note_gpus(gpus["gpus"])
        elif self._failing_since is None:
            self._failing_since = time.monotonic()
            asyncio.get_running_loop().call_later(
                NVML_PATIENCE_SECONDS, self._changed, "NVML does not answer"
            )
        self._changed("the daemon reported a change, which is not written yet")

    def _report(self) -> Report | None:
        """Return the report; None before the first answer, or while NVML fails only briefly."""
        if self._gpus is None:
            return None
        since = self._failing_since
        failing = since is not None and time.monotonic() - since >= NVML_PATIENCE_SECONDS
        if not self._gpus["version"] and not failing:
            return None
        return Report(self._gpus, failing, self._cordoned)

    async def _follow_node(self) -> None:
        """Watch the node. From version 0 a watch begins with its current state: no list, no get."""
        watch = self._server.watch(
            NODES,
            random.randint(*_WATCH_SECONDS),  # noqa: S311 - no secret
            fieldSelector=f"metadata.name={self._plan.node}",
            resourceVersion=self.node_version,
        )
        async with contextlib.aclosing(watch) as events:
            async for event in events:
                self._watch.reset()
                self._node_event(event)

    def _watch_ended(self, error: ApiServerFailed | None) -> None:
        if error is not None:
            self._journal.trouble("node", str(error), "node_watch_failed", "node_watch_works")
            if self._node is None:
                self._tally.not_in_sync = str(error)
            if error.status == 410:
                self.node_version = "0"
        self._to_read = True  # the object may have changed, also by another program

    def _node_event(self, event: Json) -> None:
        kind, node = event["type"], event.get("object") or {}
        if kind == "CONNECTED":
            self._journal.trouble("node", "", "node_watch_failed", "node_watch_works")
            self._changed("the object is read again")
            return
        if kind == "ERROR":
            raise ApiServerFailed(
                f"the watch failed: {node.get('message')}", status=int(node.get("code") or 0)
            )
        metadata = node.get("metadata") or {}
        if kind == "DELETED":
            self._node = None
            self._hami_cordon.node = None
            self._changed("the node is gone")
        elif kind in ("ADDED", "MODIFIED"):
            self._apply_node(metadata)
        self.node_version = str(metadata.get("resourceVersion") or self.node_version)

    def _apply_node(self, metadata: Json) -> None:
        self._hami_cordon.node = metadata
        owner = OwnerReference(self._plan.node, str(metadata.get("uid", "")))
        marked = cordoned(metadata) | foreign_entries(metadata)
        if (owner, marked) == (self._node, self._cordoned):
            return  # most events of a node are about something else
        if marked != self._cordoned:
            self._journal.log.info("cordon", gpus=sorted(marked))
        self._node, self._cordoned = owner, marked
        self._changed("the node's mark has changed")

    def _write_ended(self, error: ApiServerFailed | None) -> None:
        if error is not None:  # a request without an answer may have been carried out
            self._to_read = True
            self._changed(str(error))
        if error is None or error.status != 409:  # another program wrote it meanwhile
            self._note("device", error)

    async def _news(self) -> None:
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            self._to_read = True
        self._wake.clear()

    async def _sync(self) -> None:
        """Write the differences. Raises `ApiServerFailed`."""
        report, node = self._report(), self._node
        marked = sorted(self._cordoned)
        if self._gpus is not None and node is not None and self._gpus["cordoned"] != marked:
            with contextlib.suppress(ResolverError):  # the other task logs that the daemon does not answer
                await self._daemon.cordon(marked)
        if report is None or node is None:
            return
        if self._to_read:
            self._to_read = False
            self._device = await self._read()
        before = self._device
        wanted = desired(report, node, before, time.time())
        if before is None and not report.gpus["version"]:
            return  # nothing was ever known of this node's GPUs
        await self._write(before, wanted)
        assert self._device is not None  # noqa: S101 - it was just read or written
        self._tally.left_out = left_out(report, self._device)
        self._tally.cordoned = sum(
            gpu["uuid"] in report.cordoned or "*" in report.cordoned for gpu in report.gpus["gpus"]
        )
        now = health(self._device)
        self._events.note(node, health(before), now)
        self._health = now
        self._health_changed.set()
        if not self._wake.is_set() and self._tally.daemon_up:
            self._tally.not_in_sync = next(iter(self._refusals.values()), "")

    async def _read(self) -> Json | None:
        try:
            return await self._server.get(self._path)
        except ApiServerFailed as error:
            if error.status != 404:
                raise
            return None

    async def _write(self, before: Json | None, wanted: Json) -> None:
        try:
            if before is None:
                self._device = await self._server.create(DEVICES, wanted)
                self._tally.writes["created"] += 1
            elif change := patch(before, wanted):
                self._device = await self._server.patch(self._path, change)
                self._tally.writes["patched"] += 1
            else:
                return
        except ApiServerFailed as error:
            result = "refused" if 400 <= error.status < 500 else "failed"
            self._tally.writes[{409: "conflict", 429: "throttled"}.get(error.status, result)] += 1
            if error.status == 404 and before is None:
                raise ApiServerFailed(
                    f"{error}. Is Koordinator's Device installed in this cluster?", status=404
                ) from None
            raise
        self._journal.log.info(
            "device_written",
            unhealthy=[uuid for uuid, state in health(self._device).items() if not state.healthy],
            version=self._device["metadata"]["resourceVersion"],
        )

    async def _keep_condition(self) -> None:
        self._health_changed.clear()
        now = self._health
        ill = sorted(uuid for uuid, state in now.items() if not state.healthy)
        state = ("True", "UnhealthyGPUs") if ill else ("False", "AllGPUsHealthy")
        message = (
            f"{len(ill)} of {len(now)} GPUs are unhealthy: {', '.join(ill)}" if ill else "no GPU is unhealthy"
        )
        if self._condition == (state[0], message):
            return
        at = rfc3339(time.time())
        condition = {"type": CONDITION, "status": state[0], "reason": state[1], "message": message}
        condition["lastHeartbeatTime"] = at
        if self._condition is None or self._condition[0] != state[0]:
            condition["lastTransitionTime"] = at
        await self._server.patch(
            f"{NODES}/{self._plan.node}/status", {"status": {"conditions": [condition]}}, STRATEGIC_PATCH
        )
        self._condition = (state[0], message)

    def _condition_ended(self, error: ApiServerFailed | None) -> None:
        self._note("condition", error)
        if error is not None:
            self._health_changed.set()
