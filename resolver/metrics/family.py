"""Declared metric families, and their series for the Prometheus client.

``families.txt`` declares them by section, as ``NAME | KIND | LABELS | VALUE | HELP``. A value ``RECORD.ATTRIBUTE``,
perhaps times a factor, is read from such records (`values`); others (``-``) are made in code. ``*GROUP* = LABELS``
names labels that occur together, from there on. The last label of a ``stateset`` has its name.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from prometheus_client import metrics_core as client

from resolver.state import PassSeconds

#: Values of the labels, and the series' number: None for no series; a dict in an ``info`` or a ``stateset``.
Row = tuple[tuple[str, ...], Any]

_CLASSES: Final = {
    "counter": client.CounterMetricFamily,
    "gauge": client.GaugeMetricFamily,
    "info": client.InfoMetricFamily,
    "stateset": client.StateSetMetricFamily,
}


class Family(NamedTuple):
    """``name`` is that of the series, with ``_total`` or ``_info``; ``kind`` is Prometheus's."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str
    declared: str  # the labels with the names of groups
    section: str
    record: str
    attribute: str
    factor: float


FAMILIES: Final[dict[str, Family]] = {}
#: Labels that occur together: by section, and by name.
GROUPS: Final[dict[str, dict[str, str]]] = {}


def _declare(text: str) -> None:
    section, groups = "", dict[str, str]()
    for line in text.splitlines():
        if line.startswith("# "):
            section = line[2:]
        elif line.startswith("*"):
            group, _, labels = line.partition(" = ")
            groups[group] = GROUPS.setdefault(section, {})[group] = labels
        else:
            name, kind, labels, value, meaning = line.split(" | ")
            source, _, factor = value.partition(" * ")
            record, _, attribute = source.partition(".")
            whole = ", ".join(groups.get(label, label) for label in labels.split(", "))
            names = () if labels == "-" else tuple(whole.split(", "))
            times = float(factor) if factor else 1
            FAMILIES[name] = Family(name, kind, names, meaning, labels, section, record, attribute, times)


_declare(Path(__file__).with_name("families.txt").read_text())


def metric(name: str, rows: Iterable[Row] | float | None) -> client.Metric:
    """Build a declared family from its rows, or from the number of its only series."""
    family = FAMILIES[name]
    labels = [label for label in family.labels if label != name]
    own = name.removesuffix("_info") if family.kind == "info" else name
    made: Any = _CLASSES[family.kind](own, family.help, labels=labels)
    for values, number in (((), rows),) if rows is None or isinstance(rows, (int, float)) else rows:
        if number is not None:
            made.add_metric(values, number)
    return made  # type: ignore[no-any-return]


def values(record: str, records: Sequence[tuple[tuple[str, ...], Any]]) -> Iterator[client.Metric]:
    """Build the families of a sort of record, from these records with their labels; of more labels the last count."""
    for family in FAMILIES.values():
        if family.record == record:
            rows = (
                (labels[-len(family.labels) :], getattr(record, family.attribute))
                for labels, record in records
            )
            factor = family.factor
            yield metric(family.name, ((labels, n if n is None else n * factor) for labels, n in rows))


def histogram(name: str, seen: PassSeconds) -> client.Metric:
    """Build a declared histogram from its counts."""
    bounds = (*map(repr, seen.bounds), "+Inf")
    buckets = list(zip(bounds, (*seen.counts, seen.observations), strict=True))
    return client.HistogramMetricFamily(name, FAMILIES[name].help, buckets, seen.total)
