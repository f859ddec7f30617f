"""A stand-in for the Kubernetes API server, which checks the reporter's requests as strictly as the original.

It has TLS with its own CA, bearer tokens, the rules of the deployed roles, resource versions (409), merge patches, and
strict validation of the Device by its published definition. Watches send metadata only, have bookmarks, and can
expire (410). `Faults` makes it fail.
"""

import contextlib
import copy
import json
import re
import socket
import ssl
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
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
    """A right of a role; ``namespace`` is empty for the whole cluster."""

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
    """A request and the status of its answer; ``at`` is monotonic."""

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
    """Faults of the server. ``refuse`` has the statuses and headers that answer the next writes."""

    def __init__(self) -> None:
        self.refuse: list[tuple[int, Json]] = []
        self.hang = False  # requests are read and never answered
        self.drop_answer = 0  # number of next writes that are carried out without an answer
        self.no_definition = False  # the kind Device is not installed
        self.expire_in_stream = False  # report an expired version by an event instead of the status


class _Server(ThreadingHTTPServer):
    """HTTP server with a thread for each connection; `cut` ends them all."""

    request_queue_size = 4096
    daemon_threads = False

    def __init__(self, kube: "KubeServer", context: ssl.SSLContext) -> None:
        super().__init__(("127.0.0.1", kube.port), _Handler)
        # The handshake is made at the first read, in the connection's own thread.
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.kube, self.stopping = kube, threading.Event()
        self._connections: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - socketserver's
        error = sys.exception()
        if isinstance(error, Exception) and not isinstance(error, OSError):
            self.kube.defects.append(error)  # a bug in the client or in this stand-in

    def cut(self) -> None:
        self.shutdown()
        for connection in [*self._connections]:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def _serve(self) -> None:
        self.server.kube.serve(self)

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _serve  # noqa: N815 - http.server's names

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is http.server's
        pass

    def begin(self, status: int, headers: Json) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()

    def say(self, event: Json) -> None:
        line = json.dumps(event).encode() + b"\n"
        # In two pieces, because an event may span chunks.
        for part in (line[:20], line[20:]):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))


