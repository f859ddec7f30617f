"""One metric family, and its series for the Prometheus client.

A row has the values of the family's labels, and a number; without one there is no series.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resolver.state import PassSeconds

Row = tuple[tuple[str, ...], float | None]

#: An empty value of these is left out: Prometheus takes it for no label at all.
_OPTIONAL = frozenset({"container_id"})
_LONGEST = 256  # characters of a label's value; a directory's name has at most 255 bytes


class Family(NamedTuple):
    """``kind`` is Prometheus's; ``name`` is that of the series, with ``_total`` or ``_info``.

    The last label of a ``stateset`` has its name.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str

    def metric(self, rows: Iterable[Row]) -> Metric:
        """Build the family from rows."""
        metric = Metric(prometheus_name(self.name), self.help, self.kind)
        for values, number in rows:
            if number is not None:
                pairs = zip(self.labels, values, strict=True)
                labels = {label: _text(value) for label, value in pairs if value or label not in _OPTIONAL}
                metric.samples.append(Sample(self.name, labels, number, None, None, None))
        return metric

    def single(self, number: float | None) -> Metric:
        """Build a family without labels."""
        return self.metric([((), number)])

    def histogram(self, seen: PassSeconds) -> Metric:
        """Build the family from a histogram's counts."""
        metric = Metric(self.name, self.help, self.kind)
        bounds = (*map(repr, seen.bounds), "+Inf")
        for bound, count in zip(bounds, (*seen.counts, seen.observations), strict=True):
            metric.add_sample(f"{self.name}_bucket", {"le": bound}, count)
        metric.add_sample(f"{self.name}_count", {}, seen.observations)
        metric.add_sample(f"{self.name}_sum", {}, seen.total)
        return metric


def prometheus_name(name: str) -> str:
    """Return a family's name in the client library: without the suffix of its series."""
    return name.removesuffix("_total").removesuffix("_info")


def _text(value: str) -> str:
    """Convert a name to UTF-8 of bounded length; the text format quotes it."""
    if value.isascii() and len(value) <= _LONGEST:
        return value
    return value.encode("utf-8", "backslashreplace").decode()[:_LONGEST]
