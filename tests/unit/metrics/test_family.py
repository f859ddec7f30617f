"""Metric names follow Prometheus's rules, and every counter has a metric."""

import re
from pathlib import Path

import pytest

from resolver.base.counters import CounterByReason, CounterName
from resolver.metrics.family import FAMILIES, Family

#: Prometheus' rules for names: https://prometheus.io/docs/practices/naming/
UNITS = ("seconds", "bytes", "ratio", "celsius", "watts", "info", "total")
NO_UNITS = ("percent", "milliseconds", "kilobytes", "megabytes", "fahrenheit")
TYPES = ("gauge", "counter", "histogram", "info", "stateset")


@pytest.mark.parametrize(
    "family",
    [family for family in FAMILIES.values() if family.section != "hami"],
    ids=lambda family: family.name,
)
def test_metric_name_keeps_prometheus_rules(family: Family) -> None:
    name = family.name
    assert re.fullmatch(r"resolver_[a-z][a-z0-9_]*", name)
    assert "__" not in name
    assert family.kind in TYPES
    assert name.endswith("_total") == (family.kind == "counter")
    assert name.endswith("_info") == (family.kind == "info")
    assert not any(unit in name.split("_") for unit in NO_UNITS)
    body = name.removesuffix("_total").removesuffix("_info").split("_")
    assert not any(unit in body[:-1] for unit in UNITS if unit != "info"), "the unit comes last"
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in family.labels)
    assert len(set(family.labels)) == len(family.labels)
    assert "le" not in family.labels
    assert (name in family.labels) == (family.kind == "stateset")
    assert family.help.endswith(".")
    assert family.help[0].isupper() or family.help[0].isdigit()


def test_every_counter_of_the_daemon_is_a_metric() -> None:
    counted = {family.attribute for family in FAMILIES.values() if family.record == "counter"}
    assert counted == {*CounterName, *CounterByReason}


@pytest.mark.parametrize("counted", [*CounterName, *CounterByReason])
def test_every_counter_is_counted(root: Path, counted: CounterName | CounterByReason) -> None:
    """At the counter itself, or in a warning of `repair.orders`, which counts it."""
    name = rf"{type(counted).__name__}\.{counted.name}\b"
    counting = re.compile(rf"(counters\[|self\._warn\(|counter, event = ).*{name}")
    assert any(counting.search(path.read_text()) for path in root.glob("resolver/**/*.py"))
