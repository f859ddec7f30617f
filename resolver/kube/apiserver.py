"""Client of the Kubernetes API server, with a service account's token and CA.

Both files are read again when needed: kubelet replaces them. Every failure is an `ApiServerFailed`.
"""

import asyncio
import json
import os
import random
import socket
import ssl
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import httpx2

from resolver.base.errors import ApiServerFailed, UsageError
from resolver.base.retry import doubled
from resolver.base.text import cause
from resolver.kube.device import Json

ACCOUNT_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"
#: Name of the writer in ``metadata.managedFields`` and in events.
FIELD_MANAGER = "hami-resolver"
MERGE_PATCH, STRATEGIC_PATCH = "application/merge-patch+json", "application/strategic-merge-patch+json"
#: Metadata only: a node's status is large, and changes all the time.
METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"

_CONNECT_SECONDS, ANSWER_SECONDS = 5.0, 10.0
#: A longer silence restarts the watch; an API server sends a bookmark each minute.
_SILENCE_SECONDS = 300.0
_MOST_LINE_BYTES = 4 << 20
#: The kernel notices a silent peer after 25 s, without waking this process.
_KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000),
]
#: Errors that a retry alone does not fix, so retries are rare.
_REFUSALS = frozenset((400, 401, 403, 404, 405, 406, 413, 415, 422))


def in_cluster(environment: Mapping[str, str]) -> str:
    """Return the API server's address from a pod's variables. Raises `UsageError`."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise UsageError(
            "this is not a pod (KUBERNETES_SERVICE_HOST is not set): name the API server with --api-server https://..."
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


class Backoff:
    """Pauses between tries. ``ended`` gets each try's `ApiServerFailed`, or None.

    A pause is at least ``apart`` seconds. After failures it grows, at most to 4 s, after refusals to a minute, and is
    at least the server's Retry-After; it is random, because nodes must not retry in step.
    """

    FIRST, MOST, MOST_REFUSED = 0.25, 4.0, 60.0

    def __init__(self, ended: Callable[[ApiServerFailed | None], None], apart: float = 0.0) -> None:
        self._ended, self._apart = ended, apart
        self._failures = self._refusals = 0

    async def repeat(
        self, step: Callable[[], Awaitable[None]], news: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """Wait for ``news``, try it, and pause, for ever. A failed try's own time counts as a part of its pause."""
        while True:
            if news is not None:
                await news()
            began, wait = time.monotonic(), self._apart
            try:
                await step()
            except ApiServerFailed as error:
                self._ended(error)
                took = 0.0 if error.retry_after else time.monotonic() - began
                wait = max(wait, self.seconds(error) - took)
            else:
                self._ended(None)
                self.reset()
            await asyncio.sleep(wait)

    def reset(self) -> None:
        self._failures = self._refusals = 0

    def seconds(self, error: ApiServerFailed) -> float:
        """Return the pause after a failed try."""
        if error.status in _REFUSALS:
            # Counted separately: a restarted API server refuses known tokens for a moment.
            wait = doubled(self.FIRST, self.MOST_REFUSED, self._refusals)
            self._refusals += 1
        else:
            wait = doubled(self.FIRST, self.MOST, self._failures)
            self._failures += 1
            self._refusals = 0
        if error.retry_after is not None:
            return error.retry_after + random.uniform(0, max(wait, error.retry_after / 2))  # noqa: S311
        return random.uniform(wait / 2, wait)  # noqa: S311 - no secret


