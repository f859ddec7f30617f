"""The reporter against an API server over TLS: its requests, its writes, and the faults that it survives."""

import asyncio
import contextlib
import copy
import gc
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from resolver.base.errors import ApiServerFailed
from resolver.kube import apiserver, node_events, reporter
from resolver.kube.apiserver import Backoff
from resolver.kube.device import CORDON, CORDONED, NVML_UNAVAILABLE
from tests.fakes.kube import DEVICES, EVENTS, NODES, RULES, Asked, KubeServer, Rule
from tests.fakes.reported import NODE, Run, gpu, impatient, reporting

KOORDINATOR = "scheduling.koordinator.sh"
A, B = gpu("GPU-a", 0), gpu("GPU-b", 1)
ILL = gpu("GPU-b", 1, "too_hot")
#: Seconds until an object must be right after a fault: three times 5, because the test machine is slow.
SOON = 5.0 * 3

#: asyncio leaves a TLS connection that is cancelled in its handshake to the garbage collector (Python 3.11).
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeServer]:
    impatient(monkeypatch)
    with KubeServer(tmp_path / "kube") as server:
        server.set_node(NODE)
        yield server
    gc.collect()  # or a later test would get the warnings


def watches(kube: KubeServer) -> list[Asked]:
    return [request for request in kube.asked if request.query.get("watch")]


@contextlib.asynccontextmanager
async def synced(kube: KubeServer, **plan: Any) -> AsyncIterator[Run]:
    """A reporter whose object is in sync: two healthy GPUs."""
    async with reporting(kube, **plan) as run:
        run.daemon.say(A, B)
        await run.in_sync()
        yield run


async def falls_ill(run: Run, seconds: float = 30.0) -> None:
    """Report an ill GPU, and wait until the object shows it."""
    run.daemon.say(A, ILL)
    await run.until(lambda: run.health() == {"GPU-a": True, "GPU-b": False}, seconds)
    await run.in_sync()


async def test_reporter_reads_once_and_then_writes_changes(kube: KubeServer) -> None:
    async with synced(kube) as run:
        assert run.health() == {"GPU-a": True, "GPU-b": True}
        owners = run.device["metadata"]["ownerReferences"]
        assert [reference["uid"] for reference in owners] == [kube.nodes[NODE]["metadata"]["uid"]]
        asked = [(request.method, request.path) for request in kube.asked]
        assert asked == [("GET", NODES), ("GET", f"{DEVICES}/{NODE}"), ("POST", DEVICES)]
        for degrees in range(20):  # readings alone are not reported
            run.daemon.say(replace(A, temperature=degrees), replace(B, memory_used=degrees))
            await asyncio.sleep(0.01)
        await run.in_sync()
        kube.set_node(NODE, {"volumes.kubernetes.io/controller-managed-attach-detach": "true"})
        await asyncio.sleep(0.3)
        assert len(kube.asked) == 3
        await falls_ill(run)
        patches = [request for request in kube.writes() if request.method == "PATCH"]
        assert len(patches) == 1
        assert run.tally.writes == {
            "created": 1, "patched": 1, "conflict": 0, "throttled": 0, "refused": 0, "failed": 0,
        }  # fmt: skip


async def test_nothing_is_written_before_nvml_has_answered(kube: KubeServer) -> None:
    async with reporting(kube) as run:
        run.daemon.say(error="NVML is starting", version=0)
        await asyncio.sleep(0.6)  # longer than the reporter waits for NVML
        assert kube.writes() == []
        run.daemon.say(A)
        await run.in_sync()
        assert run.health() == {"GPU-a": True}


