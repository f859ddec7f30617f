"""One line per event, for any names of tenants' files; a trouble is logged when it begins and ends."""

import json
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from resolver.base import budget
from resolver.base import journal as log
from resolver.base.event_log import EventLog
from resolver.base.reasons import RepairReason

HOSTILE = 'a b="c"\n2030-01-01 [info] repair \x1b[31mred\x1b[0m\r\x00\x9b\udcff\u2028\u202eend'


@pytest.fixture(autouse=True)
def _restored() -> Any:
    yield
    structlog.reset_defaults()


def said(capsys: pytest.CaptureFixture[str], log_format: str, level: str, tell: Callable[[Any], None]) -> str:
    log.setup_logging(log_format, level)
    tell(log.Journal().log)
    return capsys.readouterr().err


@pytest.mark.parametrize("log_format", ["json", "auto"])  # without a terminal, auto means JSON
def test_json_lines(capsys: pytest.CaptureFixture[str], log_format: str) -> None:
    text = said(capsys, log_format, "info", lambda log: log.info("repair", slot=3, reason=RepairReason.STALE))
    line = json.loads(text)
    assert list(line)[:3] == ["timestamp", "level", "event"]
    assert line["timestamp"].endswith("Z")
    assert (line["level"], line["event"], line["slot"], line["reason"]) == ("info", "repair", 3, "stale")


def test_a_new_level_holds_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    journal = log.Journal()
    log.setup_logging("json", "error")
    journal.log.info("before")
    log.setup_logging("json", "info")
    journal.log.info("after")
    assert json.loads(capsys.readouterr().err)["event"] == "after"


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_tenant_cannot_write_lines_of_its_own(capsys: pytest.CaptureFixture[str], log_format: str) -> None:
    text = said(
        capsys, log_format, "info", lambda log: log.warning("region_rejected", path=HOSTILE, why=HOSTILE)
    )
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert text[:-1].isprintable()


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_names_reach_a_narrow_standard_error(log_format: str) -> None:
    code = (
        "import sys; from resolver.base import journal as log; log.setup_logging(sys.argv[1]);"
        "log.Journal().log.info('region_found', path='/caf\\u00e9/\\udcff\\u4e16')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, log_format],
        env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"region_found" in done.stderr


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_defect_is_shown_with_where_it_happened(
    capsys: pytest.CaptureFixture[str], log_format: str
) -> None:
    def tell(log: Any) -> None:
        try:
            raise ZeroDivisionError("the very defect")
        except ZeroDivisionError:
            log.exception("internal_error", step="interval")

    text = said(capsys, log_format, "info", tell)
    if log_format == "json":
        text = json.loads(text)["exception"]
    assert "ZeroDivisionError: the very defect" in text
    assert "test_journal.py" in text


def test_trouble_is_logged_when_it_begins_changes_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup_logging("json")
    events = EventLog()
    journal = log.Journal(events)
    journal.record("started")  # logged, but not published as an event
    for why in ("", "", *["no library"] * 2, "no driver", "no library", "no driver", "", "", "no library"):
        journal.trouble("nvml", why, "nvml_unavailable", "nvml_available", device="0")
    started, *lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["event"], line.get("why")) for line in lines] == [
        ("nvml_unavailable", "no library"),
        ("nvml_unavailable", "no driver"),
        ("nvml_available", None),
        ("nvml_unavailable", "no library"),
    ]
    assert all(line["device"] == "0" for line in lines)
    assert started["event"] == "started"
    assert [event.kind for event in events.after(0)] == [line["event"] for line in lines]


def test_unused_files_cost_few_lines_per_directory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant that kept making and removing such a file once caused a line at each sight of it."""
    now = 100.0
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: now))
    log.setup_logging("json")
    journal = log.Journal()
    for _ in range(40):
        now += 0.5
        for about in ("/c/bad", "/c/good"):
            if about == "/c/bad" or now == 110.0:
                journal.record("region_rejected", level="warning", about=about, path=f"{about}/x.cache")
        journal.catch_up()
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    lines = [each for each in said if "bad" in f"{each}"]
    assert 4 < len(lines) < 10
    assert {each["event"] for each in lines} == {"region_rejected", "events_left_out"}
    assert {each["directory"] for each in lines if each["event"] == "events_left_out"} == {"/c/bad"}
    assert [each["event"] for each in said if "good" in f"{each}"] == ["region_rejected"]