class ApiServer:
    """``requests`` counts requests by HTTP status, 0 for those without an answer."""

    def __init__(self, url: str, account_dir: str = ACCOUNT_DIR) -> None:
        if not url.startswith("https://"):
            raise UsageError(f"--api-server {url}: the token is sent by https:// only")
        self.requests: Counter[int] = Counter()
        self._url = url.rstrip("/")
        self._account_dir = account_dir
        self._ca = ""
        self._client: httpx2.AsyncClient | None = None

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def get(self, path: str) -> Json:
        """Return an object, never the server's cached one."""
        return await self._ask("GET", path, {})

    async def create(self, path: str, body: Json) -> Json:
        """Create an object and return it; 409 if the name exists."""
        return await self._ask("POST", path, _WRITING, body)

    async def patch(self, path: str, body: Json, kind: str = MERGE_PATCH) -> Json:
        """Change an object; 409 unless it has the ``resourceVersion`` in the patch."""
        return await self._ask("PATCH", path, _WRITING, body, kind)

    async def watch(self, path: str, seconds: int, **params: str) -> AsyncGenerator[Json]:
        """Yield events ``{"type", "object"}`` until the server ends the watch, after ``seconds``. Other ends raise.

        The first has the type ``CONNECTED`` and no object.
        """
        query = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds), **params}
        timeout = httpx2.Timeout(_CONNECT_SECONDS, read=_SILENCE_SECONDS)
        headers, client = {"Accept": METADATA_ONLY}, await self._connected()
        try:
            async with client.stream("GET", path, params=query, headers=headers, timeout=timeout) as response:
                if response.status_code != 200:
                    raise _failed(response, await response.aread())
                yield {"type": "CONNECTED"}
                async for line in _lines(response):
                    yield _decode(line)
        except _LOST as error:
            raise self._lost(error) from None

    async def _ask(
        self,
        method: str,
        path: str,
        params: Mapping[str, str],
        body: Json | None = None,
        kind: str = "application/json",
    ) -> Json:
        headers = {"Content-Type": kind} if body is not None else {}
        client = await self._connected()
        try:
            # A server that drips bytes must not block.
            async with asyncio.timeout(ANSWER_SECONDS + _CONNECT_SECONDS):
                response = await client.request(method, path, params=params, json=body, headers=headers)
        except _LOST as error:
            raise self._lost(error) from None
        if response.status_code not in (200, 201):
            raise _failed(response, response.content)
        return _decode(response.content)

    def _authorize(self, request: httpx2.Request) -> httpx2.Request:
        request.headers["Authorization"] = f"Bearer {self._read('token').strip()}"
        return request

    async def _connected(self) -> httpx2.AsyncClient:
        """Return the client, a new one after the CA has changed."""
        ca = self._read("ca.crt")
        if self._client is None or ca != self._ca:
            try:
                context = _trusting(ca)
            except (ssl.SSLError, ValueError) as error:
                raise ApiServerFailed(f"{self._account_dir}/ca.crt holds no certificate: {error}") from None
            await self.close()
            self._ca = ca
            self._client = httpx2.AsyncClient(
                base_url=self._url,
                transport=httpx2.AsyncHTTPTransport(verify=context, socket_options=_KEEPALIVE),
                timeout=httpx2.Timeout(_CONNECT_SECONDS, read=ANSWER_SECONDS),
                headers={"Accept": "application/json", "User-Agent": FIELD_MANAGER},
                auth=self._authorize,
                event_hooks={"response": [self._answered]},
                trust_env=False,
            )
        return self._client

    def _read(self, name: str) -> str:
        path = os.path.join(self._account_dir, name)
        try:
            with open(path, encoding="ascii") as file:
                return file.read(1 << 20)
        except (OSError, ValueError) as error:
            raise ApiServerFailed(
                f"{path} cannot be read ({cause(error)}): mount a service account's token, or name its directory with "
                "--service-account"
            ) from None

    async def _answered(self, response: httpx2.Response) -> None:
        self.requests[response.status_code] += 1

    def _lost(self, error: Exception) -> ApiServerFailed:
        self.requests[0] += 1
        why = str(error) or type(error).__name__
        return ApiServerFailed(f"the API server at {self._url} was not reached: {why}")


def _trusting(ca: str) -> ssl.SSLContext:
    """Accept the CAs that kubectl accepts: without key identifier or key usage, and intermediate ones as root.

    Python 3.13's defaults require RFC 5280 to the letter.
    """
    context = ssl.create_default_context(cadata=ca)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


#: Errors of a missing or incomplete answer; RuntimeError: another task closed the client after finding a new CA.
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
            "the API server's answer is not a JSON object: does a proxy answer in its place?"
        )
    return value


def _failed(response: httpx2.Response, body: bytes) -> ApiServerFailed:
    """Translate a Kubernetes ``Status``, or a proxy's page."""
    try:
        status: Any = json.loads(body)
        message, details = str(status["message"]), status.get("details") or {}
    except (ValueError, KeyError, TypeError, AttributeError):
        message, details = body[:200].decode("utf-8", "replace").strip(), {}
    after = response.headers.get("retry-after") or str(details.get("retryAfterSeconds", ""))
    wait = min(float(after), Backoff.MOST_REFUSED) if after.isdecimal() else None
    code = response.status_code
    return ApiServerFailed(f"the API server answered {code}: {message}", status=code, retry_after=wait)
