"""The dashboard and the alerts: Grafana and Prometheus accept them, and their metrics and labels exist."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from resolver.metrics.family import FAMILIES
from tests.charts import CHART
from tests.fakes.monitored import dashboard
from tests.fakes.prometheus import program
from tests.programs import completed

ALERTS = CHART / "files/resolver.rules.yaml"


def lost(there: Any, understood: Any, place: str = "") -> list[str]:
    """Return the parts of ``there`` that ``understood`` lacks or changes; additions don't count."""
    if isinstance(there, dict) and isinstance(understood, dict):
        return [
            each
            for key, value in there.items()
            for each in (
                lost(value, understood[key], f"{place}.{key}") if key in understood else [f"{place}.{key}"]
            )
        ]
    if isinstance(there, list) and isinstance(understood, list) and len(there) == len(understood):
        pairs = enumerate(zip(there, understood, strict=True))
        return [each for n, (one, other) in pairs for each in lost(one, other, f"{place}[{n}]")]
    return [] if there == understood else [f"{place}: {there!r} is read as {understood!r}"]


def test_grafana_accepts_every_field_of_the_dashboard() -> None:
    """Grafana's published dashboard types are the reference: Grafana drops a field that they lack."""
    register_default_plugins()
    read = Dashboard.from_json(dashboard())
    assert lost(dashboard(), json.loads(JSONEncoder().encode(read))) == []
    assert dashboard()["schemaVersion"] == Dashboard().schema_version


def test_panels_show_no_figure_without_data() -> None:
    text = json.dumps(dashboard())
    assert "resolver_build_info" in text
    assert not re.search(r"\bvector\(", text)


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def promtool(*arguments: str | Path) -> None:
    done = completed(program("promtool"), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_when_it_must_and_not_before(root: Path) -> None:
    promtool("check", "rules", ALERTS)
    promtool("test", "rules", root / "tests/fixtures/alerts/resolver.test.yaml")


def test_alerts_use_only_existing_metrics() -> None:
    asked = {name for rule in rules() for name in re.findall(r"\bresolver_\w+", rule["expr"])}
    assert asked <= FAMILIES.keys()


def test_every_alert_has_its_test(root: Path) -> None:
    tests = yaml.safe_load((root / "tests/fixtures/alerts/resolver.test.yaml").read_text())["tests"]
    cases = [case for test in tests for case in test.get("alert_rule_test", ())]
    names = {rule["alert"] for rule in rules() if "alert" in rule}
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == names
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == names
