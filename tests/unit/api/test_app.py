"""The API over pictures: its answers, its refusals, its time limits, and their match with the description."""

import asyncio
import contextlib
import http.client
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from resolver import client
from resolver.api import access, lookups, stream
from resolver.api.problems import Problem, Reason
from resolver.api.request import MOST_BODY_BYTES
from resolver.api.walks import Walks
from resolver.base.errors import NoDaemon, NotFound, UsageError
from resolver.base.reasons import RepairReason
from resolver.state import SlotReports
from tests.fakes.pictures import CID, FULL, GPU, SLOTS
from tests.fakes.served import Served, serving
from tests.patience import PATIENCE_S, until

POST_HEAD = b"POST /v1/lookup HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "api.sock", **FULL) as running:
        running.publish("repair", slot=3, reason=RepairReason.STALE, where=("a", 1))
        running.publish("source", source="scan")
        yield running


def connect(served: Served) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX)
    channel.settimeout(60)
    channel.connect(served.path)
    return channel


def until_closed(channel: socket.socket) -> bytes:
    said = b""
    try:
        while more := channel.recv(1 << 16):
            said += more
    except ConnectionResetError:
        pass
    return said


def ask(
    served: Served, path: str, method: str = "GET", body: bytes = b"", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    lines = [f"{method} {path} HTTP/1.1", "Host: r", "Connection: close", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    with connect(served) as channel:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the server may close early
            channel.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        answer = http.client.HTTPResponse(channel, method=method)
        answer.begin()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def problem(served: Served, path: str, method: str = "GET", **more: Any) -> dict[str, Any]:
    status, headers, body = ask(served, path, method, **more)
    found: dict[str, Any] = json.loads(body)
    assert headers["content-type"] == "application/problem+json"
    assert (found["status"], found["type"]) == (status, "about:blank")
    assert found["title"] == HTTPStatus(status).phrase
    assert found["reason"] in set(Reason)
    assert found["detail"]
    return found


def test_unknown_is_null_and_upstream_fields_keep_names(served: Served) -> None:
    nameless = client.get_json("/v1/containers", served.path)["containers"][1]
    assert nameless == {
        "container_id": "cd" * 32, "pod_uid": None, "container_name": None, "namespace": None, "pod": None,
        "runtime": None, "pidns": None, "init_host_pid": None, "regions": [], "since": 1e9,
    }  # fmt: skip
    first, second, third = client.get_json("/v1/slots", served.path)["slots"]
    values = [first[name] for name in ("pid", "hostpid", "host_pid", "repaired")]
    assert values == [7, 4711, 4711, "missing"]
    assert first["device_util"] == [
        {"device_uuid": GPU, "sm_util": 40, "utilization": 40},
        {"device_uuid": "GPU-2", "sm_util": 0, "utilization": None},
    ]
    assert first["stuck"] == "why it is stuck"
    assert (second["host_pid"], second["unresolved"], second["stuck"]) == (None, "not_mapped", None)
    assert second["device_util"][0] == {"device_uuid": GPU, "sm_util": None, "utilization": None}
    assert third["dead"] is True
    unresolved = client.get_json("/v1/unresolved", served.path)
    samples = {"not_in_container": 1, "no_slot": 1}
    assert unresolved["by_reason"] == {"slots": {"not_mapped": 1}, "samples": samples}
    assert [slot["pid"] for slot in unresolved["slots"]] == [8]
    assert [sample["container"] for sample in unresolved["samples"]] == [None, CID]
    status = client.get_json("/v1/status", served.path)
    assert status["totals"]["slots"] == 3
    assert status["driver"]["gpus_unhealthy"] == 1
    assert status["policy"]["watchers"] == {"confirms": 1, "doubts": 0}
    assert status["settings"][1] == {"name": "containers_dir", "value": ["/x"], "origin": "file x"}
    (rejected,) = client.get_json("/v1/regions", served.path)["rejected"]
    assert rejected == {"path": "/c.cache", "reason": "symlink"}


@pytest.mark.parametrize("count", [0, 499, 500, 501, 12_345])
def test_lists_of_any_length_are_whole(served: Served, count: int) -> None:
    region = served.shown.regions[0]
    slots = tuple(replace(SLOTS[0], pid=number) for number in range(1, count + 1))
    served.shown = served.shown._replace(regions=(replace(region, slots=SlotReports(slots)),))
    found = client.get_json("/v1/slots", served.path)["slots"]
    assert [slot["pid"] for slot in found] == list(range(1, count + 1))


def test_gpus_are_sent_again_only_when_something_changed(served: Served) -> None:
    status, headers, body = ask(served, "/v1/gpus")
    assert (status, json.loads(body)["version"]) == (200, 3)
    tag = headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        status, headers, body = ask(served, "/v1/gpus", If_None_Match=known)
        assert (status, body, headers["etag"]) == (304, b"", tag)
        assert "content-type" not in headers
    assert ask(served, "/v1/gpus", If_None_Match='"other"')[0] == 200
    served.shown = served.shown._replace(inventory=served.shown.inventory._replace(version=4))
    status, headers, _ = ask(served, "/v1/gpus", If_None_Match=tag)
    assert status == 200
    assert headers["etag"] != tag
    served.shown = served.shown._replace(started_at=5.0, inventory=served.shown.inventory._replace(version=3))
    assert ask(served, "/v1/gpus", If_None_Match=tag)[0] == 200  # version 3, but of another daemon


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("", "missing required field `pid`"),
        ("?pid=7&pid=8&container=abcdef", "there twice"),
        ("?pid=7&contaner=abcdef", "unknown field `contaner`"),
        ("?pid=7&container=abcdef&x=", "unknown field `x`"),
        ("?pid=0&container=abcdef", "`int` >= 1 - at `$.pid`"),
        ("?pid=007&container=abcdef", "Expected `int`"),
        ("?pid=2147483648&container=abcdef", "<= 2147483647"),
        ("?pid=%F0%9D%9F%8F&container=abcdef", "Expected `int`"),
        ("?pid=7&container=", "length >= 1"),
        (f"?pid=7&container={'x' * 301}", "length <= 300"),
        ("?pid=7", "container is missing"),
        ("?pid=7&container=abc", "too short"),
        ("?pid=7&container=%ff", "cannot be read"),
        ("?pid", "cannot be read"),
        ("?" + "&".join(["pid=7"] * 70), "cannot be read"),
        ("?pid=7&container=abcdef&pidns=4294967296", "pidns"),
    ],
)
def test_questions_that_make_no_sense(served: Served, query: str, said: str) -> None:
    found = problem(served, f"/v1/lookup{query}")
    assert (found["status"], found["reason"]) == (400, "bad_request")
    assert said in found["detail"]


