"""The families of ``--hami-metrics`` against the list of names, labels and types that HAMi has published."""

import json
from pathlib import Path
from typing import Any

import pytest

from resolver.metrics.family import FAMILIES

PUBLISHED: dict[str, Any] = json.loads((Path(__file__).parents[2] / "fixtures/hami_metrics.json").read_text())
LISTED: dict[str, dict[str, Any]] = PUBLISHED["families"]
OURS = [family for family in FAMILIES.values() if family.section == "hami"]
#: Families whose values the resolver can't know.
NOT_KNOWN = {"hami_host_gpu_ecc_errors_total", "MigInfo"}


def test_every_hami_family_is_published_or_listed_unknown() -> None:
    assert {family.name for family in OURS} == LISTED.keys() - NOT_KNOWN


@pytest.mark.parametrize("family", OURS, ids=lambda family: family.name)
def test_labels_and_types_are_hamis(family: Any) -> None:
    listed = LISTED[family.name]
    assert family.kind == listed["type"]
    assert list(family.labels) == [*listed["labels"], *PUBLISHED["every_series_has"]]


def test_whatever_kais_monitor_exports_is_here() -> None:
    assert set(PUBLISHED["kai"]) <= {family.name for family in OURS}
