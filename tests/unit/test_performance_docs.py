"""What the documents say of speed and size is what was measured, and as true today as a count can be."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.bench import hostile, plots, scrape
from tests.bench.__main__ import Row
from tests.bench.usage import Cpu


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return dict(json.loads(plots.DATA.read_text()))


def test_pictures_and_tables_are_those_of_the_figures(measured: dict[str, Any], root: Path) -> None:
    found = plots.Figures(measured)
    for plot in plots.plots(found):
        assert (root / f"docs/{plot.name}.svg").read_text() == plots.draw(plot), "make plots draws it anew"
    for name, table in plots.TABLES.items():
        text = (root / name).read_text()
        assert plots.with_table(text, table(found)) == text, f"{name}: make plots writes it anew"
    text = (root / plots.ATTACKED).read_text()
    assert plots.with_table(text, plots.hostile_table(found), "hostile") == text, "make plots writes it anew"


@pytest.mark.parametrize("shape", scrape.SHAPES, ids=scrape.told)
def test_a_scrape_has_as_many_series_as_is_told(
    shape: tuple[int, int, int, int], measured: dict[str, Any]
) -> None:
    again = 'make bench ARGS="scrape --json scrape.json" plots: make plots ARGS=scrape.json'
    found = plots.Figures(measured)
    now = scrape.scrape(shape)
    assert now.series == plots.series_of(found, shape), again
    size = found.value(f"scrape of {scrape.told(shape)} > text") * 1024
    assert now.text_bytes == pytest.approx(size, rel=0.03), again


def test_the_sum_for_any_node_is_right(root: Path) -> None:
    text = (root / "docs/scaling.md").read_text()
    told = re.search(r"series = (\d+) \+ (\d+) . GPUs \+ (\d+) . pairs", text)
    assert told is not None
    base, each_gpu, each_pair = map(int, told.groups())
    for shape in (*scrape.SHAPES, (3, 7, 2, 5), (16, 1, 16, 1)):
        gpus, containers, each, _ = shape
        assert scrape.scrape(shape).series == base + each_gpu * gpus + each_pair * containers * each


def test_a_process_costs_two_series_and_only_where_that_is_wanted() -> None:
    shape = scrape.USUAL
    more = scrape.scrape(shape, metrics_per_process=True).series - scrape.scrape(shape).series
    gpus, containers, each, processes = shape
    assert gpus > 1
    assert more == 2 * containers * each * processes


def test_what_is_proposed_to_be_dropped_is_missed_by_nobody(root: Path) -> None:
    (config,) = re.findall(r"```yaml\n(.*?)```", (root / "docs/scaling.md").read_text(), re.DOTALL)
    (rule,) = yaml.safe_load(config)["scrape_configs"][0]["metric_relabel_configs"]
    names = rule["regex"].split("|")
    used = "".join(
        path.read_text() for path in (*root.glob("deploy/alerts/*"), *root.glob("deploy/grafana/*"))
    )
    assert [name for name in names if name in used] == []
    told = (root / "docs/metrics.md").read_text()
    assert all(f"`{name}`" in told for name in names)


def test_the_same_figures_taken_over_twice_change_nothing(measured: dict[str, Any]) -> None:
    assert plots.taken_over(measured, measured) == measured
    one = {"machine": measured["machine"], "results": copy.deepcopy(measured["results"][:1])}
    one["results"][0]["value"] = 4711.0
    new = plots.taken_over(measured, one)
    assert new["results"][0]["name"] == measured["results"][0]["name"]
    assert new["results"][0]["value"] == 4711.0


def _attacked(block: float) -> list[dict[str, Any]]:
    seen = hostile.Seen([], [], [], [], block, Cpu(1.0, 2.0), 30.0, 31.0, Counter(), 12.0, 0.2)
    return [Row(*row)._asdict() for row in hostile.rows("4 sieges of 1,024", seen)]


def test_attacks_have_a_table_of_their_own_that_shows_what_is_missed(measured: dict[str, Any]) -> None:
    machine = measured["machine"]
    taken = plots.taken_over(measured, {"machine": machine, "results": _attacked(0.012)})
    taken = plots.taken_over(taken, {"machine": machine, "results": measured["results"]})
    assert taken["results"][: len(measured["results"])] == measured["results"]
    good = plots.hostile_table(plots.Figures(taken))
    assert "| 4 sieges of 1,024 | 12 | **10,000 / 10,000** |" in good
    bad = plots.hostile_table(plots.Figures({"machine": machine, "results": _attacked(0.35)}))
    assert "| 4 sieges of 1,024 | **350** |" in bad
    assert "sieges" not in plots.whole_table(plots.Figures(taken))


def test_what_was_not_measured_is_said_and_nothing_is_drawn() -> None:
    with pytest.raises(plots.PlotError, match="run all of `make bench`"):
        plots.plots(plots.Figures({"machine": {}, "results": []}))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0012, "0.0012"),
        (0.3666, "0.367"),
        (12.09, "12.1"),
        (247.4, "247"),
        (121723.8, "121,724"),
        (26, "26"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert plots.number(value) == text
