"""The reporter's counters as metrics, and its readiness."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.process_collector import ProcessCollector

from resolver.metrics.family import Family
from resolver.serve import pages

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.metrics_core import Metric

    from resolver.metrics.family import Row
    from resolver.serve.pages import Answer

#: Results of a write.
RESULTS = ("created", "patched", "conflict", "throttled", "refused", "failed")

FAMILIES = tuple(
    Family(name=f"resolver_report_{name}", kind="counter" if labels else "gauge", labels=labels, help=meaning)
    for name, labels, meaning in (
        ("writes_total", ("result",), f"Attempts to write the Device object: {', '.join(RESULTS)}."),
        ("events_total", ("result",), "Events on the node: posted, or failed and tried again."),
        ("pod_events_total", ("result",), "Events on pods: posted or updated, or failed and tried again."),
        (
            "requests_total",
            ("code",),
            "Requests to the API server by HTTP status; 0 for those without an answer.",
        ),
        ("in_sync", (), "1 while the Device object is known to be right."),
        ("daemon_up", (), "1 while the daemon answers at its socket."),
        ("cordoned_gpus", (), "GPUs that are reported unhealthy by an operator's mark."),
        ("left_out_gpus", (), "GPUs that are not in the object: their UUID or minor number is unknown."),
    )
)


class Tally:
    """Counters and state, None until known, and the HTTP answers that show them. Belongs to one event loop's thread.

    ``requests`` counts requests to the API server, by HTTP status.
    """

    def __init__(self, requests: Mapping[int, int]) -> None:
        self.writes: Counter[str] = Counter(dict.fromkeys(RESULTS, 0))
        self.events: Counter[str] = Counter(posted=0, failed=0)
        self.pod_events: Counter[str] = Counter(posted=0, failed=0)
        self.not_in_sync = "the daemon was not asked yet"
        self.daemon_up = False
        self.cordoned: int | None = None
        self.left_out: int | None = None
        self._requests = requests
        self._process = ProcessCollector(registry=None)

    async def answer(self, path: str, accept: str) -> Answer:  # noqa: ARG002
        """Return status, content type and body of ``/metrics``, ``/healthz`` or ``/readyz``."""
        if path == "/metrics":
            return 200, CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self)
        if path == "/healthz":
            return pages.probe("")
        if path == "/readyz":
            return pages.probe(self.not_in_sync)
        return pages.NO_SUCH_PAGE

    def collect(self) -> Iterator[Metric]:
        """Yield all families; unknown values have no series."""
        single = not self.not_in_sync, self.daemon_up, self.cordoned, self.left_out
        rows: list[list[Row]] = [
            [((result,), number) for result, number in self.writes.items()],
            [((result,), number) for result, number in self.events.items()],
            [((result,), number) for result, number in self.pod_events.items()],
            [((str(code),), number) for code, number in sorted(self._requests.items())],
        ]
        rows += [[((), value)] for value in single]
        for family, values in zip(FAMILIES, rows, strict=True):
            yield family.metric(values)
        yield from self._process.collect()
