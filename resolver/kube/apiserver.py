"""Asks the Kubernetes API server, as the service account whose token and CA are in a directory.

Both files are read again when they are needed, since kubelet exchanges them while the pod runs. Errors of the HTTP
library are translated here and not further in: everything that fails is an `ApiServerFailed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import ssl
from typing import TYPE_CHECKING, Any

import httpx2

from resolver.errors import ApiServerFailed, UsageError
from resolver.retry import doubled

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping

    from resolver.kube.device import Json

ACCOUNT_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"
#: Who writes, in ``metadata.managedFields`` and in events.
FIELD_MANAGER = "hami-resolver"
MERGE_PATCH, STRATEGIC_PATCH = "application/merge-patch+json", "application/strategic-merge-patch+json"
#: Metadata only: a node's status is large, and changes all the time.
METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"

_CONNECT_SECONDS, _ANSWER_SECONDS = 5.0, 10.0
#: A watch that is silent for longer is begun anew; an API server sends a bookmark each minute.
_SILENCE_SECONDS = 300.0
_MOST_LINE_BYTES = 4 << 20
_MOST_RETRY_SECONDS = 120.0
#: A peer that went without a word is noticed by the kernel after 25 s, and nobody wakes up for it.
_KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000),
]
#: What another try does not change by itself; it is made all the same, in case somebody puts it right.
_REFUSALS = frozenset((400, 401, 403, 404, 405, 406, 413, 415, 422))


def in_cluster(environment: Mapping[str, str]) -> str:
    """The API server's address, from the variables that every pod has. Raises `UsageError`."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise UsageError(
            "this is no pod (KUBERNETES_SERVICE_HOST is not set): name the API server with --api-server https://..."
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


class Backoff:
    """How long to wait before the next try: longer each time, never the same for two nodes.

    Tries begin 4 s apart at most, so that an API server that comes back is asked again within 5 s. What it refuses
    is tried once a minute. Where the server says how long to wait, that is the least.
    """

    _FIRST, _MOST, _MOST_REFUSED = 0.25, 4.0, 60.0

    def __init__(self) -> None:
        self._failures = 0
        self._refusals = 0

    def reset(self) -> None:
        """It succeeded."""
        self._failures = self._refusals = 0

    def seconds(self, error: ApiServerFailed) -> float:
        """Between the begin of the try that failed so, and the begin of the next."""
        if error.status in _REFUSALS:
            # Counted apart: an API server that has just come back refuses for a moment what it does not know yet.
            wait = doubled(self._FIRST, self._MOST_REFUSED, self._refusals)
            self._refusals += 1
        else:
            wait = doubled(self._FIRST, self._MOST, self._failures)
            self._failures += 1
            self._refusals = 0
        if error.retry_after is not None:
            return error.retry_after + random.uniform(0, max(wait, error.retry_after / 2))  # noqa: S311
        return random.uniform(wait / 2, wait)  # noqa: S311 - no secret


