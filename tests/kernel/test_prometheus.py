"""A real Prometheus scrapes a real daemon: the dashboard has data, and alerts fire only with a cause."""

import math
import re
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.fakes.daemon import Daemon
from tests.fakes.gpu import DEFAULT_DEVICES
from tests.fakes.kube import KubeServer
from tests.fakes.monitored import PODS, TARGET, dashboard, jobs, legend, name_pods, queries
from tests.fakes.node import Node
from tests.fakes.prometheus import HamiMonitor, Prometheus
from tests.fakes.reported import NODE
from tests.fakes.reporter import Reporter
from tests.fakes.scene import full_scene, settle
from tests.kernel.conftest import Start
from tests.patience import until

FAST = ("--interval", "100ms", "--nvml-interval", "500ms")
MENDED, IN_THE_MAP = "What the sources lost, missed and mended", "Processes in the map"
WRITES = "Success of writes"
UTILIZATION = "resolver_container_utilization_ratio"


def address(daemon: Daemon) -> str:
    return str(daemon.wait_for("metrics_on")["address"])


def test_every_query_of_the_dashboard_returns_data(
    node: Node, start: Start, source: str, tmp_path: Path
) -> None:
    cases = full_scene(node)
    settle(cases)
    node.gpu.set_devices((DEFAULT_DEVICES[0], replace(DEFAULT_DEVICES[1], ecc=(2, 2))))
    containers = list(dict.fromkeys(case.container for case in cases))
    names = name_pods(containers, tmp_path / "pods")
    daemon = start(node, *FAST, "--metrics-addr", "127.0.0.1:0", "--pod-logs-dir", str(tmp_path / "pods"))
    began = time.time()
    with ExitStack() as stack:
        kube = stack.enter_context(KubeServer(tmp_path / "kube"))
        kube.set_node(NODE)
        reporter = Reporter(kube, str(daemon.socket))
        stack.callback(reporter.stop)
        monitored = [each for each in containers if each.name in PODS]
        monitor = stack.enter_context(HamiMonitor(monitored, names))
        scraped = jobs(address(daemon), monitor.address, f"127.0.0.1:{reporter.port}")
        prometheus = stack.enter_context(Prometheus(tmp_path / "prometheus", scraped))
        wanted = {
            (*PODS[name], name): sum(
                case.load or 0 for case in cases if case.container.name == name and not case.ended
            )
            / 100
            for name in PODS
        }

        def loads() -> dict[tuple[str, ...], float]:
            found = prometheus.query(
                f"sum by (namespace, pod, container) ({UTILIZATION}{{namespace!='', node='gpu-node-1'}})"
            )
            return {
                tuple(each.labels[label] for label in ("namespace", "pod", "container")): round(each.value, 2)
                for each in found
            }

        until(lambda: loads() == wanted, "every container's true load")
        (nameless,) = prometheus.query(f'{UTILIZATION}{{container="legacy"}}')
        assert not {"pod", "namespace"} & nameless.labels.keys(), (
            "a sample without a pod gets none from its target"
        )
        until(
            lambda: prometheus.query("resolver_source == 1")[0].labels["resolver_source"] == source,
            f"source {source}",
        )
        # A rate needs two scrapes with every family. A scan has no losses and no map size; the reporter is idle
        # between them.
        empty = {WRITES, *((MENDED, IN_THE_MAP) if source == "scan" else ())}
        everywhere: dict[str, str] = {}
        pod = {"node": "gpu-node-1|gpu-node-2", "pod": "train-0"}
        for chosen in (everywhere, {"node": TARGET["node"]}, pod):
            missing = partial(_without_data, prometheus, chosen)
            until(lambda missing=missing: missing() == empty, f"data for every query with {chosen}")  # type: ignore[misc]
        here = {"namespace": "ml", "pod": "train-0", "node": TARGET["node"]}
        for variable in dashboard()["templating"]["list"][1:]:
            values = prometheus.label_values(re.sub(r"\$\w+", ".*", variable["query"]["query"]))
            assert here[variable["name"]] in values
        for query in queries(dashboard()["panels"]):
            if not query.instant and query.panel not in empty:
                until(
                    lambda q=query: prometheus.query_range(q.concrete(), began, time.time()),  # type: ignore[misc]
                    f"a curve for {query.panel}",
                )


def _without_data(prometheus: Prometheus, chosen: dict[str, str]) -> set[str]:
    """Return panels with a query that has no finite value; fail if a result can't fill its legend."""
    found = set()
    asked = list(queries(dashboard()["panels"]))
    assert len(asked) > 40
    for query in asked:
        answer = prometheus.query(query.concrete(**chosen))
        if not any(math.isfinite(each.value) for each in answer):
            found.add(query.panel)
        labels = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
        for each in answer:
            # Unknown labels are absent; all others must be there.
            assert labels <= each.labels.keys() | {"namespace", "pod"}, (query, each.labels)
        series = [legend(query.legend, each.labels) for each in answer]
        assert len(set(series)) == len(series) or not query.legend, f"names twice: {query.panel} {series}"
    return found
