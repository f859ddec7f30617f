"""Draws docs/dashboard.svg: the dashboard, from what its queries return of a node in miniature.

    .venv/bin/python -m scripts.pictures.dashboard [--minutes 10] [--record FILE | --from FILE]

Ten minutes pass for it: three as a dry run, then as it should be. A process starts, the driver hangs for a while, a
container ends, a GPU gets too hot. Prometheus scrapes all that, and answers the queries as they are in the dashboard.
What it said can be kept in a file and drawn again.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from scripts.pictures.svg import draw
from tests.fakes.daemon import Daemon
from tests.fakes.gpu import DEFAULT_DEVICES
from tests.fakes.monitored import PODS, dashboard, jobs, name_pods, queries
from tests.fakes.node import Node
from tests.fakes.prometheus import HamiMonitor, Prometheus
from tests.fakes.scene import Case, full_scene, settle
from tests.fakes.state import Hang

PLACE: Final = Path(__file__).parent.parent.parent / "docs" / "dashboard.svg"
POINTS: Final = 150  # of each curve
_PORT_SECONDS: Final = 15.0


class Story:
    """What happens on the node, told by the share of the time that has passed."""

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
        """Lets happen what is due."""
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
    """Plays it all; returns what every query of the dashboard answered in the end."""
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
    with HamiMonitor(told, names) as monitor, Daemon(node, [*options, "127.0.0.1:0", "--dry-run"]) as daemon:
        address = _address(daemon)
        began = time.time()
        prometheus = Prometheus(root / "prometheus", jobs(address, monitor.address))
        with prometheus:
            _play(story, began, seconds, Story.DRY)
            daemon.stop()
            with Daemon(node, [*options, address]):
                _play(story, began, seconds, 1.0)
                return _answers(prometheus, began + 5, time.time())


def _address(daemon: Daemon) -> str:
    deadline = time.monotonic() + _PORT_SECONDS
    while time.monotonic() < deadline:
        for event in list(daemon.events):
            if event["event"] == "metrics_on":
                return str(event["address"])
        time.sleep(0.05)
    raise RuntimeError(f"no metrics within {_PORT_SECONDS} s: {daemon.last_words()}")


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


@contextmanager
def _named(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"{what} ({time.monotonic() - began:.0f} s)", file=sys.stderr)


def main() -> int:
    """Records and draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--record", type=Path, help="keep the answers here")
    parser.add_argument("--from", dest="source", type=Path, help="draw the answers that were kept here")
    chosen = parser.parse_args()
    if chosen.source is not None:
        recorded = json.loads(chosen.source.read_text())
    else:
        with _named("recorded"):
            recorded = record(chosen.minutes)
    if chosen.record is not None:
        chosen.record.write_text(json.dumps(recorded))
    PLACE.write_text(draw(dashboard(), recorded))
    print(PLACE, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
