"""A stand-in for the Kubernetes API server at the wire, as strict as the original in what the reporter uses of it.

TLS with a CA of its own, bearer tokens, the rules of the deployed roles, resource versions (409), merge patches,
strict validation of the Device by its published definition, watches with bookmarks, an expired
history (410) and metadata only. What it is told to do wrong is in `Faults`. Everything runs in one thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import re
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self
from urllib.parse import parse_qsl, urlsplit

import kubernetes_validate

from tests.fakes.certificates import CA, SERVER, certificate
from tests.fakes.device_schema import wrong_with

Json = dict[str, Any]
DEVICES: Final = "/apis/scheduling.koordinator.sh/v1alpha1/devices"
NODES: Final = "/api/v1/nodes"
EVENTS: Final = "/api/v1/namespaces/default/events"
_EVENT: Final = re.compile(r"/api/v1/namespaces/([^/]+)/events(?:/([^/]+))?")
_PARTIAL: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"


class Rule(NamedTuple):
    """What a role allows; the namespace is empty for the whole cluster."""

    group: str
    resource: str
    verb: str
    namespace: str = ""


#: Rights of the reporter's roles; a test compares the manifests.
RULES: Final = frozenset(
    (
        *(Rule("scheduling.koordinator.sh", "devices", verb) for verb in ("get", "create", "patch")),
        *(Rule("", "nodes", verb) for verb in ("get", "watch")),
        Rule("", "events", "create", "default"),
        *(Rule("", "events", verb) for verb in ("get", "create", "patch")),
    )
)
#: Further rights for ``--hami-cordon``.
CORDON_RULE: Final = Rule("", "nodes", "patch")


class Asked(NamedTuple):
    """A request: what it was, when (monotonic), and what became of it."""

    method: str
    path: str
    query: dict[str, str]
    status: int
    at: float


class RefusedError(Exception):
    def __init__(self, status: int, message: str, headers: Json | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or {}


class Faults:
    """What goes wrong. ``refuse`` answers the next writes with these."""

    def __init__(self) -> None:
        self.refuse: list[tuple[int, Json]] = []
        self.hang = False  # requests are taken and never answered
        self.stale: Json | None = None  # the cache for reads at version 0; {} is an empty cache
        self.drop_answer = 0  # so many writes are carried out, and their answer is lost
        self.no_definition = False  # the kind Device is not installed
        self.expire_in_stream = False  # report an expired version by an event instead of the status


class KubeServer:
    """Runs while it is entered. ``account`` is the directory with the token and the CA that a pod would have."""

    def __init__(self, root: Path, rules: frozenset[Rule] = RULES) -> None:
        self.root, self.rules = root, rules
        self.account = root / "account"
        self.account.mkdir(parents=True)
        self.faults = Faults()
        self.devices: dict[str, Json] = {}
        self.nodes: dict[str, Json] = {}
        self.events: list[Json] = []
        self.asked: list[Asked] = []
        self.defects: list[Exception] = []  # defects of requests; checked at exit
        self.bookmark_seconds = 60.0
        self.token = ""
        self.port = 0
        self._version, self._compacted = 100, 0
        self._history: list[tuple[int, str, Json]] = []
        self._changed: set[asyncio.Event] = set()
        self._watches: set[asyncio.Task[None]] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kube")
        self.rotate_token()
        self.rotate_authority()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        self.stop()
        asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        assert error is not None or not self.defects, self.defects

    def call(self, function: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(60)

    def start(self) -> None:
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)

    def stop(self) -> None:
        """End: every connection is cut."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(60)

    def rotate_token(self) -> None:
        """Kubelet writes another token; the old one is not valid any more."""
        self.token = uuid.uuid4().hex
        (self.account / "token").write_text(self.token)

    def rotate_authority(self) -> None:
        """Another CA, and a certificate of it; kubelet exchanges ca.crt."""
        place = self.root / f"pki-{uuid.uuid4().hex[:8]}"
        place.mkdir()
        ca = certificate(place, "ca", (CA, "keyUsage=critical,keyCertSign"))
        self._certificate = certificate(place, "apiserver", SERVER, "ca")
        (self.account / "ca.crt").write_bytes(ca.read_bytes())

    def set_node(self, name: str, annotations: Json | None = None) -> None:
        def change() -> None:
            known = self.nodes.get(name)
            node = copy.deepcopy(known) or {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": name, "uid": str(uuid.uuid4()), "labels": {"gpu": "on"}},
                "status": {"images": [{"names": ["x" * 60], "sizeBytes": 1}] * 50},
            }
            node["metadata"]["annotations"] = annotations or {}
            self.nodes[name] = node
            self._happened("MODIFIED" if known else "ADDED", node)

        self.call(change)

    def delete_node(self, name: str) -> None:
        def change() -> None:
            node = self.nodes.pop(name)
            self._happened("DELETED", node)
            self.devices.pop(name, None)

        self.call(change)

    def set_device(self, device: Json) -> None:
        def change() -> None:
            self._version += 1
            device["metadata"]["resourceVersion"] = str(self._version)
            device["metadata"].setdefault("uid", str(uuid.uuid4()))
            self.devices[device["metadata"]["name"]] = device

        self.call(change)

    def delete_device(self, name: str) -> None:
        self.call(lambda: self.devices.pop(name))

    def end_watches(self, *, compact: bool = False) -> None:
        """Cut all watches; ``compact``: and forget the history, so that they cannot go on from where they were."""

        def end() -> None:
            if compact:
                self._version += 1
                self._compacted, self._history = self._version, []
            for watch in self._watches:
                watch.cancel()

        self.call(end)

    @property
    def watching(self) -> int:
        return len(self._watches)

    def writes(self) -> list[Asked]:
        return [each for each in self.asked if each.method != "GET" and each.path.startswith(DEVICES)]

    async def _start(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._certificate, self._certificate.with_suffix(".key"))
        self._server = await asyncio.start_server(
            self._serve,
            "127.0.0.1",
            self.port,
            ssl=context,
            ssl_handshake_timeout=10,  # `_finish` waits for a client that has connected and says nothing
            backlog=4096,
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        tasks = [*self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _finish(self) -> None:
        """A connection that is being accepted is no task of ours: it gets the time to fail, or to come to `_serve`."""
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in self._connections:
                task.cancel()
            _, late = await asyncio.wait(tasks, timeout=20)
            for task in late:
                task.cancel()
        await asyncio.sleep(0.02)  # transports that were aborted are closed at one of the loop's next turns

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while self._server is not None and await self._request(reader, writer):
                pass
        except (OSError, EOFError, ssl.SSLError, asyncio.CancelledError):
            pass
        except Exception as error:  # noqa: BLE001 - a client that is wrong, or this is
            self.defects.append(error)
        finally:
            self._connections.discard(task)
            self._watches.discard(task)
            writer.transport.abort()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        line, *fields = head.decode("ascii").split("\r\n")
        method, target, version = line.split(" ")
        assert version == "HTTP/1.1"
        headers = dict(field.lower().split(": ", 1) for field in fields if field)
        raw = {field.split(": ", 1)[0].lower(): field.split(": ", 1)[1] for field in fields if field}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        address = urlsplit(target)
        query = dict(parse_qsl(address.query, strict_parsing=bool(address.query)))
        entry = Asked(method, address.path, query, 0, time.monotonic())
        try:
            await self._go_wrong(method)
            verb, name = self._authorized(method, address.path, query, raw)
            if verb == "watch":
                await self._watch(name, query, raw, writer, entry)
                return False
            status, answer = 200, self._carry_out(verb, address.path, name, query, raw, body)
            if verb == "create":
                status = 201
            if method != "GET" and self.faults.drop_answer:
                self.faults.drop_answer -= 1
                self.asked.append(entry._replace(status=status))
                return False
            more: Json = {}
        except RefusedError as refused:
            status, more = refused.status, refused.headers
            answer = _status(status, str(refused))
        text = json.dumps(answer).encode()
        lines = [f"HTTP/1.1 {status} X", "Content-Type: application/json", f"Content-Length: {len(text)}"]
        self.asked.append(entry._replace(status=status))
        lines += [*(f"{name}: {value}" for name, value in more.items()), "", ""]
        writer.write("\r\n".join(lines).encode() + text)
        await writer.drain()
        return True

    async def _go_wrong(self, method: str) -> None:
        if self.faults.hang:
            await asyncio.get_running_loop().create_future()
        if self.faults.refuse and method != "GET":
            status, headers = self.faults.refuse.pop(0)
            raise RefusedError(status, "told to fail", headers)

    def _authorized(self, method: str, path: str, query: Json, headers: Json) -> tuple[str, str]:
        """The verb, and the name of the object or of the one that is watched."""
        if headers.get("authorization") != f"Bearer {self.token}":
            raise RefusedError(401, "Unauthorized")
        verb = {"GET": "get", "POST": "create", "PATCH": "patch"}.get(method, method)
        name = path.rsplit("/", 1)[1]
        namespace, subresource = "", ""
        if path.startswith(DEVICES):
            group, resource = "scheduling.koordinator.sh", "devices"
        elif path.startswith(NODES):
            group, resource = "", "nodes"
            if path.endswith("/status"):
                subresource, name = "/status", path.split("/")[-2]
            if query.get("watch") == "true":
                verb = "watch"
                name = query.get("fieldSelector", "").removeprefix("metadata.name=")
            elif path == NODES:
                verb = "list"
        elif match := _EVENT.fullmatch(path):
            group, resource, namespace = "", "events", match[1]
        else:
            raise RefusedError(404, "404 page not found")
        if not {Rule(group, resource + subresource, verb, place) for place in (namespace, "")} & self.rules:
            raise RefusedError(403, f"{resource}{subresource} {name!r} is forbidden: cannot {verb}")
        return verb, name

    def _carry_out(self, verb: str, path: str, name: str, query: Json, headers: Json, body: bytes) -> Json:
        if verb != "get":
            assert 0 < len(query.get("fieldManager", "")) <= 128, "every write names its manager"
        if match := _EVENT.fullmatch(path):
            return self._on_event(verb, match[1], match[2] or "", headers, body)
        if path.startswith(NODES):
            if verb == "get":
                return self._there(self.nodes, name)
            if path.endswith("/status"):
                return self._patch_node_status(name, headers, json.loads(body))
            return self._patch_node(name, headers, json.loads(body))
        if self.faults.no_definition:
            raise RefusedError(404, "the server could not find the requested resource")
        return self._on_device(verb, name, query, headers, body)

    def _on_device(self, verb: str, name: str, query: Json, headers: Json, body: bytes) -> Json:
        if verb == "get":
            if query.get("resourceVersion") == "0" and self.faults.stale is not None:
                return self._there({name: self.faults.stale} if self.faults.stale else {}, name)
            return self._there(self.devices, name)
        if verb == "create":
            _typed(headers, "application/json")
            return self._create(json.loads(body))
        assert query.get("fieldValidation") == "Strict"
        _typed(headers, "application/merge-patch+json")
        return self._patch(name, json.loads(body))

    @staticmethod
    def _there(objects: dict[str, Json], name: str) -> Json:
        if name not in objects:
            raise RefusedError(404, f'"{name}" not found')
        return objects[name]

    def _create(self, device: Json) -> Json:
        name = device["metadata"]["name"]
        if "resourceVersion" in device["metadata"]:
            raise RefusedError(400, "resourceVersion should not be set on objects to be created")
        if name in self.devices:
            raise RefusedError(409, f'devices "{name}" already exists')
        device["metadata"] |= {"uid": str(uuid.uuid4()), "generation": 1}
        return self._keep(name, device)

    def _patch(self, name: str, patch: Json) -> Json:
        before = self._there(self.devices, name)
        wanted = patch.get("metadata", {}).get("resourceVersion")
        if wanted is not None and wanted != before["metadata"]["resourceVersion"]:
            raise RefusedError(
                409, f'Operation cannot be fulfilled on "{name}": the object has been modified'
            )
        after = _merged(before, patch)
        if after == before:
            return before
        return self._keep(name, after)

    def _keep(self, name: str, device: Json) -> Json:
        if wrong := wrong_with(device):
            raise RefusedError(422, f'Device "{name}" is invalid: {"; ".join(wrong)}')
        for reference in device["metadata"].get("ownerReferences", ()):
            if not {"apiVersion", "kind", "name", "uid"} <= reference.keys():
                raise RefusedError(422, "an owner reference is incomplete")
        self._version += 1
        device["metadata"]["resourceVersion"] = str(self._version)
        self.devices[name] = device
        return device

    def _on_event(self, verb: str, namespace: str, name: str, headers: Json, body: bytes) -> Json:
        known: dict[tuple[str, str], Json] = {
            (each["metadata"]["namespace"], each["metadata"]["name"]): each for each in self.events
        }
        if verb == "create":
            return self._post_event(namespace, json.loads(body), known)
        event = known.get((namespace, name))
        if event is None:
            raise RefusedError(404, f'events "{name}" not found')
        if verb == "patch":
            _typed(headers, "application/merge-patch+json")
            event |= _merged(event, json.loads(body))
        return event

    def _post_event(self, namespace: str, event: Json, known: dict[tuple[str, str], Json]) -> Json:
        try:
            kubernetes_validate.validate(event, kubernetes_validate.latest_version(), strict=True)
        except kubernetes_validate.ValidationError as error:
            raise RefusedError(422, str(error)) from None
        metadata = event["metadata"]
        if (
            metadata["namespace"] != namespace
            or event["involvedObject"].get("namespace", "default") != namespace
        ):
            raise RefusedError(
                422, "an event lives in its object's namespace; one about no namespaced object in default"
            )
        if (namespace, metadata["name"]) in known:
            raise RefusedError(409, f'events "{metadata["name"]}" already exists')
        self.events.append(event)
        return event

    def _patch_node(self, name: str, headers: Json, patch: Json) -> Json:
        _typed(headers, "application/merge-patch+json")
        node = self._there(self.nodes, name)
        assert patch.keys() == {"metadata"}
        assert patch["metadata"].keys() == {"resourceVersion", "annotations"}
        if patch["metadata"]["resourceVersion"] != node["metadata"]["resourceVersion"]:
            raise RefusedError(409, f'Operation cannot be fulfilled on nodes "{name}": it has been modified')
        node = dict(_merged(node, patch))
        self.nodes[name] = node
        self._happened("MODIFIED", node)
        return node

    def _patch_node_status(self, name: str, headers: Json, patch: Json) -> Json:
        _typed(headers, "application/strategic-merge-patch+json")
        node = copy.deepcopy(self._there(self.nodes, name))
        assert patch.keys() == {"status"}
        assert patch["status"].keys() == {"conditions"}
        by_type = {each["type"]: each for each in node["status"].get("conditions", ())}
        for each in patch["status"]["conditions"]:
            by_type[each["type"]] = by_type.get(each["type"], {}) | each
        node["status"]["conditions"] = list(by_type.values())
        self.nodes[name] = node
        self._happened("MODIFIED", node)
        return node

    def _happened(self, kind: str, node: Json) -> None:
        self._version += 1
        node["metadata"]["resourceVersion"] = str(self._version)
        self._history.append((self._version, kind, copy.deepcopy(node)))
        for changed in self._changed:
            changed.set()

    async def _watch(
        self, name: str, query: Json, headers: Json, writer: asyncio.StreamWriter, entry: Asked
    ) -> None:
        assert name, "a watch is for one node only"
        if headers.get("accept") != _PARTIAL:
            raise RefusedError(406, "metadata is all that may be watched here")
        version = int(query.get("resourceVersion") or 0)
        expired = bool(version) and version < self._compacted
        if expired and not self.faults.expire_in_stream:
            raise RefusedError(410, f"too old resource version: {version}")
        task = asyncio.current_task()
        assert task is not None
        stream = _Stream(writer)
        await stream.begin()
        self.asked.append(entry._replace(status=200))
        self._watches.add(task)
        changed = asyncio.Event()
        self._changed.add(changed)
        try:
            if expired:
                await stream.say(
                    {"type": "ERROR", "object": _status(410, f"too old resource version: {version}")}
                )
                return
            if not version:
                version = self._version
                if name in self.nodes:
                    await stream.say({"type": "ADDED", "object": _partial(self.nodes[name])})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(float(query["timeoutSeconds"])):
                    await self._tell(name, version, stream, changed, bookmarks="allowWatchBookmarks" in query)
            await stream.end()
        finally:
            self._changed.discard(changed)
            self._watches.discard(task)

    async def _tell(
        self, name: str, version: int, stream: _Stream, changed: asyncio.Event, *, bookmarks: bool
    ) -> None:
        while True:
            for number, kind, node in [each for each in self._history if each[0] > version]:
                version = number
                if node["metadata"]["name"] == name:
                    await stream.say({"type": kind, "object": _partial(node)})
            changed.clear()
            try:
                async with asyncio.timeout(self.bookmark_seconds):
                    await changed.wait()
            except TimeoutError:
                if bookmarks:
                    version = max(version, self._version)
                    bookmark = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}
                    metadata = {"resourceVersion": str(version), "creationTimestamp": None}
                    await stream.say({"type": "BOOKMARK", "object": {**bookmark, "metadata": metadata}})


class _Stream:
    """An answer in chunks; each event is a line."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def begin(self) -> None:
        await self._write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )

    async def say(self, event: Json) -> None:
        line = json.dumps(event).encode() + b"\n"
        # In two pieces: a chunk is not an event.
        for part in (line[:20], line[20:]):
            await self._write(b"%x\r\n%s\r\n" % (len(part), part))

    async def end(self) -> None:
        await self._write(b"0\r\n\r\n")

    async def _write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()


def _typed(headers: Json, wanted: str) -> None:
    if headers.get("content-type") != wanted:
        raise RefusedError(415, f"{headers.get('content-type')} is not {wanted}")


def _status(code: int, message: str) -> Json:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "code": code,
    }


def _partial(node: Json) -> Json:
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": node["metadata"]}


def _merged(value: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = copy.deepcopy(value) if isinstance(value, dict) else {}
    for name, new in patch.items():
        if new is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(merged.get(name), new)
    return merged


def rules_of(manifests: Sequence[Json]) -> Iterator[Rule]:
    for each in manifests:
        if each["kind"] in ("ClusterRole", "Role"):
            for rule in each["rules"]:
                assert rule.keys() == {"apiGroups", "resources", "verbs"}
                for group in rule["apiGroups"]:
                    for resource in rule["resources"]:
                        for verb in rule["verbs"]:
                            yield Rule(group, resource, verb, each["metadata"].get("namespace", ""))
