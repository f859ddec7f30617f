"""docs/metrics.md against the families that are declared: each way, with type and labels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from resolver.counters import CounterByReason, CounterName
from resolver.kube import tally
from resolver.metrics import collector, families, hami_names
from resolver.metrics.own import collect as own
from resolver.metrics.utilization import Unknown

#: What Prometheus says about names: https://prometheus.io/docs/practices/naming/
UNITS = ("seconds", "bytes", "ratio", "celsius", "watts", "info", "total")
NO_UNITS = ("percent", "milliseconds", "kilobytes", "megabytes", "fahrenheit")
TYPES = ("gauge", "counter", "histogram", "info", "stateset")


def told(text: str) -> dict[str, tuple[str, tuple[str, ...], str]]:
    """Name -> type, labels and meaning. A group of labels, in italics, is that of the last table of groups."""
    rows, groups, last = {}, {}, ""
    for line in re.findall(r"^\| (.+) \|$", text, re.MULTILINE):
        match line.split(" | "):
            case [group, labels] if group.startswith("*"):
                groups[group] = labels
            case [name, kind, labels, meaning] if kind in TYPES:
                labels = re.sub(r"\*[\w ]+\*", lambda group: groups[group[0]], labels)
                last = meaning if meaning != "the same" else last
                rows[name.strip("`")] = (kind, tuple(re.findall(r"`(\w+)`", labels)), last)
    return rows


def sections(root: Path) -> dict[str, str]:
    parts = re.split(r"^## (.+)$", (root / "docs/metrics.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_family_is_told_and_no_other(root: Path) -> None:
    everybodys = (*families.FAMILIES, *hami_names.FAMILIES, *tally.FAMILIES)
    declared = {each.name: each[1:] for each in everybodys}
    assert len(declared) == len(everybodys)
    assert told((root / "docs/metrics.md").read_text()) == declared


def test_families_of_hamis_are_told_as_such(root: Path) -> None:
    by_section = sections(root)
    assert set(told(by_section["HAMi's names"])) == {each.name for each in hami_names.FAMILIES}


def test_every_reason_without_a_value_is_told(root: Path) -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \|$", sections(root)["Containers"], re.MULTILINE)
    assert rows == [reason.value for reason in Unknown]


def test_every_family_of_the_process_is_told(root: Path) -> None:
    text = sections(root)["The daemon"]
    standard = {sample.name for metric in own() for sample in metric.samples if "process_" in sample.name}
    assert standard == set(re.findall(r"`(process_\w+)`", text))


def test_the_reporters_families_are_told_as_such(root: Path) -> None:
    assert set(told(sections(root)["The reporter"])) == {each.name for each in tally.FAMILIES}


@pytest.mark.parametrize("family", [*families.FAMILIES, *tally.FAMILIES], ids=lambda family: family.name)
def test_names_keep_the_rules(family: families.Family) -> None:
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
    assert {*collector.COUNTERS, *collector.BROKER_COUNTERS} == {*CounterName}
    assert {*collector.COUNTERS_BY_REASON, CounterByReason.BROKER_REFUSED} == {*CounterByReason}


@pytest.mark.parametrize("counted", [*CounterName, *CounterByReason])
def test_every_counter_counts_something(root: Path, counted: CounterName | CounterByReason) -> None:
    what = f"counters[{type(counted).__name__}.{counted.name}"
    assert any(what in path.read_text() for path in root.glob("resolver/**/*.py"))


def test_nothing_is_counted_under_a_name_that_is_spelled_out(root: Path) -> None:
    # Those of the API's connections are shown by the API.
    others = {root / "resolver/serve/http.py", *(root / "resolver/api").iterdir()}
    modules = [path for path in root.glob("resolver/**/*.py") if path not in others]
    assert [path for path in modules if re.search(r"\b_?counters\[f?\"", path.read_text())] == []