class ApiServer:
    """One client. ``requests`` counts them by HTTP status, 0 for those without an answer."""

    def __init__(self, url: str, account_dir: str = ACCOUNT_DIR) -> None:
        if not url.startswith("https://"):
            raise UsageError(f"--api-server {url}: the token is sent by https:// only")
        self.requests: dict[int, int] = {}
        self._url = url.rstrip("/")
        self._account_dir = account_dir
        self._ca = ""
        self._client: httpx2.AsyncClient | None = None

    async def close(self) -> None:
        """Hang up."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def get(self, path: str, **params: str) -> Json:
        """An object."""
        return await self._ask("GET", path, params)

    async def create(self, path: str, body: Json) -> Json:
        """Make an object; the answer is it, as it is kept. 409 if there is one of that name."""
        return await self._ask("POST", path, _WRITING, body)

    async def patch(self, path: str, body: Json, kind: str = MERGE_PATCH) -> Json:
        """Change an object; 409 if it is not of the ``resourceVersion`` in the patch any more."""
        return await self._ask("PATCH", path, _WRITING, body, kind)

    async def watch(self, path: str, seconds: int, **params: str) -> AsyncGenerator[Json]:
        """Events ``{"type", "object"}`` until the server ends it, which it is asked to do after that time.

        The first one is of the type ``CONNECTED``, without an object. What ends otherwise raises.
        """
        query = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds), **params}
        try:
            async with self._stream(path, query) as response:
                self._count(response.status_code)
                if response.status_code != 200:
                    raise _failed(response, await response.aread())
                yield {"type": "CONNECTED"}
                async for line in _lines(response):
                    yield _decode(line)
        except _LOST as error:
            raise self._lost(error) from None

    # -- one request --------------------------------------------------------------------------------

    async def _ask(
        self,
        method: str,
        path: str,
        params: Mapping[str, str],
        body: Json | None = None,
        kind: str = "application/json",
    ) -> Json:
        content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        headers = self._headers("application/json") | ({"Content-Type": kind} if content else {})
        client = await self._connected()
        try:
            # A server that sends a byte now and then keeps nobody waiting.
            async with asyncio.timeout(_ANSWER_SECONDS + _CONNECT_SECONDS):
                response = await client.request(
                    method, path, params=dict(params), content=content, headers=headers
                )
        except _LOST as error:
            raise self._lost(error) from None
        self._count(response.status_code)
        if response.status_code not in (200, 201):
            raise _failed(response, response.content)
        return _decode(response.content)

    @contextlib.asynccontextmanager
    async def _stream(self, path: str, params: Mapping[str, str]) -> AsyncIterator[httpx2.Response]:
        headers = self._headers(METADATA_ONLY)
        client = await self._connected()
        timeout = httpx2.Timeout(_CONNECT_SECONDS, read=_SILENCE_SECONDS)
        async with client.stream("GET", path, params=params, headers=headers, timeout=timeout) as response:
            yield response

    def _headers(self, accept: str) -> dict[str, str]:
        token = self._read("token").strip()
        return {"Authorization": f"Bearer {token}", "Accept": accept, "User-Agent": FIELD_MANAGER}

    async def _connected(self) -> httpx2.AsyncClient:
        """The client; another one if the CA has changed."""
        ca = self._read("ca.crt")
        if self._client is None or ca != self._ca:
            try:
                context = ssl.create_default_context(cadata=ca)
            except (ssl.SSLError, ValueError) as error:
                raise ApiServerFailed(f"{self._account_dir}/ca.crt holds no certificate: {error}") from None
            await self.close()
            self._ca = ca
            self._client = httpx2.AsyncClient(
                base_url=self._url,
                transport=httpx2.AsyncHTTPTransport(verify=context, socket_options=_KEEPALIVE),
                timeout=httpx2.Timeout(_CONNECT_SECONDS, read=_ANSWER_SECONDS),
                trust_env=False,
            )
        return self._client

    def _read(self, name: str) -> str:
        path = os.path.join(self._account_dir, name)
        try:
            with open(path, encoding="ascii") as file:
                return file.read(1 << 20)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise ApiServerFailed(
                f"{path} cannot be read ({why}): mount a service account's token, or name its directory with "
                "--service-account"
            ) from None

    def _count(self, status: int) -> None:
        self.requests[status] = self.requests.get(status, 0) + 1

    def _lost(self, error: Exception) -> ApiServerFailed:
        self._count(0)
        why = str(error) or type(error).__name__
        return ApiServerFailed(f"the API server at {self._url} was not reached: {why}")


#: What the HTTP library raises when there is no answer, or not all of it; RuntimeError: the client was closed by
#: another task, which has found another CA.
_LOST = (httpx2.HTTPError, httpx2.StreamError, OSError, RuntimeError)
_WRITING = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}


async def _lines(response: httpx2.Response) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line:
                yield line
        if len(rest) > _MOST_LINE_BYTES:
            raise ApiServerFailed(f"the API server sent an event of more than {_MOST_LINE_BYTES} bytes")


def _decode(text: bytes) -> Json:
    try:
        value: Any = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ApiServerFailed(
            "what the API server answered is no JSON object: does a proxy answer in its place?"
        )
    return value


def _failed(response: httpx2.Response, body: bytes) -> ApiServerFailed:
    """What the answer says, which is a ``Status`` of Kubernetes', or a proxy's page."""
    try:
        status: Any = json.loads(body)
        message, details = str(status["message"]), status.get("details") or {}
    except (ValueError, KeyError, TypeError, AttributeError):
        message, details = body[:200].decode("utf-8", "replace").strip(), {}
    after = response.headers.get("retry-after") or str(details.get("retryAfterSeconds", ""))
    wait = min(float(after), _MOST_RETRY_SECONDS) if after.isdecimal() else None
    code = response.status_code
    return ApiServerFailed(f"the API server answered {code}: {message}", status=code, retry_after=wait)