@pytest.mark.parametrize(
    ("body", "status", "place"),
    [
        *((body, 400, "") for body in (b"", b"[]", b"[" * 100_000, b'{"pairs": 7}', b'{"pairs": [], "more": 1}')),
        *((b'{"pairs": [%b]}' % pair, 400, "") for pair in (
            b'["x"]', b'["x", 0]', b'["x", "7"]', b'["", 7]', b'{"pid": 7, "host_pid": 7}', b'["\xff", 7]',
        )),
        (json.dumps({"pairs": [["x" * 10, 7]] * 10_001}).encode(), 400, ""),
        (json.dumps({"pairs": [*[[CID, 7]] * 600, [CID, 0]]}).encode(), 400, "$.pairs[600]"),
        (b'{"pairs": []}' + b" " * (2 << 20), 413, ""),
        (b'{"pairs": []}', 200, ""),
    ],
    ids=range(15),
)  # fmt: skip
def test_invalid_batch_is_refused(served: Served, body: bytes, status: int, place: str) -> None:
    got, _, text = ask(served, "/v1/lookup", "POST", body, Content_Type="application/json")
    assert got == status, text
    assert status == 200 or json.loads(text)["status"] == status
    assert place in json.loads(text).get("detail", "")


def test_a_batch_is_not_kept_as_objects_between_its_steps(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lasting object allocated meanwhile would pin the memory of the whole batch."""
    blocks = list[int]()

    async def every(
        _context: object, wanted: dict[str, dict[int, None]], _deadline: float
    ) -> dict[str, dict[int, str]]:
        blocks.append(sys.getallocatedblocks())
        return {cid: dict.fromkeys(ns_pids, Reason.NO_SUCH_PROCESS) for cid, ns_pids in wanted.items()}

    monkeypatch.setattr(lookups, "answer_pairs", every)
    monkeypatch.setattr(lookups, "Pairs", None)  # pairs are decoded singly only to name an error
    body = json.dumps({"pairs": [[f"{number:064x}", 1] for number in range(10_000)]}).encode()
    before = sys.getallocatedblocks()
    got, _, text = ask(served, "/v1/lookup", "POST", body, Content_Type="application/json")
    assert (got, len(json.loads(text)["answers"])) == (200, 10_000)
    assert max(blocks) < before + 10_000


def test_other_refusals(served: Served) -> None:
    assert problem(served, "/v1/containers?x=1")["reason"] == "bad_request"
    assert problem(served, "/v1/events?kind=nonsense")["reason"] == "bad_request"
    assert problem(served, "/v1/events?after=-1")["reason"] == "bad_request"
    assert problem(served, "/v1/events", Last_Event_ID="x" * 9)["reason"] == "bad_request"
    assert problem(served, "/")["reason"] == "no_such_route"
    assert problem(served, "/v1/containers/")["reason"] == "no_such_route"
    for method in ("DELETE", "PUT", "PATCH", "OPTIONS", "TRACE", "CONNECTED"):
        status, headers, _ = ask(served, "/v1/lookup", method)
        assert (status, headers["allow"]) == (405, "GET, POST, HEAD")
    assert problem(served, "/v1/status", "POST")["reason"] == "method_not_allowed"
    assert problem(served, "/v1/lookup", "POST", body=b"{}")["reason"] == "no_json"
    assert problem(served, "/v1/lookup", "POST", body=b"{}", Content_Type="application/json")["status"] == 400
    found = problem(served, "/v1/lookup?pid=2000000000&container=" + "ef" * 32)
    assert (found["status"], found["reason"]) == (404, "no_such_container")


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (b"GET /v1/status HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET /v1/status HTTP/1.1\r\nHost: r\r\nX: " + b"y" * 20_000, 431),
        (b"POST /v1/lookup HTTP/1.1\r\nHost: r\r\nContent-Length: x\r\n\r\n", 400),
        (POST_HEAD + b"Content-Length: 999999999\r\n\r\n", 413),
        (b"GET /v1/status HTTP/1.1\r\nHost: r\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n", 200),
    ],
)
def test_invalid_or_oversized_http_is_refused(served: Served, request_text: bytes, status: int) -> None:
    with connect(served) as channel:
        channel.sendall(request_text)
        head = channel.recv(1 << 16)
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert ask(served, "/v1/status")[0] == 200


def test_a_body_in_chunks_without_end_is_not_read_to_its_end(served: Served) -> None:
    head = POST_HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    with connect(served) as channel:
        channel.sendall(head)
        sent = 0
        try:
            while sent < 8 * MOST_BODY_BYTES:
                sent += channel.send(chunk)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert sent < 4 * MOST_BODY_BYTES
        assert b"413" in until_closed(channel)[:20]


def test_bodies_share_a_memory_budget_freed_on_hangup(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "MOST_BODIES_BYTES", 100_000)
    stalled = connect(served)
    stalled.sendall(POST_HEAD + b"Content-Length: 90000\r\n\r\n" + b" " * 80_000)
    batch = json.dumps({"pairs": [[CID, 1]] * 1000}).encode()
    headers = {"Content_Type": "application/json"}
    until(lambda: ask(served, "/v1/lookup", "POST", batch, **headers)[0] == 503, "no memory for another one")
    stalled.close()
    until(lambda: ask(served, "/v1/lookup", "POST", batch, **headers)[0] == 200, "the memory back")
    for _ in range(20):  # a batch counts only during its request
        assert ask(served, "/v1/lookup", "POST", batch, **headers)[0] == 200


def test_a_request_ends_when_its_client_hangs_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches whose clients hung up after half a second were once all computed to the end, in parallel."""
    begun, ended = threading.Event(), threading.Event()

    async def endless(*_: object) -> None:
        begun.set()
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            ended.set()

    monkeypatch.setattr(lookups, "answer_pairs", endless)
    body = json.dumps({"pairs": [[CID, 1]]}).encode()
    with connect(served) as channel:
        channel.sendall(POST_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert begun.wait(PATIENCE_S)
    assert ended.wait(PATIENCE_S / 2)
    assert ask(served, "/v1/status")[0] == 200


def test_defect_goes_to_the_log_only(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.shown = None  # type: ignore[assignment]
    found = problem(served, "/v1/status")
    assert (found["status"], found["reason"]) == (500, "internal")
    assert "NoneType" not in found["detail"]
    assert "NoneType" in "".join(capsys.readouterr())


@pytest.fixture
def impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(access, "ROOT_LIMITS", access.ROOT_LIMITS._replace(seconds=0.3))
    with serving(tmp_path / "impatient.sock", **FULL) as running:
        yield running


def test_a_request_that_does_not_come_is_not_waited_for(impatient: Served) -> None:
    with contextlib.ExitStack() as open_ones:
        silent, slow, half, again = (open_ones.enter_context(connect(impatient)) for _ in range(4))
        slow.sendall(b"GET /v1/status HT")
        half.sendall(POST_HEAD + b"Content-Length: 50\r\n\r\n{")
        again.sendall(b"GET /v1/containers HTTP/1.1\r\nHost: r\r\n\r\n")
        assert b"200" in again.recv(1 << 16)
        again.sendall(b"G")
        assert until_closed(silent) == b""
        for channel in (slow, half, again):
            assert until_closed(channel).startswith(b"HTTP/1.1 408 ")
    until(lambda: impatient.gatekeeper.inside == 0)


def test_slow_reader_is_disconnected(impatient: Served) -> None:
    served = impatient
    with connect(served) as deaf, connect(served) as streaming:
        streaming.sendall(b"GET /v1/events HTTP/1.1\r\nHost: r\r\n\r\n")
        assert streaming.recv(100).startswith(b"HTTP/1.1 200")
        try:
            for _ in range(200):
                deaf.sendall(b"GET /v1/openapi.json HTTP/1.1\r\nHost: r\r\n\r\n" * 20)
        except (BrokenPipeError, ConnectionResetError):
            pass
        for number in range(300):
            served.publish("source", text="x" * 5000, number=number)
        until(lambda: served.gatekeeper.inside == 0)
        assert served.gatekeeper.counters["dropped_slow"] == 2
        until(lambda: served.gatekeeper.streams == 0)
    assert ask(served, "/v1/status")[0] == 200


def test_events_come_as_they_happen(served: Served) -> None:
    following = client.stream_events(served.path, after="0", kinds=("repair", "policy"))
    first = next(following)
    assert (first["number"], first["kind"]) == (1, "repair")
    assert first["fields"] == {"slot": 3, "reason": "stale", "where": ["a", 1]}
    served.publish("source", source="bpf")
    served.publish("policy", why="so")
    second = next(following)
    assert (second["number"], second["kind"], second["fields"]) == (4, "policy", {"why": "so"})
    following.close()
    again = client.stream_events(served.path, after=first["id"])
    assert [next(again)["number"] for _ in range(3)] == [2, 3, 4]
    again.close()
    until(lambda: served.gatekeeper.streams == 0)
    kept = client.get_json(f"/v1/events?after={first['id']}&kind=source", served.path)["events"]
    assert [event["number"] for event in kept] == [2, 3]


@contextlib.contextmanager
def streaming(served: Served, query: str = "", header: str = "") -> Iterator[Callable[..., bytes]]:
    """Open a stream of events; yield a function that reads until a text has come so many times."""
    said = b""
    with connect(served) as channel:
        channel.sendall(f"GET /v1/events{query} HTTP/1.1\r\nHost: r\r\n{header}\r\n".encode())

        def until_said(what: bytes, times: int = 1) -> bytes:
            nonlocal said
            while said.count(what) < times:
                said += channel.recv(1 << 16)
            return said

        yield until_said


def test_stream_begins_with_news_or_whole_log(served: Served) -> None:
    with streaming(served, header="Accept: */*\r\n") as until_said:
        until_said(b"text/event-stream")
        served.publish("gpu_gone", device="x")
        said = until_said(b"gpu_gone")
        assert b"repair" not in said
        assert re.search(rb"id: \d+-3\nevent: gpu_gone\ndata: {.*}\n\n", said)
    with streaming(served, header="Last-Event-ID: 12345-2\r\n") as until_said:
        assert b"event: repair" in until_said(b"gpu_gone")


def test_dropped_events_and_silence_are_reported(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SILENCE", 0.05)
    for number in range(1500):
        served.call(lambda n=number: served.events.publish("source", {"n": n}))  # type: ignore[misc]
    with streaming(served, "?after=0") as until_said:
        assert b": 478 events are not kept any more\n" in until_said(b'"n":1499')
        until_said(b": nothing happened\n\n", times=3)


def test_streams_are_not_without_number(served: Served) -> None:
    channels = [connect(served) for _ in range(33)]
    for channel in channels:
        channel.sendall(b"GET /v1/events HTTP/1.1\r\nHost: r\r\n\r\n")
    heads = [channel.recv(100) for channel in channels]
    assert sorted(head[9:12] for head in heads) == [b"200"] * 32 + [b"503"]
    for channel in channels:
        channel.close()
    until(lambda: served.gatekeeper.streams == 0)
    assert next(client.stream_events(served.path, after="0"))["number"] == 1


def test_refusals_are_errors_with_a_sentence(served: Served, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no process"):
        client.get_json("/v1/reverse?host_pid=2000000000", served.path)
    with pytest.raises(UsageError, match="unknown field"):
        client.get_json("/v1/status?x=1", served.path)
    for where in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(NoDaemon, match="resolver run"):
            client.get_json("/v1/status", str(where))
        with pytest.raises(NoDaemon, match="resolver run"):
            next(client.stream_events(str(where)))
    with pytest.raises(UsageError, match="kind"):
        next(client.stream_events(served.path, kinds=("nonsense",)))


def test_an_account_is_spent_and_filled_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    gatekeeper, now = served.gatekeeper, [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    key = ("container", "a")
    waits = [gatekeeper.spend(key, 1) for _ in range(101)]
    assert waits[:100] == [0.0] * 100
    assert 0 < waits[100] <= 1 / 50
    now[0] += 1.0
    assert [gatekeeper.spend(key, 1) for _ in range(51)].count(0.0) == 50
    assert gatekeeper.spend(("container", "b"), 1) == 0.0  # another container's account
    now[0] += 100
    assert gatekeeper.spend(key, 1e6) == 0.0  # more than the account can hold
    assert gatekeeper.spend(key, 1) > 0
    for number in range(5000):
        gatekeeper.spend(("container", f"{number}"), 1)
    assert len(gatekeeper.accounts) <= 1024


def test_every_route_has_a_function_of_the_client(served: Served) -> None:
    for name in ("containers", "regions", "slots", "processes", "gpus", "unresolved", "status"):
        document = getattr(client, name)(served.path)
        assert document.keys() == client.get_json(f"/v1/{name}", served.path).keys()
    with pytest.raises(client.NotFound, match="no process"):
        client.look_up(CID, 7, socket_path=served.path, seconds=PATIENCE_S)
    with pytest.raises(client.UsageError, match="pidns"):
        client.look_up(CID, 7, pidns=2**40, socket_path=served.path)
    found = client.reverse(os.getpid(), socket_path=served.path, seconds=PATIENCE_S)
    assert (found["host_pid"], found["comm"]) == (os.getpid(), Path("/proc/self/comm").read_text().strip())
    many = client.look_up_many([(CID, 1), (CID, 2)], socket_path=served.path, seconds=PATIENCE_S)
    assert many["source"] == "scan"
    assert [answer["reason"] for answer in many["answers"]] == ["no_such_container"] * 2


async def test_walk_without_a_thread_is_busy_and_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    walks = Walks(1, 0)
    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError))
        with pytest.raises(Problem, match="raise the limit on tasks") as refused:
            await walks.run(int)
    assert refused.value.status == 503
    assert await walks.run(int) == 0