async def test_gpus_stay_while_nvml_is_silent(kube: KubeServer) -> None:
    async with synced(kube) as run:
        run.daemon.say(A, B, error="it does not answer in time")
        await asyncio.sleep(0.05)
        run.daemon.say(A, B)
        await asyncio.sleep(0.6)
        assert len(kube.writes()) == 1  # a driver that is slow for a moment has not failed
        run.daemon.say(error="it hangs", version=0)  # a restarted daemon
        await run.until(lambda: run.reasons() == {"GPU-a": NVML_UNAVAILABLE, "GPU-b": NVML_UNAVAILABLE})
        assert run.health() == {"GPU-a": False, "GPU-b": False}
        assert {entry["conditions"][0]["status"] for entry in run.device["spec"]["devices"]} == {"Unknown"}
        run.daemon.say(A, B)
        await run.until(lambda: run.health() == {"GPU-a": True, "GPU-b": True})


async def test_ended_daemon_leaves_the_object(kube: KubeServer) -> None:
    async with synced(kube) as run:
        run.daemon.down()
        await run.until(lambda: not run.tally.daemon_up)
        assert run.tally.not_in_sync
        assert run.health() == {"GPU-a": True, "GPU-b": True}
        assert len(kube.writes()) == 1
        await falls_ill(run)


async def test_cordon_is_honoured_and_lifted(kube: KubeServer) -> None:
    async with synced(kube) as run:
        for value, ill in (
            ("GPU-b", {"GPU-b"}),
            ("*", {"GPU-a", "GPU-b"}),
            ("GPU-a GPU-x", {"GPU-a"}),
            ("", set()),
        ):
            kube.set_node(NODE, {CORDON: value})
            wanted = {uuid: CORDONED if uuid in ill else "" for uuid in ("GPU-a", "GPU-b")}
            await run.until(lambda wanted=wanted: run.reasons() == wanted, SOON)  # type: ignore[misc]
            await run.in_sync()
            assert run.tally.cordoned == len(ill)


async def test_recreated_node_gets_a_new_object(kube: KubeServer) -> None:
    async with synced(kube) as run:
        kube.delete_node(NODE)
        await run.until(lambda: run.tally.not_in_sync == "the node is gone")
        run.daemon.say(A, ILL)
        await asyncio.sleep(0.3)
        assert run.device is None  # without an owner Kubernetes would never delete it
        kube.set_node(NODE)
        await run.until(lambda: NODE in kube.devices, SOON)
        assert (
            kube.devices[NODE]["metadata"]["ownerReferences"][0]["uid"] == kube.nodes[NODE]["metadata"]["uid"]
        )


async def test_foreign_changes_are_reverted_in_ten_seconds(kube: KubeServer) -> None:
    async with synced(kube) as run:
        right = run.device["spec"]["devices"]
        for harm in ("deleted", "changed"):
            changed = copy.deepcopy(run.device)
            changed["spec"]["devices"] = changed["spec"]["devices"][:1]
            began = time.monotonic()
            kube.devices.pop(NODE) if harm == "deleted" else kube.set_device(changed)
            await run.until(lambda: NODE in kube.devices and run.device["spec"]["devices"] == right, SOON)
            assert time.monotonic() - began < 10
            await run.in_sync()


async def test_conflicting_write_is_read_and_retried(kube: KubeServer) -> None:
    async with synced(kube) as run:
        changed = copy.deepcopy(run.device)
        changed["metadata"]["labels"]["theirs"] = "y"
        kube.set_device(changed)
        await falls_ill(run)
        assert run.tally.writes["conflict"] == 1
        assert run.device["metadata"]["labels"]["theirs"] == "y"


async def test_retry_after_is_obeyed(kube: KubeServer) -> None:
    async with synced(kube) as run:
        kube.faults.refuse = [(429, {"Retry-After": "1"})] * 2
        began = time.monotonic()
        await falls_ill(run)
        assert time.monotonic() - began >= 2
        times = [request.at for request in kube.writes() if request.status == 429]
        after = [request.at for request in kube.writes() if request.at > times[-1]]
        assert times[1] - times[0] >= 1
        assert after[0] - times[1] >= 1
        assert run.tally.writes["throttled"] == 2


