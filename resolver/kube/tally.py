"""The reporter's counters as metrics, and its readiness."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector

from resolver.metrics.family import metric, values
from resolver.serve import pages
from resolver.serve.pages import Answer

#: Results of a write.
RESULTS = ("created", "patched", "conflict", "throttled", "refused", "failed")


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

    async def answer(self, path: str) -> Answer:
        """Return status, content type and body of ``/metrics``, ``/healthz`` or ``/readyz``."""
        if path == "/metrics":
            return 200, CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self)
        return pages.probed(path, "", self.not_in_sync)

    def collect(self) -> Iterator[Metric]:
        counted: dict[str, Mapping[Any, int]] = {"writes": self.writes, "events": self.events}
        counted |= {"pod_events": self.pod_events, "requests": self._requests}
        for name, counts in counted.items():
            rows = (((str(label),), count) for label, count in sorted(counts.items()))
            yield metric(f"resolver_report_{name}_total", rows)
        yield metric("resolver_report_in_sync", not self.not_in_sync)
        yield from values("tally", [((), self)])
        yield from self._process.collect()
