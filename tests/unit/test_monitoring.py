"""What deploy/ has for Grafana and Prometheus: the files are those that are written, and speak of what there is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from resolver import __version__
from resolver.metrics import families, hami_names
from resolver.metrics.own import collect as own
from tests.fakes.monitored import Query, dashboard, queries
from tests.fakes.prometheus import program

#: What Prometheus itself says of a target, and the labels that it gives to everything of it.
OF_TARGETS = {
    "up": (),
    "scrape_duration_seconds": (),
    "scrape_samples_scraped": (),
}
TARGET_LABELS = {"job", "instance", "node"}
KUBERNETES = [{"role": "pod", "namespaces": {"names": ["resolver"]}}]
#: Labels that the dashboard's own queries make.
MADE = {"who"}
#: Words of the query language that are used.
WORDS = (
    *(
        "sum",
        "max",
        "min",
        "count",
        "avg",
        "topk",
        "bottomk",
        "quantile",
        "histogram_quantile",
        "absent",
        "changes",
    ),
    *(
        "rate",
        "increase",
        "max_over_time",
        "by",
        "on",
        "and",
        "or",
        "without",
        "group_left",
        "ignoring",
        "group",
        "last_over_time",
        "label_replace",
        "label_join",
    ),
)


def metrics() -> dict[str, set[str]]:
    """Every series that there can be, with its labels."""
    found: dict[str, set[str]] = {name: set(labels) for name, labels in OF_TARGETS.items()}
    for family in (*families.FAMILIES, *hami_names.FAMILIES):
        if family.kind == "histogram":
            found |= {f"{family.name}_{part}": set(family.labels) for part in ("sum", "count")}
            found[f"{family.name}_bucket"] = {*family.labels, "le"}
        else:
            found[family.name] = set(family.labels)
    found |= {sample.name: set() for metric in own() for sample in metric.samples}
    return found


def spoken_of(expression: str) -> tuple[set[str], set[str]]:
    """Metrics and labels in a query."""
    labels = set(
        re.findall(r'"([a-z_]+)"', re.sub(r"\{[^}]*\}", " ", expression))
    )  # of label_replace and label_join
    expression = re.sub(r'(\{[^}]*\})|"[^"]*"', r"\1", expression)
    for inside in re.findall(r"\{([^}]*)\}", expression):
        labels |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside))
    for group in re.findall(r"\b(?:by|on|without|ignoring|group_left) \(([^)]*)\)", expression):
        labels |= set(re.findall(r"\w+", group))
    left = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|on|without|ignoring|group_left) \([^)]*\)", " ", expression)
    return set(re.findall(r"[a-zA-Z_]\w*", left)) - set(WORDS), labels


def holds(expression: str) -> None:
    """Fails where a query speaks of a metric or a label that is not there."""
    names, labels = spoken_of(expression)
    known = metrics()
    assert names, expression
    assert names <= known.keys(), f"not a metric: {names - known.keys()} in {expression}"
    there = TARGET_LABELS.union(*(known[name] for name in names))
    assert labels - MADE <= there, f"not a label: {labels - there} in {expression}"


@pytest.fixture(scope="module")
def written(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("deploy")
    subprocess.run([sys.executable, root / "scripts/monitoring.py", place], cwd=root, check=True)
    return place


@pytest.mark.parametrize("name", ["grafana/resolver.json", "alerts/prometheusrule.yaml"])
def test_the_files_are_those_that_are_written(written: Path, root: Path, name: str) -> None:
    now, then = (written / name).read_text(), (root / "deploy" / name).read_text()
    assert now == then, f"deploy/{name} is not what scripts/monitoring.py writes: make monitoring"


# ---- the dashboard ------------------------------------------------------------------------------------------------


def lost(there: Any, understood: Any, place: str = "") -> list[str]:
    """What is in the one and not, or otherwise, in the other; what that has besides does not matter."""
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


def test_grafana_understands_every_word_of_it() -> None:
    """By the types that Grafana publishes of its dashboards: what these do not know would be lost."""
    register_default_plugins()
    read = Dashboard.from_json(dashboard())
    assert lost(dashboard(), json.loads(JSONEncoder().encode(read))) == []
    assert dashboard()["schemaVersion"] == Dashboard().schema_version


def test_what_grafana_does_not_know_is_noticed() -> None:
    register_default_plugins()
    changed = dashboard()
    changed["panels"][0]["gridPos"]["z"] = 1
    changed["panels"][0]["options"]["colourMode"] = "value"
    found = lost(changed, json.loads(JSONEncoder().encode(Dashboard.from_json(changed))))
    assert found == [".panels[0].gridPos.z", ".panels[0].options.colourMode"]


def test_it_has_its_version() -> None:
    major, minor, patch = map(int, re.findall(r"\d+", __version__)[:3])
    assert dashboard()["version"] == major * 1_000_000 + minor * 1000 + patch
    assert f"resolver {__version__} " in dashboard()["description"]


@pytest.mark.parametrize(
    "query", list(queries(dashboard()["panels"])), ids=lambda query: f"{query.panel} {query.ref}"
)
def test_a_query_speaks_of_metrics_and_labels_that_there_are(query: Query) -> None:
    holds(query.expression)
    _, labels = spoken_of(query.expression)
    assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) <= labels, "its legend has what it does not keep"


def test_what_is_not_there_is_noticed() -> None:
    for wrong in (
        'sum by (reason) (rate(resolver_repair_total{node=~"$node"}[5m]))',
        'sum by (cause) (resolver_unresolved_slots{node=~"$node"})',
        'resolver_ready{pod=~"$pod"}',
    ):
        with pytest.raises(AssertionError, match="not a "):
            holds(wrong)


def test_every_family_of_containers_slots_gpus_and_costs_is_shown() -> None:
    shown = set[str]().union(*(spoken_of(query.expression)[0] for query in queries(dashboard()["panels"])))
    for part in (
        "container_utilization",
        "container_memory",
        "unresolved_slots",
        "repairs_total",
        "gpu_healthy",
    ):
        assert any(part in name for name in shown), part
    assert {"resolver_source", "resolver_pass_duration_seconds_bucket", "process_cpu_seconds_total"} <= shown


def test_panels_stand_beside_each_other_and_on_nothing() -> None:
    taken: dict[tuple[int, int], str] = {}
    titles = [panel["title"] for panel in dashboard()["panels"]]
    assert len(set(titles)) == len(titles)
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
    assert len(taken) == 24 * (1 + max(y for _, y in taken)), "a hole"


def test_what_a_panel_paints_is_one_of_its_series() -> None:
    """An override by name that meets nothing is a colour that nobody sees."""
    states = {"resolved", "unresolved", "dead", "bpf", "netlink", "scan"}
    for panel in dashboard()["panels"]:
        columns = set()
        for step in panel.get("transformations", ()):
            columns |= set(step["options"].get("renameByName", {}).values())
        legends = {query.legend for query in queries([panel])}
        for override in panel.get("fieldConfig", {}).get("overrides", ()):
            name, how = override["matcher"]["options"], override["matcher"]["id"]
            known = (
                columns | legends | states if how == "byName" else {query.ref for query in queries([panel])}
            )
            assert name in known, f"{panel['title']}: {name}"


# ---- the alerts ---------------------------------------------------------------------------------------------------


def rules(root: Path) -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((root / "deploy/alerts/resolver.rules.yaml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_when_it_must_and_not_before(root: Path) -> None:
    promtool("check", "rules", root / "deploy/alerts/resolver.rules.yaml")
    promtool("test", "rules", root / "tests/fixtures/alerts/resolver.test.yaml")


def test_every_alert_has_its_test(root: Path) -> None:
    tests = yaml.safe_load((root / "tests/fixtures/alerts/resolver.test.yaml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    names = {rule["alert"] for rule in rules(root)}
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == names
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == names


def test_every_alert_has_its_page_and_every_page_its_alert(root: Path) -> None:
    pages = {path.stem for path in (root / "docs/runbooks").glob("Resolver*.md")}
    assert pages == {rule["alert"] for rule in rules(root)}
    for rule in rules(root):
        page = rule["annotations"]["runbook"]
        assert page == f"docs/runbooks/{rule['alert']}.md"
        text = (root / page).read_text()
        assert text.startswith(f"# {rule['alert']}\n")
        for heading in ("## What it means", "## What to check", "## What to do"):
            assert heading in text, f"{page} has no {heading!r}"
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}


def test_alerts_have_links_where_it_is_said_where_to(root: Path, tmp_path: Path) -> None:
    made = [sys.executable, str(root / "scripts/monitoring.py"), str(tmp_path)]
    base = "https://git.example.com/resolver/blob/main"
    subprocess.run([*made, "--runbook-base", f"{base}/"], cwd=root, check=True)
    (group,) = yaml.safe_load((tmp_path / "alerts/resolver.rules.yaml").read_text())["groups"]
    operators = yaml.safe_load((tmp_path / "alerts/prometheusrule.yaml").read_text())
    assert operators["spec"]["groups"] == [group]
    for with_link, without in zip(group["rules"], rules(root), strict=True):
        assert with_link["annotations"].pop("runbook_url") == f"{base}/docs/runbooks/{without['alert']}.md"
        assert with_link == without
    promtool("check", "rules", tmp_path / "alerts/resolver.rules.yaml")


def test_alerts_speak_of_metrics_that_there_are(root: Path) -> None:
    for rule in rules(root):
        holds(rule["expr"])


def test_the_operators_object_has_the_same_alerts(root: Path) -> None:
    made = yaml.safe_load((root / "deploy/alerts/prometheusrule.yaml").read_text())
    assert (made["apiVersion"], made["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    plain = yaml.safe_load((root / "deploy/alerts/resolver.rules.yaml").read_text())
    assert made["spec"] == plain


def test_runbooks_name_metrics_that_there_are(root: Path) -> None:
    known = metrics().keys() | {"resolver_internal_error"}
    for page in (*(root / "docs/runbooks").glob("*.md"), root / "docs/monitoring.md"):
        for name in re.findall(r"\b(?:resolver|process)_[a-z_]+", page.read_text()):
            assert name in known, f"{page.name} names {name}"


# ---- the page -----------------------------------------------------------------------------------------------------


def blocks(root: Path, begins: str) -> list[Any]:
    """YAML in docs/monitoring.md that begins so."""
    text = (root / "docs/monitoring.md").read_text()
    return [block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if block.startswith(begins)]


def test_prometheus_takes_the_scrape_settings_of_the_page(root: Path, tmp_path: Path) -> None:
    found = blocks(root, "scrape_configs:")
    assert len(found) == 2
    for number, block in enumerate(found):
        (job,) = yaml.safe_load(block)["scrape_configs"]
        assert "resolver" in job["job_name"], "the alerts know it by its name"
        assert job["honor_labels"] is True
        assert "node" in [each["target_label"] for each in job["relabel_configs"] if "target_label" in each]
        # Debian builds Prometheus without this way to find targets.
        assert job.pop("kubernetes_sd_configs", KUBERNETES) == KUBERNETES
        settings = tmp_path / f"{number}.yaml"
        settings.write_text(yaml.safe_dump({"scrape_configs": [job]}))
        promtool("check", "config", "--syntax-only", settings)


def test_the_operators_object_of_the_page_keeps_the_labels_of_containers(root: Path) -> None:
    (block,) = blocks(root, "apiVersion: monitoring.coreos.com/v1")
    monitor = yaml.safe_load(block)
    assert monitor["kind"] == "PodMonitor"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["honorLabels"] is True
    node = {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}
    assert node in endpoint["relabelings"]


def test_the_page_has_every_alert_with_its_severity(root: Path) -> None:
    text = (root / "docs/monitoring.md").read_text()
    told = re.findall(
        r"^\| \[(\w+)\]\(runbooks/(\w+)\.md\) \| (\w+) \| (.+?) \| (.+) \|$", text, re.MULTILINE
    )
    assert [(name, page, severity, wait) for name, page, severity, wait, _ in told] == [
        (rule["alert"], rule["alert"], rule["labels"]["severity"], rule.get("for", "at once"))
        for rule in rules(root)
    ]


def test_the_picture_is_of_this_dashboard(root: Path) -> None:
    picture = (root / "docs/dashboard.svg").read_text()
    shown = re.findall(r'<text[^>]*font-weight="600">([^<]+)</text>', picture)
    titles = [escape(panel["title"]) for panel in dashboard()["panels"]]
    assert [title for title in titles if title not in shown] == [], "python -m scripts.pictures.dashboard"


def test_links_of_runbooks_lead_somewhere(root: Path) -> None:
    for page in (root / "docs/runbooks").glob("*.md"):
        for target, _, section in (
            link.partition("#") for link in re.findall(r"\]\(([^)]+)\)", page.read_text())
        ):
            there = (page.parent / target).resolve()
            assert there.exists(), f"{page.name} links to {target}"
            headings = re.findall(r"^#+ (.+)$", there.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert not section or section in anchors, f"{page.name} links to #{section} of {target}"