class KubeServer:
    """API server that runs inside its ``with`` block. ``account`` is the directory with a pod's token and CA."""

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
        self.watching = 0
        self.token = ""
        self.port = 0
        self._version, self._compacted = 100, 0
        self._history: list[tuple[int, str, Json]] = []
        self._watches_ended = 0
        self._change = threading.Condition()
        self._server: _Server | None = None
        self.rotate_token()
        self.rotate_authority()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        self.stop()
        assert error is not None or not self.defects, self.defects

    def start(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._certificate, self._certificate.with_suffix(".key"))
        self._server = _Server(self, context)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), name="kube").start()

    def stop(self) -> None:
        """Cut every connection, and end."""
        if self._server is not None:
            self._server.stopping.set()
            self.end_watches()
            self._server.cut()
            self._server = None

    def rotate_token(self) -> None:
        """Replace the token in the account, as kubelet does; the old one becomes invalid."""
        self.token = uuid.uuid4().hex
        (self.account / "token").write_text(self.token)

    def rotate_authority(self) -> None:
        """Create a new CA and server certificate, and replace ca.crt in the account, as kubelet does."""
        place = self.root / f"pki-{uuid.uuid4().hex[:8]}"
        place.mkdir()
        ca = certificate(place, "ca", (CA, "keyUsage=critical,keyCertSign"))
        self._certificate = certificate(place, "apiserver", SERVER, "ca")
        (self.account / "ca.crt").write_bytes(ca.read_bytes())

    def set_node(self, name: str, annotations: Json | None = None) -> None:
        with self._change:
            before = self.nodes.get(name)
            node = copy.deepcopy(before) or {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": name, "uid": str(uuid.uuid4()), "labels": {"gpu": "on"}},
                "status": {"images": [{"names": ["x" * 60], "sizeBytes": 1}] * 50},
            }
            node["metadata"]["annotations"] = annotations or {}
            self._record("MODIFIED" if before else "ADDED", node)

    def delete_node(self, name: str) -> None:
        with self._change:
            self._record("DELETED", self.nodes[name])
            del self.nodes[name]
            self.devices.pop(name, None)

    def set_device(self, device: Json) -> None:
        with self._change:
            self._version += 1
            device["metadata"]["resourceVersion"] = str(self._version)
            device["metadata"].setdefault("uid", str(uuid.uuid4()))
            self.devices[device["metadata"]["name"]] = device

    def end_watches(self, *, compact: bool = False) -> None:
        """Cut all watches; with ``compact`` they can't resume, because the history is dropped."""
        with self._change:
            if compact:
                self._version += 1
                self._compacted, self._history = self._version, []
            self._watches_ended += 1
            self._change.notify_all()

    def writes(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.method != "GET" and asked.path.startswith(DEVICES)]

    def serve(self, request: _Handler) -> None:
        length = int(request.headers.get("content-length", 0))
        if len(body := request.rfile.read(length)) < length:
            request.close_connection = True  # the client has gone
            return
        address, method = urlsplit(request.path), request.command
        query = dict(parse_qsl(address.query, strict_parsing=bool(address.query)))
        entry = Asked(method, address.path, query, 0, time.monotonic())
        if self.faults.hang:
            request.server.stopping.wait()
        more: Json = {}
        try:
            with self._change:
                if self.faults.refuse and method != "GET":
                    status, more = self.faults.refuse.pop(0)
                    raise RefusedError(status, "told to fail", more)
                verb, name = self._authorized(method, address.path, query, request.headers)
                if verb != "watch":
                    answer = self._carry_out(verb, address.path, name, query, request.headers, body)
            if verb == "watch":
                self._watch(name, query, request, entry)
                request.close_connection = True
                return
            status = 201 if verb == "create" else 200
        except RefusedError as refused:
            status, more = refused.status, refused.headers
            answer = _status(status, str(refused))
        self.asked.append(entry._replace(status=status))
        if status < 300 and method != "GET" and self.faults.drop_answer:
            self.faults.drop_answer -= 1
            request.close_connection = True
            return
        text = json.dumps(answer).encode()
        request.begin(status, {"Content-Length": len(text), **more})
        request.wfile.write(text)

    def _authorized(self, method: str, path: str, query: Json, headers: Message) -> tuple[str, str]:
        """Return the verb, and the name of the requested or watched object; raise `RefusedError` without the right."""
        if headers["authorization"] != f"Bearer {self.token}":
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

    def _carry_out(self, verb: str, path: str, name: str, query: Json, headers: Message, body: bytes) -> Json:
        content: Json = {}
        if verb != "get":
            assert 0 < len(query.get("fieldManager", "")) <= 128, "every write names its manager"
            patch = "strategic-merge-patch" if path.endswith("/status") else "merge-patch"
            wanted = "application/json" if verb == "create" else f"application/{patch}+json"
            if headers["content-type"] != wanted:
                raise RefusedError(415, f"{headers['content-type']} is not {wanted}")
            content = json.loads(body)
        if match := _EVENT.fullmatch(path):
            return self._on_event(verb, match[1], match[2] or "", content)
        if path.startswith(NODES):
            if verb == "get":
                return self._get(self.nodes, name)
            return (self._patch_node_status if path.endswith("/status") else self._patch_node)(name, content)
        if self.faults.no_definition:
            raise RefusedError(404, "the server could not find the requested resource")
        return self._on_device(verb, name, query, content)

    def _on_device(self, verb: str, name: str, query: Json, content: Json) -> Json:
        if verb == "get":
            return self._get(self.devices, name)
        if verb == "create":
            return self._create(content)
        assert query.get("fieldValidation") == "Strict"
        before = self._get(self.devices, name)
        after = _patched(before, content)
        return before if after == before else self._keep(name, after)

    @staticmethod
    def _get(objects: dict[str, Json], name: str) -> Json:
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

    def _on_event(self, verb: str, namespace: str, name: str, content: Json) -> Json:
        events = {"{namespace}/{name}".format(**event["metadata"]): event for event in self.events}
        if verb == "create":
            return self._post_event(namespace, content, events)
        event = self._get(events, f"{namespace}/{name}")
        if verb == "patch":
            event |= _merged(event, content)
        return event

    def _post_event(self, namespace: str, event: Json, events: dict[str, Json]) -> Json:
        try:
            kubernetes_validate.validate(event, kubernetes_validate.latest_version(), strict=True)
        except kubernetes_validate.ValidationError as error:
            raise RefusedError(422, str(error)) from None
        metadata = event["metadata"]
        if {metadata["namespace"], event["involvedObject"].get("namespace", "default")} != {namespace}:
            raise RefusedError(
                422, "an event lives in its object's namespace; one about no namespaced object in default"
            )
        if f"{namespace}/{metadata['name']}" in events:
            raise RefusedError(409, f'events "{metadata["name"]}" already exists')
        self.events.append(event)
        return event

    def _patch_node(self, name: str, patch: Json) -> Json:
        assert patch.keys() == {"metadata"}
        assert patch["metadata"].keys() == {"resourceVersion", "annotations"}
        return self._record("MODIFIED", _patched(self._get(self.nodes, name), patch))

    def _patch_node_status(self, name: str, patch: Json) -> Json:
        node = copy.deepcopy(self._get(self.nodes, name))
        assert patch.keys() == {"status"}
        assert patch["status"].keys() == {"conditions"}
        by_type = {condition["type"]: condition for condition in node["status"].get("conditions", ())}
        for condition in patch["status"]["conditions"]:
            by_type[condition["type"]] = by_type.get(condition["type"], {}) | condition
        node["status"]["conditions"] = list(by_type.values())
        return self._record("MODIFIED", node)

    def _record(self, kind: str, node: Json) -> Json:
        self._version += 1
        node["metadata"]["resourceVersion"] = str(self._version)
        self.nodes[node["metadata"]["name"]] = node
        self._history.append((self._version, kind, copy.deepcopy(node)))
        self._change.notify_all()
        return node

    def _watch(self, name: str, query: Json, request: _Handler, entry: Asked) -> None:
        assert name, "a watch must name a node"
        if request.headers["accept"] != _PARTIAL:
            raise RefusedError(406, "metadata is all that may be watched here")
        version, ended = int(query.get("resourceVersion") or 0), self._watches_ended
        too_old = f"too old resource version: {version}" if version and version < self._compacted else ""
        if too_old and not self.faults.expire_in_stream:
            raise RefusedError(410, too_old)
        request.begin(200, {"Transfer-Encoding": "chunked"})
        with self._change:
            self.asked.append(entry._replace(status=200))
            self.watching += 1
        try:
            if too_old:
                request.say({"type": "ERROR", "object": _status(410, too_old)})
                return
            if not version:
                version = self._version
                if name in self.nodes:
                    request.say({"type": "ADDED", "object": _partial(self.nodes[name])})
            stopping = request.server.stopping
            self._send_changes(
                name, version, request, query, lambda: self._watches_ended != ended or stopping.is_set()
            )
        finally:
            with self._change:
                self.watching -= 1

    def _send_changes(
        self, name: str, version: int, request: _Handler, query: Json, ended: Callable[[], bool]
    ) -> None:
        ends = time.monotonic() + float(query["timeoutSeconds"])
        while (left := ends - time.monotonic()) > 0:
            with self._change:
                if not (ended() or self._since(version)):
                    self._change.wait(min(left, self.bookmark_seconds))
                news = self._since(version)
            if ended():
                return
            for number, kind, node in news:
                version = number
                if node["metadata"]["name"] == name:
                    request.say({"type": kind, "object": _partial(node)})
            if not news and "allowWatchBookmarks" in query:
                version = max(version, self._version)
                metadata = {"resourceVersion": str(version), "creationTimestamp": None}
                request.say({"type": "BOOKMARK", "object": _partial({"metadata": metadata})})
        request.wfile.write(b"0\r\n\r\n")

    def _since(self, version: int) -> list[tuple[int, str, Json]]:
        return [event for event in self._history if event[0] > version]


def _status(code: int, message: str) -> Json:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}


def _partial(node: Json) -> Json:
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": node["metadata"]}


def _patched(before: Json, patch: Json) -> Json:
    version = before["metadata"]["resourceVersion"]
    if patch.get("metadata", {}).get("resourceVersion", version) != version:
        raise RefusedError(409, "Operation cannot be fulfilled: the object has been modified")
    return dict(_merged(before, patch))


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
    for manifest in manifests:
        if manifest["kind"] in ("ClusterRole", "Role"):
            for rule in manifest["rules"]:
                assert rule.keys() == {"apiGroups", "resources", "verbs"}
                for names in product(rule["apiGroups"], rule["resources"], rule["verbs"]):
                    yield Rule(*names, manifest["metadata"].get("namespace", ""))
