"""A node in miniature as Prometheus and Grafana see it: its pods' names, the scrape jobs, the dashboard's queries."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.fakes.container import Container

DASHBOARD: Final = Path(__file__).parent.parent.parent / "deploy/chart/resolver/files/resolver.json"
#: Labels that PodMonitor adds to every target; they must not hide container labels.
TARGET: Final = {
    "node": "gpu-node-1",
    "namespace": "kube-system",
    "pod": "resolver-x7k2p",
    "container": "resolver",
}
#: Pods of the demo's containers; a missing container is in a pod of unknown name.
PODS: Final = {
    "train": ("ml", "train-0"),
    "serve": ("ml", "serve-6d5f9"),
    "batch": ("etl", "nightly-28843"),
    "notebook": ("research", "jupyter-ada"),
    "etl": ("etl", "ingest-1"),
}


class Query(NamedTuple):
    """A query of a panel, as it is in the dashboard; `legend` may be empty."""

    panel: str
    expression: str
    legend: str
    instant: bool

    def concrete(self, **chosen: str) -> str:
        """Put values in place of the dashboard's variables, "All" if none is chosen."""
        text = self.expression.replace("$__rate_interval", "10s")
        text = re.sub(r"\$([a-z]\w*)", lambda found: chosen.get(found[1], ".*"), text)
        assert "$" not in text.replace('"$1"', ""), text
        return text


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def queries(panels: Sequence[Mapping[str, Any]]) -> Iterator[Query]:
    for panel in panels:
        for target in panel.get("targets", ()):
            legend = target["legendFormat"]
            yield Query(
                panel["title"],
                target["expr"],
                "" if legend == "__auto" else legend,
                target.get("instant", False),
            )


def legend(template: str, labels: Mapping[str, str]) -> str:
    if not template:
        return ", ".join(labels.values())
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), template)


def name_pods(containers: Sequence[Container], directory: Path) -> dict[str, tuple[str, str]]:
    """Make kubelet's log directories, which name pods; return namespace and pod by UID."""
    names = {}
    for container in containers:
        names[container.pod_uid] = PODS.get(container.name, ("", ""))
        if container.name in PODS:
            namespace, pod = PODS[container.name]
            (directory / f"{namespace}_{pod}_{container.pod_uid}").mkdir(parents=True)
    return names


def jobs(resolver: str, monitor: str, reporter: str) -> list[dict[str, Any]]:
    """Return the scrape jobs of docs/monitoring.md with the addresses of daemon, HAMi's monitor, and reporter."""
    node = {"node": TARGET["node"]}
    return [
        {
            "job_name": name,
            "honor_labels": honor,
            "static_configs": [{"targets": [address], "labels": labels}],
        }
        for name, address, labels, honor in (
            ("resolver", resolver, TARGET, True),
            ("resolver-report-devices", reporter, node, False),
            ("hami-vgpu-monitor", monitor, node, True),
        )
    ]