@pytest.mark.parametrize(
    ("fault", "counted", "requests"),
    [
        (lambda kube: setattr(kube.faults, "refuse", [(500, {}), (503, {}), (504, {}), (500, {})]), {"failed": 4}, 6),
        # A write is not repeated because its answer was lost.
        (lambda kube: setattr(kube.faults, "drop_answer", 1), {"failed": 1, "patched": 0}, 2),
        (lambda kube: kube.rotate_token(), {"patched": 1}, 2),
    ],
    ids=["refused", "without an answer", "another token"],
)  # fmt: skip
async def test_change_arrives_after_a_fault(
    kube: KubeServer, fault: Callable[[KubeServer], object], counted: dict[str, int], requests: int
) -> None:
    async with synced(kube) as run:
        fault(kube)
        await falls_ill(run)
        assert run.tally.writes.items() >= counted.items()
        assert len(kube.writes()) == requests


async def test_silent_api_server_is_given_up(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apiserver, "ANSWER_SECONDS", 0.3)
    async with synced(kube) as run:
        kube.faults.hang = True
        run.daemon.say(A, ILL)
        await run.until(lambda: run.server.requests.get(0, 0) >= 3)
        kube.faults.hang = False
        await run.until(lambda: not run.health()["GPU-b"], SOON)


