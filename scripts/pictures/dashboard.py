"""Draw docs/dashboard.svg: the dashboard's upper half, from its own queries on a simulated node.

    .venv/bin/python -m scripts.pictures.dashboard [--minutes 10] [--record FILE | --from FILE]

The simulation takes ten minutes: three as a dry run, then with repairs. A process starts, the driver hangs for a while,
a container ends, a GPU overheats. Prometheus scrapes the node and answers the dashboard's queries unchanged. The
answers can be saved to a file and drawn again.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import random
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, PercentFormatter

from tests.fakes.daemon import BOUND, Daemon
from tests.fakes.gpu import DEFAULT_DEVICES
from tests.fakes.monitored import PODS, dashboard, jobs, legend, name_pods, queries
from tests.fakes.node import Node
from tests.fakes.prometheus import HamiMonitor, Prometheus
from tests.fakes.scene import Case, full_scene, settle
from tests.fakes.state import Hang

PLACE: Final = Path(__file__).parent.parent.parent / "docs" / "dashboard.svg"
POINTS: Final = 100  # of each curve
LAST_ROW: Final = 40  # of Grafana's grid; what is below is about GPUs and the daemon itself
_MOST_NAMES: Final = 6  # of a legend
_UNITS: Final = {"percentunit": PercentFormatter(1), "bytes": EngFormatter("B"), "s": EngFormatter("s")}

Json = dict[str, Any]
Answer = Sequence[tuple[Mapping[str, str], Sequence[tuple[float, float]]]]


class Story:
    """Events on the node, scheduled by the share of time elapsed."""

    DRY: Final = 0.3  # until then nothing is written
    LATE: Final = 0.45  # a process starts
    HANG: Final = (0.55, 0.6)
    ENDS: Final = 0.75  # a container ends
    HOT: Final = 0.8

    def __init__(self, node: Node, cases: list[Case]) -> None:
        self._node, self._cases = node, cases
        self._done: set[str] = set()
        self._random = random.Random(7)
        self._living = [(case, self._random.uniform(0, math.tau)) for case in cases if not case.ended]

    def tell(self, share: float) -> None:
        """Trigger the events due at this share of the time."""
        for case, phase in self._living:
            wave = 0.75 + 0.2 * math.sin(phase + share * 25) + self._random.uniform(-0.05, 0.05)
            case.tenant.set_load(max(1, round((case.load or 8) * wave)))
        self._devices(share)
        hangs = self.HANG[0] <= share < self.HANG[1]
        if self._once("hang", when=hangs):
            self._node.gpu.set_faults(hang=Hang.UTILIZATION)
        if self._once("answers", when=share >= self.HANG[1]):
            self._node.gpu.set_faults()
        if self._once("late", when=share >= self.LATE):
            first = self._cases[0]
            first.container.tenant(load=6, devices=[first.device])
        if self._once("ends", when=share >= self.ENDS):
            container = next(case.container for case in self._cases if case.container.name == "batch")
            self._living = [each for each in self._living if each[0].container is not container]
            container.stop()

    def _once(self, what: str, *, when: bool) -> bool:
        if not when or what in self._done:
            return False
        self._done.add(what)
        return True

    def _devices(self, share: float) -> None:
        hot = share >= self.HOT
        warm = 58 + round(6 * math.sin(share * 9))
        first = replace(DEFAULT_DEVICES[0], temperature_c=warm, power_mw=176_000 + round(40_000 * share))
        second = replace(
            DEFAULT_DEVICES[1],
            temperature_c=97 if hot else 66 + round(10 * math.sin(share * 7)),
            power_mw=292_000 if hot else 208_000 + round(20_000 * math.sin(share * 11)),
        )
        self._node.gpu.set_devices((first, second))


def record(minutes: float) -> dict[str, Any]:
    """Play the whole story; returns the final answers to all queries of the dashboard."""
    with tempfile.TemporaryDirectory(prefix="resolver-dashboard-") as directory:
        root = Path(directory)
        root.chmod(0o755)
        with Node(root, "560.35.03") as node:
            cases = full_scene(node)
            settle(cases)
            return _scraped(node, cases, root, minutes * 60)


def _scraped(node: Node, cases: list[Case], root: Path, seconds: float) -> dict[str, Any]:
    containers = list(dict.fromkeys(case.container for case in cases))
    names = name_pods(containers, root / "pods")
    told = [each for each in containers if each.name in PODS]
    options = ["--source", "auto", "--pod-logs-dir", str(root / "pods"), "--metrics-addr"]
    story = Story(node, cases)
    dry = Daemon(node, node.root / "run", *options, "127.0.0.1:0", "--dry-run", wrapper=BOUND)
    with HamiMonitor(told, names) as monitor, dry as daemon:
        address = str(daemon.wait_for("metrics_on")["address"])
        began = time.time()
        prometheus = Prometheus(root / "prometheus", jobs(address, monitor.address))
        with prometheus:
            _play(story, began, seconds, Story.DRY)
            daemon.stop()
            with Daemon(node, node.root / "run", *options, address, wrapper=BOUND):
                _play(story, began, seconds, 1.0)
                return _answers(prometheus, began + 5, time.time())


def _play(story: Story, began: float, seconds: float, until: float) -> None:
    while (share := (time.time() - began) / seconds) < until:
        story.tell(share)
        time.sleep(2)


def _answers(prometheus: Prometheus, start: float, end: float) -> dict[str, Any]:
    step = (end - start) / POINTS
    window = f"{max(10, round(4 * step))}s"
    answers = {}
    for query in queries(dashboard()["panels"]):
        text = query.concrete(window)
        found = (
            prometheus.query(text, end) if query.instant else prometheus.query_range(text, start, end, step)
        )
        answers[f"{query.panel}/{query.ref}"] = [[each.labels, each.points] for each in found]
    return {"start": start, "end": end, "step": step, "answers": answers}


# ---- drawing ------------------------------------------------------------------------------------------------------


def draw(recorded: Json) -> str:
    """Return the picture as SVG. ``recorded`` has ``start``, ``end`` and ``answers`` by panel and query."""
    mpl.rcParams |= {
        "svg.fonttype": "none",
        "svg.hashsalt": "resolver",
        "font.size": 8,
        "path.simplify": True,
    }
    mpl.rcParams |= {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.2,
    }
    figure = plt.figure(figsize=(16, LAST_ROW * 0.32))
    for panel in dashboard()["panels"]:
        spot = panel["gridPos"]
        if spot["y"] + spot["h"] > LAST_ROW:
            continue
        below = 0.1 if panel["type"] == "row" else 2.2  # for the legend
        place = ((spot["x"] + 0.9) / 24, 1 - (spot["y"] + spot["h"] - below) / LAST_ROW)
        size = ((spot["w"] - 1.3) / 24, max(spot["h"] - 1 - below, 0.01) / LAST_ROW)
        axes = figure.add_axes((*place, *size))
        axes.set_title(
            panel["title"], loc="left", fontweight="bold", fontsize=11 if panel["type"] == "row" else 9
        )
        answers = {
            each["refId"]: recorded["answers"][f"{panel['title']}/{each['refId']}"]
            for each in panel.get("targets", ())
        }
        _DRAWS.get(panel["type"], _nothing)(axes, panel, answers, recorded["start"])
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = re.sub(r"\d+\.\d{3,}", lambda each: f"{float(each[0]):.5g}", out.getvalue())
    return re.sub(r"\s*\n\s*", " ", text).replace("</g> <g", "</g>\n<g") + "\n"


def _nothing(axes: Axes, _panel: Json, _answers: Mapping[str, Answer], _start: float) -> None:
    axes.axis("off")


def _stat(axes: Axes, panel: Json, answers: Mapping[str, Answer], _start: float) -> None:
    (_, points), *_ = answers["A"]
    value, unit = points[-1][1], panel["fieldConfig"]["defaults"]["unit"]
    axes.axis("off")
    axes.text(0, 0.2, f"{value:.0%}" if unit == "percentunit" else f"{value:g}", fontsize=20)


def _series(axes: Axes, panel: Json, answers: Mapping[str, Answer], start: float) -> None:
    """Draw curves, stacked if the panel stacks them; a gap stays a gap."""
    defaults = panel["fieldConfig"]["defaults"]
    found = [
        (legend(target["legendFormat"], labels), {round(at): value for at, value in points})
        for target in panel["targets"]
        for labels, points in answers[target["refId"]]
        if any(value for _, value in points)
    ]
    times = sorted({at for _, points in found for at in points})
    minutes = [(at - start) / 60 for at in times]
    heights = [[points.get(at, math.nan) for at in times] for _, points in found]
    names = [name if number < _MOST_NAMES else "" for number, (name, _) in enumerate(found)]
    if "stacking" in defaults["custom"]:
        stacked = [[0.0 if math.isnan(value) else value for value in each] for each in heights]
        axes.stackplot(minutes, stacked, labels=names, alpha=0.8)
    else:
        for name, values in zip(names, heights, strict=True):
            axes.plot(minutes, values, label=name or None, linewidth=1)
    axes.set_ylim(0, defaults.get("max"))
    if defaults["unit"] in _UNITS:
        axes.yaxis.set_major_formatter(_UNITS[defaults["unit"]])
    if any(names):
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=2, fontsize=6, frameon=False)


def _table(axes: Axes, panel: Json, answers: Mapping[str, Answer], _start: float) -> None:
    """Draw the rows that the panel's transformations make: merged by labels, renamed, in order."""
    steps = {step["id"]: step["options"] for step in panel["transformations"]}
    columns: Mapping[str, str] = steps["organize"]["renameByName"]
    merged: dict[frozenset[tuple[str, str]], Json] = {}
    for ref, answer in answers.items():
        for labels, points in answer:
            row = merged.setdefault(frozenset(labels.items()), dict(labels))
            row["Value" if len(answers) == 1 else f"Value #{ref}"] = _short(points[-1][1])
    rows = sorted([str(row.get(name, "-")) for name in columns] for row in merged.values())
    axes.axis("off")
    axes.table(rows, colLabels=list(columns.values()), loc="upper left", cellLoc="left", edges="horizontal")


def _short(value: float) -> str:
    return EngFormatter(places=1)(value) if value >= 1e4 else f"{value:.3g}"


_DRAWS: Final = {"stat": _stat, "timeseries": _series, "table": _table}


def main() -> int:
    """Record and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--record", type=Path, help="keep the answers here")
    parser.add_argument("--from", dest="source", type=Path, help="draw the answers that were kept here")
    chosen = parser.parse_args()
    recorded = record(chosen.minutes) if chosen.source is None else json.loads(chosen.source.read_text())
    if chosen.record is not None:
        chosen.record.write_text(json.dumps(recorded))
    PLACE.write_text(draw(recorded))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
