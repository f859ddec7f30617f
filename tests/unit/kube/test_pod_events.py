"""Events on pods against an API server at the wire: one per state and pod, updated by count, within a rate."""

import asyncio
import contextlib
import http.server
import json
import os
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resolver.api.shapes import ContainerUses
from resolver.base.journal import Journal
from resolver.base.reasons import BypassReason, SampleReason
from resolver.kube import pod_events
from resolver.kube.apiserver import ApiServer
from resolver.kube.pod_events import DEFAULT, PodEvent, PodEvents, parse_kinds
from resolver.kube.tally import Tally
from resolver.state import ContainerUse, LimitState, Process, WithoutSlot
from tests.fakes.kube import RULES, KubeServer, Rule
from tests.fakes.reported import NODE
from tests.manifests import kubectl
from tests.patience import happens

EVERY = frozenset(PodEvent)
DEVICE = "GPU-5a3c1e70"


def use(
    pod: str = "trainer-0", state: str = "in_force", idle_since: float | None = None, xids: int = 0
) -> Any:
    names = "ml", pod, "main", f"uid-{pod}", "c" * 64, DEVICE
    return ContainerUse(*names, 0, 0, 0, 0, None, None, None, idle_since, 30, LimitState(state), xids)


class Accounts:
    def __init__(self, *uses: ContainerUse, without: Any = ()) -> None:
        self.uses, self.without = list(uses), list(without)

    def __call__(self) -> bytes:
        return msgspec.json.encode(ContainerUses(0, {}, self.without, self.uses))


@pytest.fixture
def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeServer]:
    monkeypatch.setattr(pod_events, "READ_SECONDS", 0.05)
    monkeypatch.setattr(pod_events, "APART_SECONDS", 0.01)
    monkeypatch.setattr(pod_events, "LASTS", dict.fromkeys(PodEvent, 0.2))
    with KubeServer(tmp_path / "kube") as server:
        yield server


@contextlib.asynccontextmanager
async def posting(
    kube: KubeServer, accounts: Accounts, kinds: frozenset[PodEvent] = EVERY
) -> AsyncIterator[Tally]:
    server = ApiServer(kube.url, str(kube.account))
    tally = Tally(server.requests)
    working = asyncio.create_task(PodEvents(server, "", NODE, kinds, tally, Journal()).run())
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(pod_events, "get_bytes", lambda *_: accounts())
            yield tally
    finally:
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
        await server.close()


@pytest.mark.parametrize(
    ("state", "reason", "text"),
    [
        ({"state": "exceeded"}, "GPULimitExceeded", "core limit of 30 %"),
        ({"state": "no_effect"}, "GPULimitWithoutEffect", "update HAMi to 2.10"),
        ({"idle_since": time.time() - 4000}, "GPUHeldIdle", "an hour or more"),
    ],
)
async def test_state_of_a_pod_is_one_event(
    kube: KubeServer, state: dict[str, Any], reason: str, text: str
) -> None:
    async with posting(kube, Accounts(use(**state), use("other-0"))) as tally:
        await happens(lambda: kube.events)
        await asyncio.sleep(0.2)
        assert tally.pod_events == {"posted": 1, "failed": 0}
    (event,) = kube.events
    assert (event["reason"], event["metadata"]["namespace"]) == (reason, "ml")
    assert event["involvedObject"] == {
        "apiVersion": "v1", "kind": "Pod", "namespace": "ml", "name": "trainer-0", "uid": "uid-trainer-0",
    }  # fmt: skip
    assert text in event["message"]


async def test_process_without_library_is_an_event_with_its_fix(kube: KubeServer) -> None:
    names = "c" * 64, "uid-trainer-0", "main", "ml", "trainer-0"
    process = Process(7, 1, DEVICE, *names, "python", 0, 0, SampleReason.NO_SLOT)
    without = WithoutSlot(process, 1.0, (BypassReason.STATIC,))
    async with posting(kube, Accounts(without=[without])):
        await happens(lambda: kube.events)
    assert kube.events[0]["reason"] == "GPUWithoutLibrary"
    assert "; fix: " in kube.events[0]["message"]


