"""What the reporter counts, as metrics, and whether it is ready."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.process_collector import ProcessCollector

from resolver.metrics.families import Family
from resolver.serve.pages import PLAIN

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.metrics_core import Metric

#: What became of a write.
RESULTS = ("created", "patched", "conflict", "throttled", "refused", "failed")

WRITES = Family(
    name="resolver_report_writes_total",
    kind="counter",
    labels=("result",),
    help="Attempts to write the Device object: created, patched, conflict (409), throttled (429), refused, failed.",
)
EVENTS = Family(
    name="resolver_report_events_total",
    kind="counter",
    labels=("result",),
    help="Events on the node: posted, or failed and tried again.",
)
REQUESTS = Family(
    name="resolver_report_requests_total",
    kind="counter",
    labels=("code",),
    help="Requests to the API server by HTTP status; 0 for those without an answer.",
)
LAST_SUCCESS = Family(
    name="resolver_report_last_success_timestamp_seconds",
    kind="gauge",
    labels=(),
    help="When the Device object was last written, or read and found right (Unix time).",
)
IN_SYNC = Family(
    name="resolver_report_in_sync",
    kind="gauge",
    labels=(),
    help="Whether the Device object is known to be as it should be.",
)
DAEMON_UP = Family(
    name="resolver_report_daemon_up",
    kind="gauge",
    labels=(),
    help="Whether the daemon answers at its socket.",
)
CORDONED = Family(
    name="resolver_report_cordoned_gpus",
    kind="gauge",
    labels=(),
    help="GPUs that are reported unhealthy by an operator's mark.",
)
LEFT_OUT = Family(
    name="resolver_report_left_out_gpus",
    kind="gauge",
    labels=(),
    help="GPUs that are not in the object, because their UUID or minor number is not known.",
)
FAMILIES = (WRITES, EVENTS, REQUESTS, LAST_SUCCESS, IN_SYNC, DAEMON_UP, CORDONED, LEFT_OUT)


class Tally:
    """Belongs to one event loop's thread. None is "not known yet"."""

    def __init__(self) -> None:
        self.writes: Counter[str] = Counter(dict.fromkeys(RESULTS, 0))
        self.events: Counter[str] = Counter(posted=0, failed=0)
        self.last_success: float | None = None
        self.not_in_sync = "the daemon was not asked yet"
        self.daemon_up = False
        self.cordoned: int | None = None
        self.left_out: int | None = None

    def in_sync(self) -> None:
        """The object is as it should be."""
        self.last_success, self.not_in_sync = time.time(), ""


class ReporterPage:
    """What is answered over HTTP: ``/metrics``, ``/healthz``, ``/readyz``."""

    def __init__(self, tally: Tally, requests: Mapping[int, int]) -> None:
        self._tally = tally
        self._requests = requests
        self._process = ProcessCollector(registry=None)

    async def answer(self, path: str, accept: str) -> tuple[int, str, bytes]:  # noqa: ARG002
        """Status, content type and body."""
        if path == "/metrics":
            return 200, CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self)
        if path == "/healthz":
            return 200, PLAIN, b"ok\n"
        if path == "/readyz":
            why = self._tally.not_in_sync
            return (503, PLAIN, f"{why}\n".encode()) if why else (200, PLAIN, b"ok\n")
        return 404, PLAIN, b"there are /metrics, /healthz and /readyz\n"

    def collect(self) -> Iterator[Metric]:
        """All families; what is not known has no series."""
        tally = self._tally
        yield WRITES.metric(((result,), number) for result, number in tally.writes.items())
        yield EVENTS.metric(((result,), number) for result, number in tally.events.items())
        yield REQUESTS.metric(((str(code),), number) for code, number in sorted(self._requests.items()))
        yield IN_SYNC.metric([((), not tally.not_in_sync)])
        yield DAEMON_UP.metric([((), tally.daemon_up)])
        for family, value in (
            (LAST_SUCCESS, tally.last_success),
            (CORDONED, tally.cordoned),
            (LEFT_OUT, tally.left_out),
        ):
            yield family.metric([] if value is None else [((), value)])
        yield from self._process.collect()