async def test_object_is_right_soon_after_api_server_returns(
    kube: KubeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The waits begin at their maximum, as after an hour of failures.
    monkeypatch.setattr(Backoff, "MOST_REFUSED", 4.0)
    monkeypatch.setattr(Backoff, "FIRST", 4.0)
    async with synced(kube) as run:
        kube.stop()
        run.daemon.say(A, ILL)
        await run.until(lambda: 0 in run.server.requests)
        await asyncio.sleep(2)
        assert len(kube.writes()) == 1
        kube.start()
        await run.until(lambda: run.health() == {"GPU-a": True, "GPU-b": False}, SOON)
        kube.set_node(NODE, {CORDON: "GPU-a"})
        await run.until(lambda: run.reasons()["GPU-a"] == CORDONED, SOON)


@pytest.mark.parametrize("in_stream", [False, True])
async def test_expired_watch_starts_from_the_beginning(kube: KubeServer, in_stream: bool) -> None:  # noqa: FBT001
    kube.faults.expire_in_stream = in_stream
    async with synced(kube) as run:
        kube.end_watches(compact=True)
        await run.until(lambda: any(request.status == 410 for request in kube.asked) or in_stream)
        await run.until(lambda: kube.watching == 1, SOON)
        kube.set_node(NODE, {CORDON: "GPU-a"})
        await run.until(lambda: run.reasons()["GPU-a"] == CORDONED, SOON)
        versions = [watch.query["resourceVersion"] for watch in watches(kube)]
        assert versions[0] == "0"
        assert int(versions[1]) > 100  # the reporter first resumed at its last version, which had expired
        assert "0" in versions[2:]


async def test_watch_is_renewed_after_a_pause(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", min)
    async with synced(kube) as run:
        ended = time.monotonic()
        kube.end_watches()
        await run.until(lambda: len(watches(kube)) == 2, SOON)
        assert watches(kube)[1].at - ended >= Backoff.FIRST


async def test_bookmarks_advance_the_resumed_version(kube: KubeServer) -> None:
    kube.bookmark_seconds = 0.05
    async with synced(kube) as run:
        kube.set_node("another")  # the watch gets the new version only from a bookmark
        young = int(kube.nodes["another"]["metadata"]["resourceVersion"])
        await run.until(lambda: int(run.reporter.node_version) >= young)
        kube.end_watches()
        await run.until(lambda: len(watches(kube)) == 2, SOON)
        assert int(watches(kube)[1].query["resourceVersion"]) >= young


async def test_untrusted_server_gets_no_token_until_its_ca_comes(kube: KubeServer) -> None:
    async with synced(kube) as run:
        ca = kube.account / "ca.crt"
        before = ca.read_bytes()
        kube.rotate_authority()
        after = ca.read_bytes()
        ca.write_bytes(before)
        kube.stop()
        asked = len(kube.asked)
        kube.start()
        run.daemon.say(A, ILL)
        await run.until(lambda: run.server.requests.get(0, 0) >= 3)
        assert len(kube.asked) == asked
        assert "certificate" in run.tally.not_in_sync
        ca.write_bytes(after)  # kubelet replaces the CA like this
        await falls_ill(run)
        kube.set_node(NODE, {CORDON: "GPU-a"})
        await run.until(lambda: run.reasons()["GPU-a"] == CORDONED, SOON)


@pytest.mark.parametrize(
    ("why", "damage", "repair"),
    [
        (
            "forbidden",
            lambda kube: setattr(kube, "rules", RULES - {Rule(KOORDINATOR, "devices", "create")}),
            lambda kube: setattr(kube, "rules", RULES),
        ),
        (
            "Koordinator's Device installed",
            lambda kube: setattr(kube.faults, "no_definition", True),
            lambda kube: setattr(kube.faults, "no_definition", False),
        ),
        (
            "token cannot be read",
            lambda kube: (kube.account / "token").unlink(),
            lambda kube: (kube.account / "token").write_text(kube.token),
        ),
    ],
)
async def test_missing_permission_is_named_until_it_is_given(
    kube: KubeServer, why: str, damage: Callable[[KubeServer], object], repair: Callable[[KubeServer], object]
) -> None:
    damage(kube)
    async with reporting(kube) as run:
        run.daemon.say(A)
        await run.until(lambda: why in run.tally.not_in_sync)
        repair(kube)
        await run.in_sync()


def test_waits_grow_vary_and_are_limited() -> None:
    gone, refused = ApiServerFailed("gone"), ApiServerFailed("no", status=403)
    backoff = Backoff(lambda _: None)
    waits = [backoff.seconds(gone) for _ in range(30)]
    assert 0.1 < waits[0] <= 0.25
    assert all(2.0 <= wait <= 4.0 for wait in waits[6:])
    assert len(set(waits)) == 30
    assert backoff.seconds(refused) <= 0.25
    assert 30 <= [backoff.seconds(refused) for _ in range(30)][-1] <= 60
    asked = [backoff.seconds(ApiServerFailed("busy", status=429, retry_after=7.0)) for _ in range(30)]
    assert all(7 <= wait <= 11 for wait in asked)


@pytest.mark.parametrize(
    ("path", "refused"),
    [
        (f"{DEVICES}/{NODE}", Rule(KOORDINATOR, "devices", "patch")),
        (EVENTS, Rule("", "events", "create")),
    ],
)
async def test_failure_after_a_quiet_hour_is_not_retried_at_once(
    kube: KubeServer, monkeypatch: pytest.MonkeyPatch, path: str, refused: Rule
) -> None:
    monkeypatch.setattr(Backoff, "FIRST", 4.0)
    clock = SimpleNamespace(monotonic=time.monotonic)
    monkeypatch.setattr(apiserver, "time", clock)
    monkeypatch.setattr(reporter, "APART_SECONDS", 0.0)  # each task waits for news when the hour passes

    def tries() -> list[float]:
        return [request.at for request in kube.asked if (request.path, request.status) == (path, 403)]

    async with synced(kube) as run:
        clock.monotonic = lambda: time.monotonic() + 3600
        kube.rules = RULES - {refused, refused._replace(namespace="default")}
        run.daemon.say(A, ILL)
        await run.until(lambda: len(tries()) > 1)
        await run.until(lambda: path != EVENTS or run.tally.events["failed"] >= 2)
        kube.rules = RULES
        await run.until(lambda: len(kube.events) == 1)
        await run.in_sync()
    assert tries()[1] - tries()[0] >= 1.9


@pytest.mark.parametrize(
    "steps",
    [((A, B),), ((A,), (A, B)), ((A,), (A, ILL))],
    ids=["recovers", "returns healthy", "returns ill"],
)
async def test_each_change_of_health_posts_an_event(
    kube: KubeServer, monkeypatch: pytest.MonkeyPatch, steps: tuple[tuple[Any, ...], ...]
) -> None:
    monkeypatch.setattr(node_events, "APART_SECONDS", 0.0)
    async with synced(kube) as run:
        assert kube.events == []
        await falls_ill(run)
        await run.until(lambda: len(kube.events) == 1)
        for gpus in steps:
            run.daemon.say(*gpus)
            wanted = {gpu.uuid: gpu is not ILL for gpu in gpus}
            await run.until(lambda wanted=wanted: run.health() == wanted)  # type: ignore[misc]
        run.daemon.say(gpu("GPU-a", 0, "lost"), steps[-1][1])  # this event comes after all others
        await run.until(lambda: any("GPU-a" in event["message"] for event in kube.events))
        ill, *well, _ = kube.events
        assert (ill["type"], ill["reason"]) == ("Warning", "GPUUnhealthy")
        assert "GPU-b" in ill["message"]
        assert "TooHot" in ill["message"]
        assert [(event["type"], event["reason"]) for event in well] == [("Normal", "GPUHealthy")] * (
            steps[-1][1] is B
        )
        assert all("GPU-b" in event["message"] for event in well)
        assert ill["involvedObject"]["uid"] == kube.nodes[NODE]["metadata"]["uid"]
        await run.until(lambda: run.tally.events == {"posted": 2 + len(well), "failed": 0})


async def test_events_of_a_gpu_are_a_minute_apart(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_events, "APART_SECONDS", 3.0)
    async with synced(kube) as run:
        began = time.monotonic()
        for state in (ILL, B, ILL, B, ILL):
            run.daemon.say(A, state)
            await run.until(lambda state=state: run.health()["GPU-b"] == (state is B))  # type: ignore[misc]
            await run.in_sync()
        await run.until(lambda: len(kube.events) == 1)
        assert len(kube.events) == 1 or time.monotonic() - began > 3
        run.daemon.say(A, B)
        await run.until(lambda: len(kube.events) == 2)
        assert time.monotonic() - began >= 3
        assert [event["reason"] for event in kube.events] == ["GPUUnhealthy", "GPUHealthy"]


async def test_restarted_reporter_reports_only_changes(kube: KubeServer) -> None:
    async with synced(kube):
        pass
    before, version = len(kube.writes()), kube.devices[NODE]["metadata"]["resourceVersion"]
    async with synced(kube) as run:
        assert (len(kube.writes()), kube.devices[NODE]["metadata"]["resourceVersion"]) == (before, version)
        await falls_ill(run)
        await run.until(lambda: kube.events)
    async with synced(kube) as run:
        await run.until(lambda: len(kube.events) == 2)
    assert [event["reason"] for event in kube.events] == ["GPUUnhealthy", "GPUHealthy"]


async def test_node_condition_follows_the_gpus(kube: KubeServer) -> None:
    kube.rules = RULES | {Rule("", "nodes/status", "patch")}
    async with synced(kube, node_condition=True) as run:
        await falls_ill(run)
        await run.until(lambda: condition(kube)["status"] == "True")
        assert "GPU-b" in condition(kube)["message"]
        since = condition(kube)["lastTransitionTime"]
        run.daemon.say(gpu("GPU-a", 0, "lost"), ILL)
        await run.until(lambda: condition(kube)["message"].startswith("2 of 2"))
        assert condition(kube)["lastTransitionTime"] == since
        run.daemon.say(A, B)
        await run.until(lambda: condition(kube)["status"] == "False")


async def test_refused_condition_is_named_and_delays_no_report(kube: KubeServer) -> None:
    async with reporting(kube, node_condition=True) as run:
        run.daemon.say(A, B)
        await run.until(lambda: run.device and "nodes/status" in run.tally.not_in_sync)
        for number in range(4):
            run.daemon.say(A, ILL if number % 2 else B)
            await run.until(lambda n=number: run.health()["GPU-b"] is not bool(n % 2))  # type: ignore[misc]
            assert "nodes/status" in run.tally.not_in_sync
        kube.rules = RULES | {Rule("", "nodes/status", "patch")}
        await run.in_sync()
        assert condition(kube)["status"] == "True"


def condition(kube: KubeServer) -> Any:
    conditions = kube.nodes[NODE]["status"].get("conditions") or [{"status": ""}]
    return conditions[0]