async def test_lasting_state_is_counted_on(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_events, "AGAIN_SECONDS", 0.2)
    async with posting(kube, Accounts(use(state="exceeded"))):
        await happens(lambda: kube.events and kube.events[0]["count"] >= 3)
    async with posting(kube, Accounts(use(state="exceeded"))):  # a restarted reporter continues the count
        counted = kube.events[0]["count"]
        await happens(lambda: kube.events[0]["count"] > counted)
    kube.events.clear()  # Kubernetes deletes events after an hour
    async with posting(kube, Accounts(use(state="exceeded"))):
        await happens(lambda: kube.events)
    assert len(kube.events) == 1


async def test_blip_is_no_event(kube: KubeServer) -> None:
    accounts = Accounts(use())
    async with posting(kube, accounts):
        for state in ("exceeded", "in_force") * 5:
            accounts.uses = [use(state=state)]
            await asyncio.sleep(0.1)
    assert kube.events == []


async def test_new_xid_is_an_event_and_an_old_one_is_none(kube: KubeServer) -> None:
    accounts = Accounts(use(xids=3))
    kube.rules = RULES - {Rule("", "events", "create")}
    async with posting(kube, accounts) as tally:
        await asyncio.sleep(0.5)
        assert tally.pod_events["failed"] == 0
        accounts.uses = [use(xids=5)]
        await happens(lambda: tally.pod_events["failed"])
        kube.rules = RULES  # a refused event is tried again
        await happens(lambda: kube.events)
        await asyncio.sleep(0.3)
    (event,) = kube.events
    assert (event["count"], event["message"].partition(":")[2][:14]) == (1, " 2 XID errors ")


async def test_kinds_that_are_off_are_not_posted(kube: KubeServer) -> None:
    kinds = parse_kinds(DEFAULT)
    async with posting(kube, Accounts(use(idle_since=1.0), use("b", state="exceeded")), kinds):
        await happens(lambda: kube.events)
        await asyncio.sleep(0.3)
    assert [event["reason"] for event in kube.events] == ["GPULimitExceeded"]
    assert parse_kinds("off") == frozenset()
    with pytest.raises(ValueError, match="bogus"):
        parse_kinds("xid,bogus")


async def test_thousand_pods_keep_to_the_rate(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_events, "APART_SECONDS", 0.1)
    accounts = Accounts(*(use(f"pod-{number}", state="exceeded") for number in range(1000)))
    began = time.monotonic()
    async with posting(kube, accounts):
        await happens(lambda: len(kube.events) >= 10)
    assert len(kube.asked) <= (time.monotonic() - began) / 0.1 + 1


RESOURCES = [
    {"name": name, "singularName": name[:-1], "namespaced": True, "kind": kind, "verbs": ["get", "list"]}
    for name, kind in (("pods", "Pod"), ("events", "Event"))
]
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "trainer-0", "namespace": "ml", "uid": "uid-trainer-0"},
    "spec": {"containers": [{"name": "main", "image": "example.com/train"}]},
    "status": {"phase": "Running"},
}


def documents(events: list[Any]) -> dict[str, Any]:
    return {
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "groups": []},
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": RESOURCES},
        "/api/v1/namespaces/ml/pods/trainer-0": POD,
        "/api/v1/namespaces/ml/events": {"kind": "EventList", "apiVersion": "v1", "items": events},
    }


def described(events: list[Any], home: Path) -> str:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(documents(events)[self.path.partition("?")[0]]).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        address = f"http://127.0.0.1:{server.server_port}"
        command = [kubectl(), "--server", address, "--namespace", "ml", "describe", "pod", "trainer-0"]
        environment = os.environ | {"HOME": str(home), "KUBECONFIG": "/nonexistent"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_describe_pod_shows_the_exceeded_limit(kube: KubeServer, tmp_path: Path) -> None:
    """The real kubectl reads the posted events."""
    async with posting(kube, Accounts(use(state="exceeded"))):
        await happens(lambda: kube.events)
    shown = described(kube.events, tmp_path).partition("\nEvents:")[2]
    (line,) = [line for line in shown.splitlines() if "GPULimitExceeded" in line]
    assert line.split()[0] == "Warning"
    assert "core limit of 30 %" in line
