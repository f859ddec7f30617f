"""Pages for Prometheus, over HTTP on a TCP port: ``/metrics``, ``/healthz``, ``/readyz``.

Everything is read from the last pass's snapshot, so no answer waits for the driver, the kernel or a tenant's file.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from resolver.base.lean import lean

with lean():
    from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
    from prometheus_client.metrics_core import Metric

from resolver.base.errors import UsageError
from resolver.base.journal import Journal
from resolver.base.text import cause
from resolver.config import Settings, parse_address
from resolver.metrics.collector import collect
from resolver.serve import pages
from resolver.serve.http import PLAIN
from resolver.serve.pages import Answer
from resolver.state import Snapshot

if TYPE_CHECKING:
    from resolver.serve.tls import PortCredentials  # OpenSSL, 7 MiB

#: Seconds for which the rendered text is reused.
_KEPT_SECONDS = 0.5
_LONGEST = 256  # characters of a label's value; a directory's name has at most 255 bytes


class _One(NamedTuple):
    """Registry of one family: other tasks run between two families."""

    metric: Metric

    def collect(self) -> Iterator[Metric]:
        """Yield it with labels in UTF-8 of bounded length, which the text format quotes."""
        for sample in self.metric.samples:
            for label, value in sample.labels.items():
                if len(value) > _LONGEST or not value.isascii():
                    sample.labels[label] = value.encode("utf-8", "backslashreplace").decode()[:_LONGEST]
            if sample.labels.get("container_id") == "":  # to Prometheus no label at all
                del sample.labels["container_id"]
        yield self.metric


class Page:
    """Answer for each path."""

    def __init__(self, snapshot: Callable[[], Snapshot], settings: Settings) -> None:
        self._snapshot = snapshot
        self._settings = settings
        self._made_at, self._text = 0.0, b""
        self._turn = asyncio.Lock()

    async def answer(self, path: str) -> Answer:
        if path == "/metrics":
            return 200, CONTENT_TYPE_PLAIN_0_0_4, await self.metrics()
        shown = self._snapshot()
        return pages.probed(path, shown.standstill(), shown.source.not_ready or "")

    async def metrics(self) -> bytes:
        """Render all families; callers at the same time share one text."""
        async with self._turn:
            if not self._text or not 0 <= time.monotonic() - self._made_at < _KEPT_SECONDS:
                self._made_at, pieces = time.monotonic(), []
                for metric in collect(self._snapshot(), self._settings, time.time()):
                    pieces.append(generate_latest(_One(metric)))
                    await asyncio.sleep(0)
                self._text = b"".join(pieces)
            return self._text


async def serve(
    snapshot: Callable[[], Snapshot],
    settings: Settings,
    journal: Journal,
    refused: Callable[[OSError], None] = lambda _: None,
) -> None:
    """Answer until cancelled; an address that can't be had is logged, and tried again."""
    page = Page(snapshot, settings)

    async def answer(path: str) -> Answer:
        try:
            return await page.answer(path)
        except Exception:
            journal.log.exception("internal_error", step="metrics")
            return 500, PLAIN, b"this is a defect; the log has it, please report it\n"

    listener, credentials = await _opened(settings, journal)
    with listener:
        host, port = listener.getsockname()[:2]
        journal.log.info("metrics_on", address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        await pages.serve(listener, answer, credentials, refused)


async def _opened(settings: Settings, journal: Journal) -> tuple[socket.socket, PortCredentials | None]:
    def open_() -> tuple[socket.socket, PortCredentials | None]:
        credentials = _credentials(settings, journal)  # a port with credentials never opens without them
        try:
            return pages.listen(*(parse_address(settings.metrics_addr) or ("", 0))), credentials
        except OSError as error:
            why = cause(error)
        raise UsageError(
            f"{settings.metrics_addr} cannot be listened on: {why}; name another with --metrics-addr"
        )

    # A daemon that this one takes over from may have it.
    return await journal.tried_again(open_, "metrics", "metrics_off")


def _credentials(settings: Settings, journal: Journal) -> PortCredentials | None:
    files = settings.metrics_tls_cert, settings.metrics_tls_key, settings.metrics_token_file
    if not any(files):
        return None
    from resolver.serve import tls  # 7 MiB

    def refused(why: str) -> None:
        journal.trouble("metrics files", why, "metrics_files_refused", "metrics_files_read")

    return tls.PortCredentials(*files, refused)
