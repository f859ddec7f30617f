"""How long the demo waits, and when it says that the machine is too busy. The demo itself: tests/kernel."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes import measure
from tests.fakes.measure import Row, TooBusy, until_true
from tests.fakes.preflight import busy

CASE: Any = SimpleNamespace(
    wanted=40,
    load=50,
    reason="missing",
    container=SimpleNamespace(known_as="uid_main"),
    tenant=SimpleNamespace(ns_pid=2),
)
WOULD = {"event": "would_repair", "container": "uid_main", "ns_pid": 2}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"pressure/cpu": "some avg10=87.31 avg60=2.00 avg300=0.00 total=9"},
            "in 87 % of the last ten seconds",
        ),
        ({"pressure/cpu": "some avg10=3.00 avg60=99.00 avg300=0.00 total=9", "loadavg": "900 1 1"}, ""),
        ({"loadavg": "100000.5 1 1 1/2 3"}, "the load is 100000, with "),
        ({"loadavg": "0.00 9 9 1/2 3"}, ""),
    ],
)
def test_a_machine_is_busy_where_processes_wait(tmp_path: Path, files: dict[str, str], words: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    said = busy(tmp_path)
    assert words in said
    assert bool(said) == bool(words)


class Slots:
    """One slot, right from some look on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, right_after: int) -> None:
        self.looks, self.progress = 0, list[str]()
        self.row = Row(CASE, 0, 0)
        monkeypatch.setattr(measure, "TIMEOUT_S", 0.05)
        monkeypatch.setattr(measure, "BUSY_TIMEOUT_S", 60.0)

        def look(_: object) -> tuple[Any, int]:
            self.looks += 1
            return SimpleNamespace(hostpid=40 if self.looks > right_after else 0), 50

        monkeypatch.setattr(measure, "look", look)

    def wait(self, machine: str, *events: dict[str, object]) -> None:
        daemon: Any = SimpleNamespace(alive=True, events=list(events))
        until_true([self.row], 0.0, daemon, self.progress.append, lambda: machine)


def test_a_machine_with_nothing_else_to_do_is_given_the_usual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots(monkeypatch, 1_000_000)
    slots.wait("")
    assert slots.row.true_ms is None
    assert slots.row.waited_s < 30
    assert slots.progress == []


def test_a_busy_machine_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots(monkeypatch, 50)  # at 5 ms a look, more than the usual time
    slots.wait("it is busy")
    assert slots.row.true_ms is not None
    assert slots.progress == ["it is busy: waiting longer"]


def test_a_machine_that_does_nothing_is_too_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots(monkeypatch, 1_000_000)
    monkeypatch.setattr(measure, "BUSY_TIMEOUT_S", 0.1)
    with pytest.raises(TooBusy, match=r"it is busy, and after \d+ s not one slot was repaired"):
        slots.wait("it is busy")


def test_a_daemon_that_looked_at_everything_is_wrong_on_a_busy_machine_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots = Slots(monkeypatch, 1_000_000)
    slots.wait("it is busy", WOULD)
    assert slots.row.true_ms is None
    assert slots.row.waited_s < 30, "it waited for what cannot come"
